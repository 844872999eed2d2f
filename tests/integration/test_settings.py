"""No setting of any plug-in takes infinity, NaN or a count of which the machine dies."""

from importlib.metadata import entry_points

import pytest
from msgspec.inspect import (
    CollectionType,
    CustomType,
    DictType,
    FloatType,
    StructType,
    UnionType,
    VarTupleType,
    type_info,
)
from seer_cli.compare_table import CompareTable
from seer_host.config_files import RolloutTable
from seer_host.tables import SeerTable
from seer_session.prompts import PromptRecord

PLUGINS = {point.name: point.load() for point in entry_points(group="seer") if point.dist is not None}
TABLES = [SeerTable, RolloutTable, CompareTable, PromptRecord]
TABLES += [plugin.Settings for plugin in PLUGINS.values() if hasattr(plugin, "Settings")]


def floats(info, where, seen=()):
    """Yield the name of every float of a type that has no upper or no lower bound."""
    match info:
        case FloatType():
            if (info.le is None and info.lt is None) or (info.ge is None and info.gt is None):
                yield where
        case StructType():
            if info.cls not in seen:
                for field in info.fields:
                    yield from floats(field.type, f"{where}.{field.encode_name}", (*seen, info.cls))
        case UnionType():
            for each in info.types:
                yield from floats(each, where, seen)
        case DictType():
            yield from floats(info.value_type, f"{where}.*", seen)
        case VarTupleType() | CollectionType():
            yield from floats(info.item_type, f"{where}[]", seen)
        case CustomType() | _:
            return


# Checked as a whole, each by a rule of its own: shares and lengths, and constants of a cost model.
CHECKED_ELSEWHERE = ("mean_lengths[]", "rates[][]", "verified[][]", "cost.*", "known_lengths")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.__module__}.{table.__name__}")
def test_every_float_has_both_bounds(table):
    unbounded = list(floats(type_info(table), table.__name__))
    assert [name for name in unbounded if not name.endswith(CHECKED_ELSEWHERE)] == []
