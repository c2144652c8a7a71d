"""What a machine of Google Compute Engine is told of itself: the instance's metadata, over HTTP."""

import http.client
import os
import urllib.request
from collections.abc import Mapping

ANSWER_SECONDS = 3.0
FAULTS = (OSError, http.client.HTTPException)  # what reading fails with


def host_of(environment: Mapping[str, str] = os.environ) -> str:
    """Where it is asked for."""
    return environment.get("GCE_METADATA_HOST", "metadata.google.internal")


def read(name: str, *, host: str) -> str:
    """Of the instance. Raises what FAULTS names."""
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this instance
    with direct.open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read().decode(errors="replace").strip()
