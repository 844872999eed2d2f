"""Settings and a reader of line files, as the tests of the command line share them."""

import json

from tests.support.eventually import PATIENCE_S

SMALL = "[rollout]\nn = 2\nmax_tokens = 8\n"


TECHNIQUES = ["divided_rollout", "context_sched"]


BOUND_S = PATIENCE_S
"""How long to wait for a process before calling it stuck; never reached when all is well."""


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
