"""The Python of the pages of server and client runs against a server, on simulated instances."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def examples():
    """Return every block of Python with the page that it stands on and its line."""
    for page in ("docs/guides/server.md", "docs/guides/client.md", "serving/client/README.md"):
        text = (ROOT / page).read_text("utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            yield pytest.param(match[1], id=f"{page}:{text.count(chr(10), 0, match.start()) + 1}")


@pytest.mark.parametrize("source", list(examples()))
def test_an_example_of_a_page_runs_and_says_something(serve, monkeypatch, capsys, source, tmp_path):
    (tmp_path / "token.txt").write_text("a-token-of-the-run\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert "http://127.0.0.1:8000" in source
    with serve(token="a-token-of-the-run") as served:
        source = source.replace(
            'Client("http://127.0.0.1:8000"', 'Client("http://127.0.0.1:8000", token="a-token-of-the-run"'
        )
        exec(source.replace("http://127.0.0.1:8000", served.url), {})
    assert capsys.readouterr().out.strip()
