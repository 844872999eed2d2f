"""A third party's prioritizer: the longest prompt first."""

from msgspec import Struct

from seer_core.plugins.hookspecs import hookimpl


class Settings(Struct, frozen=True):
    shortest: bool = False


class LongestPrompt:
    def __init__(self, sign):
        self.sign = sign
        self.waiting = []

    def push(self, request):
        self.waiting.append(request)

    def peek(self):
        return max(
            self.waiting, key=lambda each: (self.sign * each.group.prompt_tokens, -each.seq), default=None
        )

    def take(self, request):
        self.waiting.remove(request)

    def group_changed(self, group, request):
        pass

    def __len__(self):
        return len(self.waiting)


@hookimpl
def seer_make_prioritizer(settings):
    return LongestPrompt(-1 if settings.shortest else 1)
