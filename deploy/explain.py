"""Every key of a run spec is explained from the settings models themselves: the reference cannot differ from them."""

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from buffer.errors import SpecError
from buffer.settings import Settings
from deploy.spec import RunSpec


@dataclass(frozen=True)
class Key:
    """One key of the spec."""

    name: str  # dotted; `NAME` stands for a pool's name, `[]` for an item of a list
    kind: str
    default: str | None  # None: the key must be given
    text: str
    inner: type[Settings] | None


def keys(model: type[Settings] = RunSpec, prefix: str = "") -> Iterator[Key]:
    """All keys below a model, depth first, in the order of the code."""
    for name, field in model.model_fields.items():
        inner, suffix = _inner(field.annotation)
        key = Key(
            prefix + name + suffix, _kind(field), _default(field), " ".join((field.description or "").split()), inner
        )
        yield key
        if inner is not None:
            yield from keys(inner, f"{key.name}.")


def explain(name: str) -> list[Key]:
    """The key of that name and those below it; raises SpecError. A pool's real name serves as well as `NAME`."""
    found = list(keys())
    wanted = [part for part in name.replace("[]", "").split(".") if part]

    def matches(key: Key) -> bool:
        parts = key.name.replace("[]", "").split(".")
        return len(parts) >= len(wanted) and all(p in ("NAME", w) for p, w in zip(parts, wanted, strict=False))

    chosen = [key for key in found if matches(key)]
    if not chosen:
        raise SpecError(f"there is no key `{name}`", where="forebay explain", cure="`forebay explain` lists all keys")
    return chosen


def markdown() -> str:
    """The reference as a page."""
    lines = [
        "# Reference: the run spec",
        "",
        "Written by `forebay explain --markdown`. `NAME` is the name of a pool, `[]` an item of a list. Keys without",
        "a default must be given. `forebay check SPEC` prints a spec with all defaults filled in; `--set key=value`",
        "changes a key on the command line.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key in keys():
        default = "**required**" if key.default is None else f"`{key.default}`" if key.default else ""
        cells = (f"`{key.name}`", key.kind.replace("|", "or"), default, key.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _inner(annotation: Any) -> tuple[type[Settings] | None, str]:
    """The settings model in a type, and what stands between the key and the model's keys."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation, ""
    origin = get_origin(annotation)
    for part in get_args(annotation):
        inner, _ = _inner(part)
        if inner is not None:
            return inner, ".NAME" if origin is dict else "[]" if origin is tuple else ""
    return None, ""


def _kind(field: FieldInfo) -> str:
    bounds = []
    signs = {annotated_types.Gt: (">", "gt"), annotated_types.Ge: (">=", "ge")}
    signs |= {annotated_types.Lt: ("<", "lt"), annotated_types.Le: ("<=", "le")}
    for constraint in field.metadata:
        if type(constraint) in signs:
            sign, attribute = signs[type(constraint)]
            bounds.append(f"{sign} {getattr(constraint, attribute)}")
    first, *others = _type_name(field.annotation).split(" | null")
    return first + (f" {', '.join(bounds)}" if bounds else "") + (" | null" if others else "")


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " | ".join("null" if part is type(None) else _type_name(part) for part in parts)
    if origin is dict:
        return "map" if parts[1] is Any else f"map of {_type_name(parts[1])}"
    if origin is tuple:
        return f"list of {_type_name(parts[0])}" if parts[-1] is ... else f"{len(parts)} x {_type_name(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "map"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true/false"}.get(
        getattr(annotation, "__name__", ""), "any"
    )


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Settings) or (
        isinstance(value, dict) and any(isinstance(v, Settings) for v in value.values())
    ):
        return ""
    return json.dumps(value, default=str)
