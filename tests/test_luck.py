"""No test sleeps, spins, or takes a port that another process may take: its pass would depend on luck."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REMEDY = {
    "sleeps": "wait for what is to happen: tests.support.eventually, or tests.support.virtual_time",
    "spins": "wait with a pause: tests.support.eventually",
    "gives a port away": "hold it until the server listens: tests.support.ports",
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


def is_spin(node):
    """Return whether a node is a loop that looks at a file or the clock again and again without a pause."""
    if not isinstance(node, ast.While) or not all(
        isinstance(each, ast.Assert | ast.Pass) for each in node.body
    ):
        return False
    return any(is_call_of(each, "monotonic", "exists", "is_file", "is_dir") for each in ast.walk(node))


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


def flaws_of(source):
    """Return what in a file's source depends on luck, with its line."""
    checks = {"sleeps": is_sleep, "spins": is_spin, "gives a port away": gives_port_away}
    return [
        (node.lineno, flaw)
        for node in ast.walk(ast.parse(source))
        for flaw, check in checks.items()
        if check(node)
    ]


def files_of_tests():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    for name in listed.stdout.splitlines():
        path = Path(name)
        of_test = "tests" in path.parts or path.name == "conftest.py" or path.name.startswith("test_")
        if of_test and (ROOT / path).exists():
            yield name


@pytest.mark.parametrize(
    ("source", "flaw"),
    [
        ("time.sleep(0.5)", "sleeps"),
        ("async def f():\n    await asyncio.sleep(PAUSE_S)", "sleeps"),
        ("sleep(3)", "sleeps"),
        ("while not path.exists():\n    assert time.monotonic() < end", "spins"),
        ("while not path.is_dir():\n    pass", "spins"),
        ("def f():\n    with socket.create_server(A) as one:\n        return one.getsockname()[1]", "gives"),
        (
            "with socket.socket() as one:\n    one.bind(A)\n    port = one.getsockname()[1]\nuse(port)",
            "gives",
        ),
    ],
)
def test_waits_and_ports_that_depend_on_luck_are_found(source, flaw):
    [(_, found)] = flaws_of(source)
    assert found.startswith(flaw)


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n    await asyncio.sleep(0)",
        "engine.sleep()",
        "run(client.sleep(wait_s=0))",
        "SOURCE = 'time.sleep(600)'",
        "while clock.step():\n    pass",
        "while WORDS not in process.stderr.readline():\n    assert process.poll() is None",
        "with socket.create_server(A) as one:\n    port = one.getsockname()[1]\n    assert start(port)",
        "with socket.create_server(A) as one:\n    yield one.getsockname()[1]",
    ],
)
def test_turns_of_the_event_loop_and_ports_that_are_held_pass(source):
    assert flaws_of(source) == []


def test_no_test_depends_on_luck():
    found = [
        f"{name}:{line} {flaw}; {REMEDY[flaw]}"
        for name in files_of_tests()
        if not name.startswith(tuple(ALLOWED))
        for line, flaw in flaws_of((ROOT / name).read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_what_is_allowed_is_there():
    names = list(files_of_tests())
    for allowed in ALLOWED:
        files = [name for name in names if name.startswith(allowed)]
        assert any(flaws_of((ROOT / name).read_text("utf-8")) for name in files), f"{allowed} needs no leave"
