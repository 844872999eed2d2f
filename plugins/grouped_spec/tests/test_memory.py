"""The memory of earlier responses: what it recalls, what it drops, and what becomes of its file."""

import sqlite3

import pytest
import structlog
from seer_grouped_spec.memory import EarlierResponses

from seer_core.errors import ConfigError
from seer_core.model.arrays import Tokens

PROMPT = (1, 2, 3)


@pytest.fixture
def remembering():
    """Return a function that opens a memory, and fills it with responses to one prompt."""
    opened = []

    def open_memory(*responses, per_prompt=3, max_bytes=1 << 20, file=None):
        memory = EarlierResponses(per_prompt, max_bytes, file)
        opened.append(memory)
        for response in responses:
            memory.remember(PROMPT, Tokens(response))
        return memory

    yield open_memory
    for memory in opened:
        memory.close()


def test_it_recalls_the_newest_responses_to_a_prompt_the_oldest_of_them_first(remembering):
    memory = remembering([1], [2], [3], [4, 5])
    memory.remember((1, 2), Tokens([9]))
    assert memory.recall(list(PROMPT)) == [[2], [3], [4, 5]]
    assert memory.recall((1, 2)) == [[9]]
    assert memory.recall((3,)) == []


def test_beyond_its_bytes_the_oldest_of_all_prompts_go_first(remembering):
    memory = remembering([1] * 5, max_bytes=40)
    memory.remember((7,), Tokens([2] * 5))
    assert memory.recall(PROMPT) == [[1] * 5]
    memory.remember((7,), Tokens([3]))
    assert memory.recall(PROMPT) == []
    assert memory.recall((7,)) == [[2] * 5, [3]]
    memory.remember((7,), Tokens([4] * 11))
    assert memory.recall((7,)) == []


def test_a_file_outlives_the_process_with_its_bounds(remembering, tmp_path):
    file = tmp_path / "earlier.sqlite"
    remembering([1], [2], file=file).close()
    memory = remembering([3], per_prompt=2, max_bytes=8, file=file)
    assert memory.recall(PROMPT) == [[2], [3]]
    memory.close()
    assert remembering([4], max_bytes=4, file=file).recall(PROMPT) == [[4]]


def test_what_was_cleared_is_recalled_no_more_but_by_the_next_process(remembering, tmp_path):
    file = tmp_path / "earlier.sqlite"
    memory = remembering([1], file=file)
    memory.clear()
    assert memory.recall(PROMPT) == []
    memory.remember(PROMPT, Tokens([2]))
    assert memory.recall(PROMPT) == [[2]]
    memory.close()
    assert remembering(file=file).recall(PROMPT) == [[1], [2]]


def test_a_file_has_one_process_at_a_time(remembering, tmp_path):
    file = tmp_path / "earlier.sqlite"
    remembering(file=file)
    with pytest.raises(ConfigError, match=r"earlier_file: .*locked; name a file that no other process uses"):
        EarlierResponses(3, 1 << 20, file)


@pytest.mark.parametrize("content", [b"no database" * 100, None], ids=["damaged", "directory"])
def test_a_file_that_is_no_memory_is_refused(tmp_path, content):
    file = tmp_path / "earlier.sqlite"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"earlier_file: .*; .* or remove this one"):
        EarlierResponses(3, 1 << 20, file)


def test_a_full_disk_ends_the_memory_and_not_the_rollout(remembering, tmp_path):
    memory = remembering([1], file=tmp_path / "earlier.sqlite")
    memory._database.execute("pragma max_page_count = 1")
    with structlog.testing.capture_logs() as logs:
        for number in range(3):
            memory.remember(PROMPT, Tokens([number] * 10_000))
    assert [each["event"] for each in logs] == ["earlier_responses_failed"]
    assert "full" in logs[0]["error"]
    assert memory.recall(PROMPT) == []


def test_a_file_of_another_table_is_refused(tmp_path):
    file = tmp_path / "earlier.sqlite"
    with sqlite3.connect(file) as other:
        other.execute("create table responses (something)")
    with pytest.raises(ConfigError, match=r"earlier_file: .*no such column"):
        EarlierResponses(3, 1 << 20, file)
