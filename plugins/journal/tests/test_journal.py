"""A process has what an earlier one wrote, in spite of damaged files; another run's journal is refused."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from copy import deepcopy

import msgspec
import pytest
import seer_journal.writer
import structlog
from PIL import Image
from seer_host.config_files import RolloutTable
from seer_host.images import PlacedImages, PromptImage
from seer_journal import DiskJournal
from seer_session.prompts import read_prompts

from seer_core.errors import InputError, OutputError
from seer_core.model import ChunkRecord, PromptGroup, Sampling, TurnRecord
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.ports.engine import ModelInfo
from tests.support.eventually import PATIENCE_S, aeventually

GROUPS = [PromptGroup("a", (1, 2, 3), 2, 6, seed=5), PromptGroup("b", (4,), 1, 4)]


def chunk(journal, request_id, start, tokens, stopped=False):
    record = ChunkRecord("x", len(tokens), 0.0, 1.0, 0, 3, 0, 0, 0)
    journal.chunk(request_id, start, Tokens(tokens), Logprobs([-1.0] * len(tokens)), stopped, record)


def written(directory, **options):
    """Return what a journal has of GROUPS: tokens and finish reason of each response, by group."""
    with DiskJournal(directory, **options) as journal:
        found = journal.begin(GROUPS, 0, {})
    return [[(each.token_ids.tolist(), each.finish_reason) for each in group] for group in found]


@pytest.fixture
def directory(tmp_path):
    """A journal in which a/0 has ended, a/1 has two chunks and b/0 was aborted."""
    with DiskJournal(tmp_path / "journal") as journal:
        assert journal.begin(GROUPS, 0, {}) == [[], []]
        chunk(journal, "a/0", 0, [7, 8])
        chunk(journal, "a/1", 0, [9, 9])
        chunk(journal, "a/0", 2, [10], stopped=True)
        chunk(journal, "a/1", 2, [11, 12])
        chunk(journal, "b/0", 0, [13])
        journal.aborted("b/0")
        asyncio.run(journal.synced())
    return tmp_path / "journal"


ALL = [[([7, 8, 10], "stop"), ([9, 9, 11, 12], None)], [([13], "aborted")]]


def test_another_process_has_it_all(directory):
    assert written(directory) == ALL
    assert written(directory) == ALL  # reading changes nothing


def test_a_response_at_its_limit_is_over(directory):
    with DiskJournal(directory) as journal:
        journal.begin(GROUPS, 0, {})
        chunk(journal, "a/1", 4, [14, 15])
    assert written(directory)[0][1] == ([9, 9, 11, 12, 14, 15], "length")


def test_the_most_probable_tokens_are_kept_and_a_chunk_without_them_is_written_again(tmp_path):
    group = PromptGroup("a", (1, 2, 3), 1, 6, sampling=Sampling(top_logprobs=2), seed=5)
    tops = TopLogprobs.of([[(7, -1.0), (9, -3.0)], [(8, -1.0), (7, -2.0)]])

    def keep(journal, start, answered):
        record = ChunkRecord("x", 2, 0.0, 1.0, 0, 3, 0, 0, 0)
        token_ids, logprobs = Tokens([7, 8]), Logprobs([-1.0, -1.0])
        journal.chunk("a/0", start, token_ids, logprobs, False, record, answered)

    with DiskJournal(tmp_path / "j") as journal:
        assert journal.begin([group], 0, {}) == [[]]
        keep(journal, 0, tops)
        keep(journal, 2, None)
    with DiskJournal(tmp_path / "j") as journal:
        [[found]] = journal.begin([group], 0, {})
        assert (found.token_ids, found.top_logprobs) == ([7, 8], tops)
        keep(journal, 2, tops)
    with DiskJournal(tmp_path / "j") as journal:
        [[found]] = journal.begin([group], 0, {})
        assert list(found.top_logprobs) == [*tops, *tops]
        assert deepcopy(found).top_logprobs == found.top_logprobs
    fewer = msgspec.structs.replace(group, sampling=Sampling(top_logprobs=1))
    with DiskJournal(tmp_path / "j") as journal, pytest.raises(InputError, match="its sampling was"):
        journal.begin([fewer], 0, {})


def test_the_log_probs_of_a_prompt_are_kept_with_its_first_chunk(tmp_path):
    group = PromptGroup("a", (1, 2, 3), 1, 6, sampling=Sampling(prompt_logprobs=1), seed=5)
    prompt = PromptLogprobs(Logprobs([-1.0, -2.0]), TopLogprobs.of([[(7, -0.5)], [(8, -0.5)]]))
    record = ChunkRecord("x", 1, 0.0, 1.0, 0, 3, 0, 0, 0)
    for start, answered in ((0, None), (0, prompt), (1, None)):
        with DiskJournal(tmp_path / "j") as journal:
            found = journal.begin([group], 0, {})[0]
            assert sum(len(each.token_ids) for each in found) == start
            tokens, logprobs = Tokens([7]), Logprobs([-1.0])
            journal.chunk("a/0", start, tokens, logprobs, False, record, None, answered)
    with DiskJournal(tmp_path / "j") as journal:
        [[found]] = journal.begin([group], 0, {})
        assert (found.token_ids, found.prompt_logprobs) == ([7, 7], prompt)


def test_counts_and_accounts_of_what_was_found(directory):
    with DiskJournal(directory) as journal:
        assert (journal.found_responses, journal.found_tokens, journal.damaged_bytes) == (2, 8, 0)
        response = journal.begin(GROUPS, 0, {})[0][1]
        assert [each.tokens for each in response.chunks] == [2, 2]
        assert response.logprobs == [-1.0] * 4


@pytest.mark.parametrize("cut", [1, 10, 60, 100])
def test_a_torn_end_is_left_out(directory, cut):
    path = next(directory.iterdir())
    os.truncate(path, path.stat().st_size - cut)
    found = written(directory)
    assert found[0][0][0][:2] == [7, 8]
    assert found[1][0][1] is None  # the abort was the last record
    assert len(list(directory.glob("*.journal"))) == 2  # the torn file stays as it is


def test_behind_a_damaged_chunk_a_response_is_written_again(directory):
    path = next(directory.iterdir())
    data = bytearray(path.read_bytes())
    data[data.index(Tokens([9, 9]).tobytes())] ^= 1
    path.write_bytes(data)
    with structlog.testing.capture_logs() as logs, DiskJournal(directory) as journal:
        found = journal.begin(GROUPS, 0, {})
        assert [each.token_ids.tolist() for each in found[0]] == [[7, 8, 10], []]
        chunk(journal, "a/1", 0, [9, 9, 11])
    assert [log["event"] for log in logs] == ["journal_damaged"]
    assert written(directory)[0] == [([7, 8, 10], "stop"), ([9, 9, 11], None)]


def test_files_without_a_first_record_are_left_out(directory):
    path = next(directory.iterdir())
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    assert written(directory) == [[], []]


def test_long_journals_are_several_files(tmp_path):
    with DiskJournal(tmp_path / "j", segment_bytes=2000) as journal:
        journal.begin(GROUPS[:1], 0, {})
        journal.begin([PromptGroup("long", (1,), 1, 100_000)], 0, {})
        for start in range(0, 5000, 50):
            chunk(journal, "long/0", start, range(start, start + 50))
            if start % 500 == 0:
                asyncio.run(journal.synced())
    assert len(list((tmp_path / "j").iterdir())) > 5
    with DiskJournal(tmp_path / "j") as journal:
        found = journal.begin([PromptGroup("long", (1,), 1, 100_000)], 0, {})
    assert found[0][0].token_ids.tolist() == list(range(5000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "group 'a': its seed was 5 and is 6 now"),
        ({"seeds": (1, 2)}, r"its list of seeds was \(\) and is \(1, 2\) now"),
        ({"n": 3}, "its n was 2 and is 3 now"),
        ({"max_tokens": 7}, "its max_tokens was 6 and is 7 now"),
        ({"prompt_token_ids": (1, 2)}, "its prompt was 3 other tokens and is 2 other tokens now"),
    ],
)
def test_another_group_of_the_same_name_is_refused(directory, change, message):
    other = PromptGroup(
        **({"id": "a", "prompt_token_ids": (1, 2, 3), "n": 2, "max_tokens": 6, "seed": 5} | change)
    )
    with DiskJournal(directory) as journal, pytest.raises(InputError, match=message):
        journal.begin([other], 0, {})
    assert written(directory) == ALL


def test_other_weights_are_refused_where_they_can_be_compared(tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        journal.begin(GROUPS, 3, {"sum": "1a", "hash": "77"})
    with DiskJournal(tmp_path / "j") as journal:
        with pytest.raises(InputError, match="weight version was 3 and is 4 now"):
            journal.begin(GROUPS, 4, {"other": "x"})
        with pytest.raises(
            InputError, match=r"weights' fingerprint was \{'sum': '1a'\} and is \{'sum': '1b'\} now"
        ):
            journal.begin(GROUPS, 3, {"sum": "1b", "other": "x"})
        assert journal.begin(GROUPS, 4, {"sum": "1a"})[0][0].token_ids == []  # the same, in another count


def test_other_tokens_that_end_a_response_are_refused_where_both_are_known(tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        journal.begin(GROUPS, 3, {"sum": "1a"}, (2, 7))
    with DiskJournal(tmp_path / "j") as journal:
        with pytest.raises(InputError, match=r"tokens that end a response was \(2, 7\) and is \(2,\) now"):
            journal.begin(GROUPS, 3, {"sum": "1a"}, (2,))
        with pytest.raises(InputError, match="weight version was 3 and is 4 now"):
            journal.begin(GROUPS, 4, {}, (2, 7))
        assert journal.begin(GROUPS, 3, {"sum": "1a"})[0][0].token_ids == []


def test_other_facts_are_refused_by_name(tmp_path):
    DiskJournal(tmp_path / "j", facts={"--iteration": "3"}).close()
    with pytest.raises(InputError, match="--iteration was '3' and is '4' now; restore it, or begin anew"):
        DiskJournal(tmp_path / "j", facts={"--iteration": "4"})
    with pytest.raises(InputError, match="--iteration was '3' and is None now"):
        DiskJournal(tmp_path / "j")


def test_files_of_another_run_or_form_are_refused(tmp_path, directory):
    DiskJournal(tmp_path / "other").close()
    (tmp_path / "other/000001.journal").rename(directory / "000009.journal")
    with pytest.raises(InputError, match=r"000009\.journal is of another run than the files before it"):
        DiskJournal(directory)
    (directory / "000009.journal").rename(directory / "nine.journal")
    with pytest.raises(InputError, match=r"nine\.journal is no file of a journal"):
        DiskJournal(directory)
    (directory / "nine.journal").unlink()
    os.mkfifo(directory / "000009.journal")  # reading it would wait for ever
    with pytest.raises(InputError, match=r"000009\.journal is no file of a journal"):
        DiskJournal(directory)


def test_a_newer_form_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("seer_journal.FORMAT", 2)
    DiskJournal(tmp_path / "j").close()
    monkeypatch.undo()
    with pytest.raises(InputError, match="has form 2 of a journal, and this Seer reads form 1"):
        DiskJournal(tmp_path / "j")


def test_one_process_at_a_time(tmp_path):
    with (
        DiskJournal(tmp_path / "j"),
        pytest.raises(OutputError, match="another process writes the journal in"),
    ):
        DiskJournal(tmp_path / "j")
    DiskJournal(tmp_path / "j").close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OutputError, match=r"cannot keep a journal in .*file.*; make room, name another directory"
    ):
        DiskJournal(tmp_path / "file")


def test_removing_leaves_nothing_of_its_own(directory):
    with DiskJournal(directory) as journal:
        (directory / "notes.txt").write_text("mine")
        journal.remove()
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def fails(number):
    def write(*_):
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_disk_that_fails_ends_the_journal_and_no_wait(tmp_path, monkeypatch, call):
    with DiskJournal(tmp_path / "j") as journal:
        journal.begin(GROUPS, 0, {})
        asyncio.run(journal.synced())
        monkeypatch.setattr(seer_journal.writer.os, call, fails(errno.ENOSPC))
        with structlog.testing.capture_logs() as logs:
            chunk(journal, "a/0", 0, [7])
            asyncio.run(journal.synced())
        monkeypatch.undo()
        assert journal.failed == "No space left on device"
        assert [log["event"] for log in logs] == ["journal_stopped"]
        chunk(journal, "a/1", 0, [7])  # dropped
        asyncio.run(journal.synced())
    assert written(tmp_path / "j")[0][1] == ([], None)


def test_a_journal_whose_next_file_cannot_be_made_closes_no_file_of_others(tmp_path):
    async def fill(journal):
        journal.begin(GROUPS, 0, {})
        chunk(journal, "a/0", 0, [7])
        await journal.synced()
        shutil.rmtree(journal.directory)
        chunk(journal, "a/0", 1, [8])
        await journal.synced()

    journal = DiskJournal(tmp_path / "journal", segment_bytes=1)
    asyncio.run(fill(journal))
    assert "No such file" in journal.failed
    with (tmp_path / "mine").open("w") as mine:
        journal.close()
        mine.write("still open")
    assert (tmp_path / "mine").read_text() == "still open"


def test_a_disk_that_hangs_is_given_up(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(seer_journal.writer, "STUCK_S", 0.05)
    with DiskJournal(tmp_path / "j") as journal:
        monkeypatch.setattr(seer_journal.writer.os, "fdatasync", lambda file: go_on.wait(PATIENCE_S))
        chunk(journal, "a/0", 0, [7])
        asyncio.run(journal.synced())
        assert journal.failed == "the disk has taken nothing for 0.05 s"
        go_on.set()


def test_a_file_system_without_sync_gets_what_it_can(tmp_path, monkeypatch):
    monkeypatch.setattr(seer_journal.writer.os, "fdatasync", fails(errno.EINVAL))
    with structlog.testing.capture_logs() as logs, DiskJournal(tmp_path / "j") as journal:
        journal.begin(GROUPS, 0, {})
        asyncio.run(journal.synced())
        assert journal.failed == ""
    assert [log["event"] for log in logs] == ["journal_not_synced"]


def test_with_safety_system_nothing_is_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(seer_journal.writer.os, "fdatasync", fails(errno.EIO))
    with DiskJournal(tmp_path / "j", safety="system") as journal:
        journal.begin(GROUPS, 0, {})
        asyncio.run(journal.synced())
        assert journal.failed == ""


def test_what_was_synced_survives_sigkill(tmp_path):
    script = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_journal import *
journal = DiskJournal({str(tmp_path / "j")!r})
journal.begin(GROUPS, 0, {{}})
chunk(journal, "a/0", 0, [7, 8])
asyncio.run(journal.synced())
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert written(tmp_path / "j")[0][0] == ([7, 8], None)


def test_many_records_are_synced_at_once(tmp_path, monkeypatch):
    syncs = []
    release = threading.Event()

    def fdatasync(file):
        syncs.append(file)
        release.wait(PATIENCE_S)

    with DiskJournal(tmp_path / "j") as journal:
        monkeypatch.setattr(seer_journal.writer.os, "fdatasync", fdatasync)

        async def write():
            waits = []
            for start in range(50):
                chunk(journal, "a/0", start, [start])
                waits.append(asyncio.ensure_future(journal.synced()))
                await aeventually(lambda: syncs)  # and so the rest comes while one is under way
            release.set()
            await asyncio.gather(*waits)

        asyncio.run(write())
    assert len(syncs) <= 4


def test_with_replace_another_group_takes_the_place_of_one_and_a_group_may_come_again(directory):
    with DiskJournal(directory, replace=True) as journal:
        other = PromptGroup("a", (1, 2, 3), 2, 6, seed=9)
        assert journal.begin([other], 0, {}) == [[]]
        chunk(journal, "a/0", 0, [20, 21])
        [responses] = journal.begin([other], 0, {})  # a client asks again
        assert [each.token_ids.tolist() for each in responses] == [[20, 21], []]
        responses[0].token_ids.append(22)  # it belongs to the rollout
        chunk(journal, "a/0", 2, [22], stopped=True)
        [responses] = journal.begin([other], 0, {})
        assert (responses[0].token_ids.tolist(), responses[0].finish_reason) == ([20, 21, 22], "stop")
    with DiskJournal(directory, replace=True) as journal:
        [responses] = journal.begin([other], 0, {})
        assert responses[0].token_ids.tolist() == [20, 21, 22]
        assert journal.begin(GROUPS[1:], 0, {})[0][0].token_ids.tolist() == [13]


def test_beyond_its_size_a_journal_drops_the_oldest(tmp_path):
    with DiskJournal(tmp_path / "j", replace=True, most_bytes=10_000, segment_bytes=1000) as journal:
        groups = [PromptGroup(f"g{number}", (1,), 1, 100) for number in range(40)]
        for group in groups:
            journal.begin([group], 0, {})
            chunk(journal, f"{group.id}/0", 0, range(100))
            asyncio.run(journal.synced())
        assert journal.begin(groups[:1], 0, {}) == [[]]
        assert len(journal.begin(groups[-1:], 0, {})[0][0].token_ids) == 100
    assert sum(path.stat().st_size for path in (tmp_path / "j").iterdir()) < 13_000
    with DiskJournal(tmp_path / "j", replace=True) as journal:
        found = [bool(journal.begin([group], 0, {})[0]) for group in groups]
    assert not any(found[1:20])
    assert all(found[-5:])


def test_long_prompts_and_many_short_responses_count_as_what_a_journal_holds(tmp_path):
    with DiskJournal(tmp_path / "j", replace=True, most_bytes=100_000) as journal:
        for number in range(40):
            journal.begin([PromptGroup(f"long{number}", (1,) * 10_000, 1, 100)], 0, {})
            assert len(journal._contents.groups) <= 2
        for number in range(400):
            journal.begin([PromptGroup(f"short{number}", (1,), 4, 100)], 0, {})
            chunk(journal, f"short{number}/0", 0, [7], stopped=True)
        assert len(journal._contents.groups) <= 40
        for name in list(journal._contents.groups):
            journal._contents.forget(name)
        assert journal._contents.kept_bytes == 0


def test_a_wait_that_is_cancelled_just_as_it_ends_is_cancelled(tmp_path, monkeypatch):
    go_on = threading.Event()

    async def wait(journal):
        chunk(journal, "a/0", 0, [7])
        waiting = asyncio.ensure_future(journal.synced())
        await asyncio.sleep(0)
        [(_, _, safe)] = journal._writer._waiting
        safe.set_result(None)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()

    with DiskJournal(tmp_path / "j") as journal:
        monkeypatch.setattr(seer_journal.writer.os, "fdatasync", lambda file: go_on.wait(PATIENCE_S))
        asyncio.run(wait(journal))


TURNS = [PromptGroup("t", (1, 2, 3), 3, 8, seed=5, turns=True)]


def answer(journal, request_id, start, tokens, turn_tokens, *, done=False, reward=None):
    turn = TurnRecord(turn_tokens, len(tokens), 0.5, reward)
    journal.answered(request_id, start, Tokens(tokens), turn, done)


def test_the_answers_of_an_environment_are_kept_between_the_turns(tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        assert journal.begin(TURNS, 0, {}) == [[]]
        chunk(journal, "t/0", 0, [7, 8], stopped=True)
        answer(journal, "t/0", 2, [9], 2, reward=0.5)
        chunk(journal, "t/0", 3, [10], stopped=True)
        chunk(journal, "t/1", 0, [7], stopped=True)
        answer(journal, "t/1", 1, [], 1, done=True)
        chunk(journal, "t/2", 0, [7] * 6, stopped=True)
        answer(journal, "t/2", 6, [9, 9], 6)
    with DiskJournal(tmp_path / "j") as journal:
        [found] = journal.begin(TURNS, 0, {})
    assert [each.token_ids.tolist() for each in found] == [[7, 8, 9, 10], [7], [7] * 6 + [9, 9]]
    assert found[0].logprobs.tolist() == [-1.0, -1.0, 0.0, -1.0]
    assert [each.turns for each in found] == [
        [TurnRecord(2, 1, 0.5, 0.5)],
        [TurnRecord(1, 0, 0.5)],
        [TurnRecord(6, 2, 0.5)],
    ]
    assert [(each.acting, each.finish_reason) for each in found] == [
        (True, None),
        (False, "stop"),
        (False, "length"),
    ]


def test_an_answer_whose_turn_is_not_whole_or_has_another_length_is_left_out(tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        journal.begin(TURNS, 0, {})
        chunk(journal, "t/0", 0, [7, 8])
        answer(journal, "t/0", 2, [9], 2)  # the turn goes on
        chunk(journal, "t/1", 0, [7, 8], stopped=True)
        answer(journal, "t/1", 2, [9], 1)  # another turn
        answer(journal, "t/1", 3, [9], 2)  # another place
        answer(journal, "t/1", 2, [9] * 7, 2)  # beyond the limit
        chunk(journal, "t/1", 2, [9])  # a chunk, where an answer is wanted
        answer(journal, "t/2", 0, [9], 0)
    with DiskJournal(tmp_path / "j") as journal:
        [found] = journal.begin(TURNS, 0, {})
    assert [each.token_ids.tolist() for each in found] == [[7, 8], [7, 8], []]
    assert [each.acting for each in found] == [False, True, False]


def test_a_journal_of_responses_without_an_environment_is_no_other_s(tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        journal.begin(TURNS, 0, {})
    plain = [msgspec.structs.replace(group, turns=False) for group in TURNS]
    fact = "its answers by an environment was True and is False now"
    with DiskJournal(tmp_path / "j") as journal, pytest.raises(InputError, match=fact):
        journal.begin(plain, 0, {})


def placed(*images):
    """Return images with where each begins and ends."""
    return PlacedImages([image for image, _, _ in images], [(at, count) for _, at, count in images])


def test_images_of_answers_come_back_with_those_of_the_prompt(tmp_path):
    prompt, shown = (PromptImage(name, 4, 4, None, name.encode()) for name in ("of-prompt", "of-answer"))
    filed = PromptImage("of-file", 4, 4, tmp_path / "a.png")
    group = PromptGroup("a", (1, 9, 9), 2, 12, turns=True, attachments=placed((prompt, 1, 2)))
    directory = tmp_path / "journal"
    with DiskJournal(directory) as journal:
        assert journal.begin([group], 0, {}) == [[]]
        for number in range(2):
            chunk(journal, f"a/{number}", 0, [7], stopped=True)
        turn = TurnRecord(1, 3, 0.5, None)
        journal.answered("a/0", 1, Tokens([9, 9, 5]), turn, False, placed((shown, 4, 2)))
        journal.answered("a/1", 1, Tokens([5, 5, 5]), turn, False)
        chunk(journal, "a/0", 4, [8], stopped=True)
        journal.answered("a/0", 5, Tokens([9, 5, 5]), turn, False, placed((filed, 8, 1)))
    for options in ({}, {"replace": True}, {"replace": True}):
        with DiskJournal(directory, **options) as journal:
            [[seen, blind]] = journal.begin([group], 0, {})
        assert blind.attachments is None
        assert list(seen.attachments.placed()) == [(prompt, 1, 2), (shown, 4, 2), (filed, 8, 1)]
        assert len(seen.token_ids) == 8


def test_a_resume_with_another_image_under_the_same_path_is_refused(tmp_path):
    def groups(colour, size=(40, 30)):
        Image.new("RGB", size, colour).save(tmp_path / "a.png")
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps({"group_id": "g", "prompt_token_ids": [7], "images": ["a.png"]}))
        defaults, model = RolloutTable(n=2, max_tokens=8), ModelInfo(1000, 200, takes_images=True)
        return read_prompts(file, defaults, model, Placing()).groups

    class Placing:
        def place_images(self, token_ids, sizes):
            [(width, _)] = sizes
            return [7] * (width // 10), [(0, width // 10)]

    with DiskJournal(tmp_path / "journal") as journal:
        journal.begin(groups("red"), 0, {})
    for change in [("blue",), ("red", (41, 30)), ("red", (50, 30))]:
        other = groups(*change)
        refused = pytest.raises(InputError, match=r"has another group 'g': its .*; restore it, or begin anew")
        with DiskJournal(tmp_path / "journal") as journal, refused:
            journal.begin(other, 0, {})
