"""Between an engine and a draft source: the calls, their checks, and what a failure does."""

import pytest
import structlog

np = pytest.importorskip("numpy")

from seer_worker.process.drafts import SourceProposer  # noqa: E402

from seer_core.model import Sampling  # noqa: E402
from seer_core.model.arrays import Tokens  # noqa: E402
from seer_core.ports.drafting import SiblingTokens  # noqa: E402
from seer_core.ports.engine import ChunkJob  # noqa: E402

ROWS, DRAFT_TOKENS, VOCAB = 8, 4, 50


class Source:
    """Drafts what ``reply`` writes, and keeps the batches and the other calls."""

    def __init__(self):
        self.batches = []
        self.calls = []
        self.reply = lambda batch: None
        self.handle = 70

    def open(self, job):
        self.handle += 1
        return self.handle

    def propose(self, batch):
        self.batches.append(
            {
                name: getattr(batch, name).copy()
                for name in ("handles", "lengths", "written", "new_tokens", "limits", "parents")
            }
        )
        self.reply(batch)

    def close(self, handle):
        self.calls.append(("close", handle))

    def add_sibling_tokens(self, text):
        self.calls.append(("add_sibling_tokens", text))

    def forget(self, group_id):
        self.calls.append(("forget", group_id))

    def reset(self):
        self.calls.append(("reset",))

    def stats(self):
        return {"groups": 1.0}

    def stop(self):
        raise OSError("no such process")


def job(name, tokens, max_tokens):
    return ChunkJob(name, name, "g", [1] * tokens, tokens, max_tokens, Sampling(), 0, 0)


class Engine:
    """The engine's side: the batch, and texts whose tokens are their positions."""

    def __init__(self, paths=1):
        self.ids = []
        self.source = Source()
        self.proposer = SourceProposer(DRAFT_TOKENS, VOCAB, ROWS, paths)
        self.proposer.source, self.proposer.request_ids = self.source, lambda: self.ids

    def step(self, **sampled):
        return self.proposer.propose_for(*self.made(sampled))

    def trees(self, **sampled):
        return self.proposer.propose_trees(*self.made(sampled))

    def made(self, sampled):
        self.ids = list(sampled)
        lengths = [length for length, _ in sampled.values()]
        tokens = [list(range(length - count, length)) for length, count in sampled.values()]
        return tokens, lengths, lambda row, start, stop: list(range(start, stop))


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def woods():
    """An engine that verifies three paths at once, and a batch of two requests there."""
    engine = Engine(paths=3)
    for name in ("a", "b"):
        engine.proposer.open(name, job(name, 10, 30))
    return engine


def test_limits_keep_drafts_short_of_the_chunks_end_and_out_of_a_prefill(engine):
    for name, max_tokens in (("far", 30), ("near", 3), ("next", 2), ("over", 1), ("prefill", 30)):
        engine.proposer.open(name, job(name, 10, max_tokens))
    drafts = engine.step(far=(11, 1), near=(11, 1), next=(11, 1), over=(11, 1), prefill=(10, 0))
    assert drafts == [[]] * 5
    [batch] = engine.source.batches
    assert batch["limits"].tolist() == [4, 1, 0, 0, 0]
    assert batch["written"].tolist() == [1, 1, 1, 1, 0]
    assert batch["new_tokens"].tolist() == [10, 10, 10, 10]
    assert batch["handles"].tolist() == [71, 72, 73, 74, 75]


def test_where_room_is_short_limits_and_made_up_drafts_are_shorter(engine):
    engine.proposer.open("a", job("a", 10, 30))
    sampled, lengths, text = engine.made({"a": (11, 1)})
    engine.proposer.propose_for(sampled, lengths, text, 2)
    assert engine.source.batches[0]["limits"].tolist() == [2]
    engine.proposer.drafting.made_up = 3
    assert len(engine.proposer.propose_for(sampled, lengths, text, 2)[0]) == 2


