"""Kubernetes objects against their schemas: its own as kubernetes-validate ships them, the others in schemas/."""

import functools
import json
import pathlib
from typing import Any

import jsonschema
import kubernetes_validate
import referencing
import yaml

HERE = pathlib.Path(__file__).parent / "schemas"
RELEASES = ("1.33.0", "1.37.0")  # the oldest whose fields may be used, and the newest that is shipped


@functools.cache
def validator(kind: str, api: str, release: str) -> Any:
    """Of the strict schemas: a field that is none is an error too. Raises KeyError for an unknown kind."""
    folder = pathlib.Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{release}-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    registry = referencing.Resource.from_contents(definitions) @ referencing.Registry()
    own = custom().get((kind, api))
    if own is not None:
        metadata = {"$ref": "/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
        schema = {
            "$id": definitions["$id"].replace("_definitions", kind.lower()),
            "type": "object",
            "additionalProperties": False,
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {
                "apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata, "spec": own["spec"]
            },
        }  # fmt: skip
    else:
        group, _, version = api.rpartition("/")
        name = f"{kind}-{group.split('.')[0]}-{version}".replace("--", "-").lower()
        schema = json.loads((folder / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def custom() -> dict[tuple[str, str], dict[str, Any]]:
    schemas = [yaml.safe_load(path.read_text()) for path in sorted(HERE.glob("*.yaml"))]
    return {(schema["kind"], schema["apiVersion"]): schema for schema in schemas}


def faults(document: dict[str, Any]) -> list[str]:
    """What is wrong with an object, in any of the releases."""
    found = []
    for release in RELEASES:
        for error in validator(document["kind"], document["apiVersion"], release).iter_errors(document):
            where = ".".join(map(str, error.absolute_path))
            found.append(f"{document['kind']} {document['metadata'].get('name')} {where}: {error.message}")
    return found
