"""KV stores for tests, imported by workers."""


class Failing:
    """Complains when it is made, has nothing, and fails for good some questions after its measurement."""

    def __init__(self, settings, host):
        host.report("the pool's disk is full")
        self.left = 5

    def find(self, keys):
        return 0

    def lacks(self, keys):
        self.left -= 1
        if not self.left:
            raise OSError("the pool is gone")
        return []

    def put(self, keys, blocks):
        raise AssertionError("there was nothing to put")

    def get(self, keys, blocks):
        return 0

    def drop(self, keys):
        pass

    def close(self):
        pass