def test_tokens_of_steps_that_went_by_unasked_come_with_the_next(engine):
    for name in ("a", "b"):
        engine.proposer.open(name, job(name, 10, 30))
    engine.step(a=(11, 1), b=(12, 2))
    engine.step(a=(15, 2), b=(13, 1))
    engine.step(b=(18, 1))
    engine.step(b=(20, 2), a=(16, 1))
    sent = [(batch["written"].tolist(), batch["new_tokens"].tolist()) for batch in engine.source.batches]
    assert sent == [
        ([1, 2], [10, 10, 11]),
        ([4, 1], [11, 12, 13, 14, 12]),
        ([5], [13, 14, 15, 16, 17]),
        ([2, 1], [18, 19, 15]),
    ]


def test_a_source_of_trees_finds_lines_and_what_it_writes_is_what_the_engine_gets(woods):
    def reply(batch):
        batch.drafts[:] = [[7, 8, 9, 9], [5, 6, 0, 0]]
        batch.parents[0] = [-1, -1, 0, 1]
        batch.counts[:] = [4, 2]

    woods.source.reply = reply
    for length in (11, 12):
        assert woods.trees(a=(length, 1), b=(length, 1)) == (
            [[7, 8, 9, 9], [5, 6]],
            [[-1, -1, 0, 1], [-1, 0]],
        )
    assert [batch["parents"].tolist() for batch in woods.source.batches] == [[[-1, 0, 1, 2]] * 2] * 2


@pytest.mark.parametrize(
    ("tokens", "parents", "flaw"),
    [
        ([1, 2, 3, 4], [-1, 1, 0, 0], "token 1 has parent 1, which does not come before it"),
        ([1, 2, 3, 4], [-1, -2, 0, 0], "token 1 has parent -2"),
        ([1, 2, 3, 2], [-1, 0, 1, 0], "two children of one parent are the same token"),
        ([1, 2, 3, 4], [-1, -1, -1, -1], "4 paths, where the engine verifies 3"),
    ],
)
def test_what_is_no_tree_ends_drafting(woods, tokens, parents, flaw):
    def reply(batch):
        batch.drafts[1], batch.parents[1] = tokens, parents
        batch.counts[1] = 4

    woods.source.reply = reply
    assert woods.trees(a=(11, 1), b=(11, 1)) == ([[], []], [[], []])
    [degradation] = woods.proposer.take_degradations()
    assert degradation.reason.startswith(f"the draft source failed: ValueError: a draft with {flaw}")


def test_made_up_trees_are_lines(woods):
    woods.proposer.drafting.made_up = 3
    drafts, parents = woods.trees(a=(11, 1), b=(5, 0))
    assert [len(draft) for draft in drafts] == [3, 0]
    assert parents == [[-1, 0, 1], []]


def test_handles_follow_requests_that_come_go_and_move(engine):
    for name in ("a", "b", "c"):
        engine.proposer.open(name, job(name, 10, 30))
    engine.step(a=(11, 1), b=(11, 1), c=(11, 1))
    engine.step(a=(12, 1), b=(13, 2), c=(12, 1))
    engine.proposer.close("a")
    engine.step(c=(13, 1), b=(14, 1))
    assert [batch["handles"].tolist() for batch in engine.source.batches] == [
        [71, 72, 73],
        [71, 72, 73],
        [73, 72],
    ]
    assert engine.source.batches[1]["lengths"].tolist() == [12, 13, 12]
    assert engine.source.calls == [("close", 71)]


def test_what_the_source_writes_is_what_the_engine_gets(engine):
    def reply(batch):
        batch.drafts[:] = np.arange(batch.drafts.size).reshape(batch.drafts.shape)
        batch.counts[:] = [2, 0, 4]

    for name in ("a", "b", "c"):
        engine.proposer.open(name, job(name, 10, 30))
    engine.source.reply = reply
    assert engine.step(a=(11, 1), b=(11, 1), c=(11, 1)) == [[0, 1], [], [8, 9, 10, 11]]


