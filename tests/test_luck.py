"""No test sleeps, gives up early or takes a port that another may take: it would depend on luck."""

import ast
import subprocess
from pathlib import Path

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
REMEDY = {
    "sleeps": "wait for what is to happen: tests.support.eventually, or tests.support.virtual_time",
    "gives up early": "wait for PATIENCE_S of tests.support.patience, the one limit of waits that end well",
    "gives a port away": "hold it until the server listens: seer_host.ports",
}
ALLOWED = {
    "tests/support/": "the one wait, virtual time and held ports are made of them",
    "tests/soak/": "campaigns let processes live for times that are drawn by chance",
    "tests/cli/test_status.py": "a process that stands still writes nothing, which only time can show",
    "training/verl/tests/": "run in verl's own environment, without the rest of this checkout",
    "backends/ray/tests/scripted.py": "an engine whose steps take time",
    "backends/remote/tests/fake_servers.py": "a server whose tokens take time",
    "backends/worker/tests/toys.py": "an engine that hangs",
    "backends/sglang/tests/sglang_stores.py": "a store that is slow until the test has seen enough",
}
"""Files and folders that may, and why."""


def is_call_of(node, *names):
    """Return whether a node calls one of these functions, under whichever module's name."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in names


def is_sleep(node):
    """Return whether a node sleeps; ``sleep(0)`` is a turn of the event loop, and instances sleep as well."""
    if not is_call_of(node, "sleep") or not node.args:
        return False
    owner = getattr(node.func, "value", None)
    of_time = owner is None or (isinstance(owner, ast.Name) and owner.id in ("time", "asyncio", "anyio"))
    return of_time and not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)


def gives_up_early(node):
    """Return whether a node waits for seconds, and for fewer than the common patience."""
    if not isinstance(node, ast.Call):
        return False
    limits = [each.value for each in node.keywords if each.arg == "timeout"]
    if is_call_of(node, "wait", "join", "result") and len(node.args) == 1:
        limits += node.args
    elif is_call_of(node, "wait_for", "wait_procs"):
        limits += node.args[1:]
    found = [each.value for each in limits if isinstance(each, ast.Constant)]
    return any(isinstance(each, int | float) and 1 <= each < PATIENCE_S for each in found)


def gives_port_away(node):
    """Return whether a node takes the port of a socket, for use once that is closed."""
    if not isinstance(node, ast.With):
        return False
    opens = any(is_call_of(each.context_expr, "socket", "create_server") for each in node.items)
    match node.body[-1]:
        case ast.Return() as last:
            return opens and any(is_call_of(each, "getsockname") for each in ast.walk(last))
        case ast.Assign(value=ast.Subscript(value=address)):
            return opens and is_call_of(address, "getsockname")
    return False


CHECKS = {
    "sleeps": is_sleep,
    "gives up early": gives_up_early,
    "gives a port away": gives_port_away,
}


def flaws_of(source):
    """Return what in a file's source depends on luck, with its line."""
    nodes = [*ast.walk(ast.parse(source))]
    return [(node.lineno, flaw) for node in nodes for flaw, check in CHECKS.items() if check(node)]


def test_no_test_depends_on_luck():
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in listed.stdout.splitlines():
        path = Path(name)
        of_test = "tests" in path.parts or path.name == "conftest.py" or path.name.startswith("test_")
        if of_test and (ROOT / path).exists() and not name.startswith(tuple(ALLOWED)):
            flaws = flaws_of((ROOT / path).read_text("utf-8"))
            found += [f"{name}:{line} {flaw}; {REMEDY[flaw]}" for line, flaw in flaws]
    assert not found, "\n".join(found)
