"""A KV store with moods, imported by workers."""

from pathlib import Path

from seer_kv_local.store import LocalStore


class Moody(LocalStore):
    """The local pool's, but for what the file ``mood`` says."""

    def __init__(self, settings, host):
        super().__init__(settings, host)
        self.file = Path(settings["mood"])

    @property
    def mood(self):
        return self.file.read_text() if self.file.exists() else ""

    def find(self, keys):
        return len(keys) if self.mood == "promises all" else super().find(keys)

    def get(self, keys, blocks):
        if self.mood == "fails":
            raise OSError("the pool is gone")
        if self.mood == "loses all":
            return 0
        return super().get(keys[:-1] if self.mood == "loses the last" else keys, blocks)
