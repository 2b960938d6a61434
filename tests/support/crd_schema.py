"""JSON Schema of a Kubernetes custom resource, strict as `kubectl apply` with strict validation.

A CRD names the fields of each object, and the API server drops others silently unless it is asked
to refuse them. Here every object with named fields refuses others, except where the CRD keeps them
(`x-kubernetes-preserve-unknown-fields`).
"""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
"""What a manifest may give. The CRD leaves metadata to the API server, as any object."""


def strict_schema(crd: Path, version: str) -> dict[str, Any]:
    """Returns the schema of one version of the resource in a compressed CRD."""
    content = yaml.load(gzip.decompress(crd.read_bytes()), Loader=yaml.CSafeLoader)
    (entry,) = [entry for entry in content["spec"]["versions"] if entry["name"] == version]
    schema: dict[str, Any] = _strict(entry["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = _METADATA
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return schema


def _strict(schema: Any) -> Any:
    """Refuses unknown fields at all depths; `properties` itself maps names to schemas."""
    if isinstance(schema, list):
        return [_strict(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    strict = {
        key: {name: _strict(inner) for name, inner in value.items()}
        if key == "properties"
        else _strict(value)
        for key, value in schema.items()
    }
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in schema and "additionalProperties" not in schema and not is_open:
        strict["additionalProperties"] = False
    return strict
