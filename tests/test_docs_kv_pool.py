"""docs/guides/kv-pool.md: its sizes follow its formula, its keys, figures and options exist."""

import re
import tomllib
from pathlib import Path

import pytest

from seer_core.model import InstanceInfo
from seer_core.ports.kv import PoolStats

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guides/kv-pool.md").read_text()


def sizes():
    """Return the rows of the table of sizes: model, layers, values, bytes of a number, per token, per GiB."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines()]
    return [row for row in rows if len(row) == 6 and row[1].isdecimal()]


@pytest.mark.parametrize("row", sizes(), ids=lambda row: row[0])
def test_bytes_per_token_follow_from_the_model(row):
    _, layers, values, number, per_token, per_gib = row
    product = eval(values.replace("x", "*"), {"__builtins__": {}})
    assert int(layers) * product * int(number) == int(per_token.replace(",", ""))
    assert (1 << 30) // int(per_token.replace(",", "")) == int(per_gib.replace(",", ""))


def test_both_kinds_of_attention_are_in_the_table():
    assert len(sizes()) >= 4
    assert any("MLA" in row[0] for row in sizes())


def test_the_config_names_settings_of_the_pool():
    local = pytest.importorskip("seer_kv_local")
    [block] = [body for body in re.findall(r"```toml\n(.*?)```", PAGE, re.S) if "[kv_pool.local]" in body]
    assert set(tomllib.loads(block)["kv_pool"]["local"]) == set(local.Settings.__struct_fields__)


def test_figures_named_are_those_of_the_pool_and_the_instances():
    named = set(re.findall(r"`(\w+_(?:blocks|errors|per_token))`", PAGE))
    assert named
    assert named <= {*PoolStats.__struct_fields__, *InstanceInfo.__struct_fields__}


def test_the_benchmark_has_the_options_shown():
    [command] = re.findall(r"^python -m bench kv_pool (.*)$", PAGE, re.M)
    source = (ROOT / "bench" / "kv_pool.py").read_text() + (ROOT / "bench" / "frame.py").read_text()
    for option in re.findall(r"--\w+", command):
        assert f'"{option}"' in source
