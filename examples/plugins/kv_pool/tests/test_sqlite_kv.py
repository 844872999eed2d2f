from seer_host.config_files import load_config
from seer_session.assembly import assemble
from seer_testing import KVPoolContract

from seer_sqlite_kv import SqliteKv


class TestSqliteKv(KVPoolContract):
    def make(self):
        return SqliteKv(24 * self.block_bytes)


def test_a_config_makes_it(tmp_path):
    config = tmp_path / "seer.toml"
    config.write_text('[seer]\nengine = "sim"\nkv_pool = "sqlite_kv"\n')
    slot = assemble(load_config(config)).kv_pool
    assert slot.owner == "sqlite_kv"
    assert slot.strategy.stats().capacity_bytes == 2**30
