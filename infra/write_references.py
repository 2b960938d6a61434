"""Writes the tables of docs/api.md, docs/configuration.md and docs/quotas.md from the code.

    python infra/write_references.py [--check]

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`. With --check nothing is written,
and the exit status is 1 if a table is not what it would be.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eesd_dist.config import Section
from eesd_dist.parameters import Fields
from eesd_dist.telemetry.metrics import ServiceMetrics
from serve_app.config import LiveConfig, ServiceConfig
from serve_app.ingress.load_balancing import Counts
from serve_app.ingress.metrics_page import belief_page
from serve_app.ingress.operator_api import Operated, operator_router
from serve_app.openai.errors import TABLE
from serve_app.openai.keys import ApiKey
from serve_app.openai.middleware.http_metrics import HttpMetrics
from serve_app.openai.openapi import describe_truly
from serve_app.openai.schema import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponsesFields,
    TokenizeFields,
)
from serve_app.openai.schema.unsupported import IGNORED, REFUSED, REFUSED_SOMETIMES
from serve_app.pipeline.interruptions import state_page

DOCS = Path(__file__).resolve().parent.parent / "docs"
UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_gbps": "gigabits per second"}
Json = Mapping[str, Any]


def main(options: list[str]) -> int:
    num_stale = 0
    for name, tables in PAGES.items():
        page = DOCS / name
        before = page.read_text()
        after = before
        for title, write in tables.items():
            start, end = f"<!-- {title} -->\n", f"<!-- end of {title} -->\n"
            head, _, old_table = after.partition(start)
            _, closing, tail = old_table.partition(end)
            assert closing, f"{page.name} has no place for {title}"
            after = f"{head}{start}\n{write()}\n{end}{tail}"
        if after != before:
            num_stale += 1
            if options == ["--check"]:
                print(f"docs/{name} is not what the code says: run make references")
            else:
                page.write_text(after)
    return int(num_stale > 0 and options == ["--check"])


def _fields(model: type[Fields], *, leave_out: type[Fields] | None = None) -> Callable[[], str]:
    def write() -> str:
        schema = model.model_json_schema(by_alias=True)
        shared = {} if leave_out is None else leave_out.model_fields
        rows = [
            (
                f"`{info.alias or name}`",
                _type(schema["properties"][info.alias or name], schema),
                _default(info),
                _sentence(info),
            )
            for name, info in _sorted(model)
            if name not in shared or shared[name].annotation != info.annotation
        ]
        return _table(("field", "type", "default", "meaning"), rows)

    return write


def _shared() -> str:
    schema = ChatFields.model_json_schema(by_alias=True)
    rows = [
        (f"`{name}`", _type(schema["properties"][name], schema), _default(info), _sentence(info))
        for name, info in _sorted(ChatFields)
        if name in CompletionFields.model_fields
        and CompletionFields.model_fields[name].annotation == info.annotation
    ]
    return _table(("field", "type", "default", "meaning"), rows)


def _refused() -> str:
    rows = [(f"`{name}`", _harmless(name)) for name in sorted(REFUSED)]
    rows += [(f"`{name}`", condition) for name, condition in REFUSED_SOMETIMES.items()]
    return _table(("field", "refused"), sorted(rows))


def _harmless(name: str) -> str:
    values, or_empty = REFUSED[name]
    passing = [f"`{json.dumps(value)}`" for value in values] + ["empty or false"] * or_empty
    return f"unless it is {' or '.join(passing)}" if passing else "always"


def _ignored() -> str:
    text = ", ".join(f"`{name}`" for name in sorted(IGNORED)) + "."
    return textwrap.fill(text, width=120, break_on_hyphens=False) + "\n"


def _errors() -> str:
    rows = {
        (str(row.status), f"`{row.type}`", f"`{row.code}`" if row.code else "null") for row in TABLE
    }
    rows.add(("500", "`server_error`", "`internal_error`"))
    return _table(("status", "`type`", "`code`"), sorted(rows))


def _metrics() -> str:
    http = HttpMetrics()
    counts = Counts("")
    families = [
        (family, labels)
        for registry in (ServiceMetrics(model_name="").registry, http.registry, counts.registry)
        for family, labels in _families(registry)
    ]
    for page in (
        state_page(
            is_ready=True, num_interruptions=0, recovery_s=0.0, is_degraded=False, degraded_s=0.0
        ),
        belief_page({"a": {"mean": 0.5, "weight": 1.0, "num_live": 0}}, labels="a"),
    ):
        for family in text_string_to_metric_families(page.decode()):
            families.append((family, sorted({n for s in family.samples for n in s.labels})))
    rows = {
        (f"`{_served_name(family)}`", family.type, ", ".join(labels), family.documentation)
        for family, labels in families
        if not family.name.endswith("_created")
    }
    return _table(("metric", "type", "labels", "meaning"), sorted(rows))


def _families(registry: CollectorRegistry) -> Iterator[tuple[Metric, Sequence[str]]]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            yield family, getattr(collector, "_labelnames", ())


def _served_name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def _operators() -> str:
    app = FastAPI()
    app.include_router(operator_router(cast("Operated", None), has_key=True))
    describe_truly(app, has_key=True)
    rows = [
        (
            f"`{method.upper()} {path}`",
            " ".join(operation["description"].split()),
            ", ".join(sorted(operation["responses"])),
        )
        for path, operations in app.openapi()["paths"].items()
        for method, operation in operations.items()
    ]
    return _table(("endpoint", "answer", "status"), rows)


def _keys(model: type[Section]) -> Callable[[], str]:
    """Returns a writer of all keys of a section and of those in it."""

    def write() -> str:
        rows = list(_rows(model, prefix=""))
        return _table(("key", "type", "default", "meaning"), rows)

    return write


def _rows(model: type[Section], *, prefix: str) -> Iterator[tuple[str, ...]]:
    schema = model.model_json_schema()
    inner: list[tuple[type[Section], str]] = []
    for name, info in model.model_fields.items():
        section = _section_of(info)
        if section is not None:
            inner.append((section, f"{prefix}{name}."))
            continue
        unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
        kind = _says(info) or _type(schema["properties"][name], schema)
        yield (
            f"`{prefix}{name}`",
            f"{kind}, {unit}" if unit else kind,
            _default(info),
            _sentence(info),
        )
    for section, path in inner:
        yield from _rows(section, prefix=path)


def _section_of(info: FieldInfo) -> type[Section] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _says(info: FieldInfo) -> str | None:
    """Describes an optional section; its keys are listed where it is not optional."""
    kinds = [kind for kind in get_args(info.annotation) if kind is not type(None)]
    is_section = kinds and isinstance(kinds[0], type) and issubclass(kinds[0], Section)
    return "the keys of that section" if is_section else None


def _sorted(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return sorted(model.model_fields.items())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if value is None:
        return "none"
    if isinstance(value, tuple | list | Mapping):
        return "`" + json.dumps(value, default=str) + "`" if value else "empty"
    return f"`{json.dumps(value, default=str)}`".replace('`"', "`").replace('"`', "`")


def _sentence(info: FieldInfo) -> str:
    assert info.description, f"no sentence about {info}"
    return " ".join(info.description.split()).replace("|", "\\|")


def _type(schema: Json, root: Json) -> str:
    """Returns a JSON schema in a few words."""
    if "$ref" in schema:
        return _type(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        kinds = dict.fromkeys(
            _type(choice, root) for choice in schema["anyOf"] if choice.get("type") != "null"
        )
        return " or ".join(kinds)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        if "prefixItems" in schema:
            return "list"
        return f"list of {_type(schema.get('items', {}), root)}"
    words = {
        "string": "text",
        "integer": "whole number",
        "object": "object",
        "boolean": "true, false",
    }
    return words.get(kind, kind) + _bounds(schema)


def _bounds(schema: Json) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    after = " above" if "exclusiveMinimum" in schema else " from"
    before = " below" if "exclusiveMaximum" in schema else " to"
    bounds = [f"{word} {_number(bound)}" for word, bound in ((after, low), (before, high))]
    return "".join(
        bound_text
        for bound_text, bound in zip(bounds, (low, high), strict=True)
        if bound is not None
    )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "api.md": {
        "fields of both": _shared,
        "fields of completions": _fields(CompletionFields, leave_out=ChatFields),
        "fields of chats": _fields(ChatFields, leave_out=CompletionFields),
        "fields of responses": _fields(ResponsesFields),
        "fields of tokenize": _fields(TokenizeFields),
        "fields of detokenize": _fields(DetokenizeFields),
        "refused fields": _refused,
        "ignored fields": _ignored,
        "errors": _errors,
        "operators": _operators,
    },
    "configuration.md": {
        "keys": _keys(ServiceConfig),
        "user_config": _keys(LiveConfig),
    },
    "quotas.md": {"keys": _keys(ApiKey)},
    "observability.md": {"metrics": _metrics},
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