def test_what_siblings_wrote_elsewhere_goes_to_the_source(engine):
    text = SiblingTokens("r", "g", "g/1", 0, Tokens([1, 2]))
    engine.proposer.add_sibling_tokens(text)
    assert engine.source.calls == [("add_sibling_tokens", text)]


def too_many(batch):
    batch.counts[:] = DRAFT_TOKENS + 1


def fewer_than_none(batch):
    batch.counts[:] = -1


def foreign(batch):
    batch.drafts[:] = VOCAB
    batch.counts[:] = 1


def negative(batch):
    batch.drafts[:] = -1
    batch.counts[:] = 1


def absent(batch):
    raise ConnectionError("the server is gone")


@pytest.fixture
def logged():
    """The records that are logged meanwhile."""
    with structlog.testing.capture_logs() as logs:
        yield logs


@pytest.mark.parametrize("reply", [too_many, fewer_than_none, foreign, negative, absent])
def test_a_source_that_errs_is_never_asked_again(engine, logged, reply):
    engine.proposer.open("a", job("a", 10, 30))
    engine.step(a=(11, 1))
    engine.source.reply = reply
    assert engine.step(a=(12, 1)) == [[]]
    assert engine.proposer.drafting.failed
    engine.source.reply = lambda batch: None
    assert engine.step(a=(13, 1)) == [[]]
    engine.proposer.open("b", job("b", 10, 30))
    engine.proposer.close("a")
    engine.proposer.add_sibling_tokens(SiblingTokens("r", "g", "g/1", 0, Tokens([1, 2])))
    engine.proposer.forget("g")
    engine.proposer.reset()
    engine.proposer.stop()
    assert engine.proposer.report()[1] == {"failed": 1.0}
    assert len(engine.source.batches) == 2
    assert engine.source.calls == []
    assert [entry["event"] for entry in logged] == ["draft_source_failed"]
    [degradation] = engine.proposer.take_degradations()
    assert degradation.what == "drafting"
    assert degradation.reason.startswith("the draft source failed: ")


@pytest.mark.parametrize(("method", "argument"), [("forget", "g"), ("add_sibling_tokens", None)])
def test_an_error_in_any_other_method_ends_drafting_too(engine, logged, method, argument):
    engine.proposer.open("a", job("a", 10, 30))
    setattr(engine.source, method, absent)
    getattr(engine.proposer, method)(argument)
    assert [repr(entry["exc_info"]) for entry in logged] == ["ConnectionError('the server is gone')"]
    assert engine.step(a=(11, 1)) == [[]]
    assert engine.source.batches == []


def test_figures_that_are_no_numbers_end_drafting_too(engine, logged):
    engine.source.stats = lambda: {"server": "gone"}
    assert engine.proposer.report()[1] == {"failed": 1.0}
    assert engine.proposer.drafting.failed
    assert [type(entry["exc_info"]) for entry in logged] == [ValueError]


def test_made_up_drafts_bypass_the_source_and_its_clock(engine):
    engine.proposer.drafting.made_up = 3
    drafts = engine.step(unknown=(11, 1), prefill=(5, 0))
    assert [len(draft) for draft in drafts] == [3, 0]
    assert all(0 <= token < VOCAB for token in drafts[0])
    assert engine.proposer.drafting.seconds == 0.0
    engine.proposer.drafting.made_up = None
    engine.proposer.open("a", job("a", 10, 30))
    engine.step(a=(11, 1))
    assert engine.proposer.drafting.seconds > 0
    assert engine.proposer.report()[1] == {"groups": 1.0}


def test_without_a_source_there_are_no_drafts(engine):
    bare = SourceProposer(2, VOCAB, 2)
    bare.open("a", job("a", 10, 30))
    assert bare.propose_for([[3]], [11], None) == [[]]


def test_the_self_test_asks_for_drafts_as_an_engine_does_each_prompt_in_a_group_of_its_own():
    pytest.importorskip("torch")
    from seer_worker.process.selftest import JOBS

    assert len({job.group_id for job in JOBS}) == len({tuple(job.token_ids) for job in JOBS}) == len(JOBS)
