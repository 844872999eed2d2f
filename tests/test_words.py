"""The lint of words: each rule has an example that it refuses and one that it accepts."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check-words"
LONG = f"A sentence {'of words ' * 25}.".replace(" of words", "\nof words")


@pytest.fixture(scope="module")
def lint():
    loader = SourceFileLoader("check_words", str(SCRIPT))
    module = module_from_spec(spec_from_loader("check_words", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("refused", "accepted"),
    [
        ("def tell(engine): ...", "def notify(engine): ..."),
        ("class Nursery: ...", "unknown = {}"),
        (
            "def test_nobody_waits(): ...",
            "def test_an_unknown_key_is_an_error_that_says_how_to_mend_it(): ...",
        ),
        ('def f():\n    """Waits that end."""', 'def f():\n    """Send a chunk to its instance."""'),
        ('def f():\n    """What it has written."""', 'def f():\n    """What does a chunk cost?"""'),
        (
            'class Pool:\n    def close(self):\n        """Close the pool."""',
            'def f():\n    """Delete the files."""',
        ),
        ("x = 1  # nobody reads it", "x = 1  # read by the scheduler"),
        ('raise ValueError("whoever sent it knows")', 'raise ValueError("it has no sender")'),
    ],
)
def test_python_is_checked(lint, refused, accepted):
    assert list(lint.in_python(refused, Path("engine.py")))
    assert not list(lint.in_python(accepted, Path("engine.py")))


def test_pages_and_cpp_are_checked(lint):
    assert list(lint.in_page("\n\nWhat is missing is what groups are like."))
    assert not list(lint.in_page("The server notifies the engines.\n\n```\ntell --nobody\n```\n"))
    assert list(lint.in_layout(LONG))
    assert not list(lint.in_layout("- one\n" * 60 + f"\n| a table | {'may be wide ' * 20} |"))
    assert list(lint.in_cpp("int n;  // nobody reads it"))
    assert not list(lint.in_cpp("void append(int n);  // at the end of the text"))
