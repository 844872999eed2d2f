"""The fields of a struct: type in plain words, range, default, unit, and the meaning written below each."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import textwrap
from typing import Any, get_type_hints

import attrs
import msgspec
from msgspec import inspect as types

__all__ = ["Field", "fields_of", "meanings_of"]

BOUNDLESS = 1e100
"""The bound that stands for none; see ``seer_core.plugins.config_types``."""

UNITS = {
    "bytes_per_s": "bytes per second",
    "_bytes_per_token": "bytes per token",
    "_tokens_per_s": "tokens per second",
    "_s_per_token": "seconds per token",
    "flops_per_s": "FLOP per second",
    "flops_per_token": "FLOP per token",
    "_flops": "FLOP",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_s": "seconds",
}
"""Units by the end of a name, which has its unit in it."""

ARRAYS = {
    "Tokens": "list of integers",
    "Logprobs": "list of numbers",
    "TopLogprobs": "list of lists of pairs: an integer, a number",
}
"""What arrays are called in files."""


@attrs.frozen
class Field:
    """One field of a struct, each column in words; ``owner`` is the class that declares it."""

    name: str
    type: str
    range: str
    default: str
    unit: str
    meaning: str
    owner: str
    struct: builtins.type | None = None
    """The struct that the field holds, or a list of which it holds; it has a table of its own."""


def fields_of(struct: type) -> list[Field]:
    """Return the fields of a msgspec Struct, or of a dataclass."""
    meanings = meanings_of(struct)
    if not issubclass(struct, msgspec.Struct):
        assert dataclasses.is_dataclass(struct)
        hints = get_type_hints(struct)
        plain = [
            (each.name, types.type_info(hints[each.name]), each.default)
            for each in dataclasses.fields(struct)
        ]
        return [_field(name, kind, default, meanings, struct) for name, kind, default in plain]
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    return [_field(each.encode_name, each.type, _default(each), meanings, struct) for each in info.fields]


def meanings_of(struct: type) -> dict[str, str]:
    """Return the string below each field, by name; of a field that a base declares, the base's."""
    found: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        if owner.__module__.split(".")[0] in ("builtins", "msgspec"):
            continue
        declared = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(declared, ast.ClassDef)
        body = declared.body
        for field, below in zip(body, [*body[1:], None], strict=True):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
                case ast.AnnAssign(target=ast.Name(id=name)), _:
                    found[name] = ""
    return found


def _default(field: types.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return dataclasses.MISSING if field.required else field.default


def _field(name: str, kind: types.Type, default: Any, meanings: dict[str, str], struct: type) -> Field:
    words, bounds = describe(kind)
    countable = "integer" in words or "number" in words
    unit = next((unit for end, unit in UNITS.items() if countable and name.endswith(end)), "")
    owner = next((each for each in struct.__mro__ if name in inspect.get_annotations(each)), struct)
    return Field(
        name,
        words,
        bounds,
        show(default),
        unit,
        meanings.get(name, ""),
        f"{owner.__module__}.{owner.__qualname__}",
        struct_of(kind),
    )


def struct_of(kind: types.Type) -> type | None:
    """Return the struct that a field holds, or a list of which it holds."""
    match kind:
        case types.StructType(cls=struct):
            return struct
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return struct_of(item)
        case types.UnionType(types=parts):
            return next(filter(None, map(struct_of, parts)), None)
    return None


def show(default: Any) -> str:
    """Return a default as a config would have it."""
    if default is dataclasses.MISSING:
        return "required"
    if default is None:
        return "none"
    if isinstance(default, msgspec.Struct):
        return ""
    if isinstance(default, int) and not isinstance(default, bool) and default > 9999:
        return f"`{default:_}`"
    if isinstance(default, float) and (default >= 1e6 or 0 < default < 1e-3):
        return f"`{default:g}`"
    return f"`{msgspec.json.encode(default).decode()}`"


def describe(kind: types.Type) -> tuple[str, str]:
    """Return the name of a type, and the range of its values."""
    match kind:
        case types.BoolType():
            return "`true` or `false`", ""
        case types.IntType() | types.FloatType():
            return "integer" if isinstance(kind, types.IntType) else "number", bounds_of(kind)
        case types.StrType(pattern=None, min_length=length):
            return "string", "" if length is None else "not empty"
        case types.StrType(pattern=pattern):
            plain = str(pattern).removeprefix("^").removesuffix("$")
            return (f"`{plain}`", "") if plain.isalnum() else ("string", f"`{pattern}`")
        case types.LiteralType(values=values):
            return "one of " + ", ".join(f"`{value}`" if value else '`""`' for value in values), ""
        case types.NoneType():
            return "none", ""
        case types.UnionType(types=parts):
            found = [describe(each) for each in parts if not isinstance(each, types.NoneType)]
            return " or ".join(dict.fromkeys(words for words, _ in found)), "; ".join(
                each for _, each in found if each
            )
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            words, bounds = describe(item)
            return ("list" if words == "any value" else f"list of {plural(words)}"), bounds
        case types.TupleType(item_types=items):
            return f"list of {len(items)}: {', '.join(describe(each)[0] for each in items)}", ""
        case types.DictType(value_type=value):
            words, bounds = describe(value)
            return "table" if words == "any value" else f"table of {plural(words)}", bounds
        case types.StructType():
            return "table", ""
        case types.NamedTupleType(fields=fields):
            return f"list of {len(fields)}: {', '.join(f'`{each.name}`' for each in fields)}", ""
        case types.CustomType(cls=array):
            return ARRAYS[array.__name__], ""
        case types.AnyType():
            return "any value", ""
    raise TypeError(f"no words for {kind!r}: add them in reference.fields.describe")


def plural(words: str) -> str:
    """Return the plural of a type's name."""
    if words in ("integer", "number", "table", "string"):
        return f"{words}s"
    first, space, rest = words.partition(" ")
    return f"{first}s{space}{rest}" if first in ("list", "table") else words


def bounds_of(kind: types.IntType | types.FloatType) -> str:
    """Return the range of a number in words."""
    low = f"at least {number(kind.ge)}" if kind.ge is not None else ""
    low = f"above {number(kind.gt)}" if kind.gt is not None else low
    high = f"at most {number(kind.le)}" if kind.le is not None and kind.le < BOUNDLESS else ""
    high = f"below {number(kind.lt)}" if kind.lt is not None else high
    closed = low.startswith("at least") and high.startswith("at most")
    if closed and kind.ge is not None and kind.le is not None:
        return f"{number(kind.ge)} to {number(kind.le)}"
    return ", ".join(part for part in (low, high) if part)


def number(value: float) -> str:
    """Return a bound as one reads it: powers of two and of ten by their exponents where they are large."""
    if isinstance(value, int) and value > 1 << 19:
        base = value if value & (value - 1) == 0 else value + 1
        if base & (base - 1) == 0:
            return f"2^{base.bit_length() - 1}" + ("" if base == value else " - 1")
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
