"""What the publisher reports between two rows of metrics, summed up.

push      one version applied by one server: push.PushReport
version   one delta that was made: deltas.DeltaCache
"""

import logging
import threading
from typing import Any

_log = logging.getLogger(__name__)

_OF_PUSH = (
    *("sparse", "payload_bytes", "resent_chunks"),
    *("seconds", "transfer_seconds", "staging_seconds", "pause_seconds"),
)
_OF_VERSION = ("delta_bytes", "dense_bytes", "changed", "elements", "whole_tensors", "encode_seconds")


class SyncStats:
    """`event` is called on the fleet's thread, `take` on the trainer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes: list[dict[str, Any]] = []
        self._versions: list[dict[str, Any]] = []

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Of the fleet's; one that is of neither kind goes into the log."""
        if kind in ("push", "version"):
            with self._lock:
                (self._pushes if kind == "push" else self._versions).append(fields)
        else:
            _log.info("%s: %s", kind, fields)

    def take(self) -> dict[str, float]:
        """Sums since the last call: of the versions applied, by all servers, and of the deltas that were made.

        sparse: pushes that were deltas. transfer, staging, pause: see push.PushReport. delta_bytes, dense_bytes,
        changed, elements: of the versions that were compared with the one before them; encode: comparison, transfer to
        the host and encoding of those.
        """
        with self._lock:
            pushes, self._pushes = self._pushes, []
            versions, self._versions = self._versions, []
        return {
            "applied": len(pushes),
            **{name: sum(push[name] for push in pushes) for name in _OF_PUSH},
            "deltas": len(versions),
            **{name: sum(version[name] for version in versions) for name in _OF_VERSION},
        }
