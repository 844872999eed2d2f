"""The engine half: what it drafts, what it learns, and that nothing stops it."""

from itertools import chain

import msgspec
import numpy as np
import pytest
from seer_grouped_spec.plugin import GroupedDrafter, Settings
from seer_grouped_spec.settings import SourceSettings
from seer_grouped_spec.source import GroupedSource

from seer_core.model import Sampling
from seer_core.model.arrays import Tokens
from seer_core.ports.drafting import DraftBatch, DraftContext, SiblingTokens, StepTimes
from seer_core.ports.engine import ChunkJob

from .helpers import FLAT

COSTLY = StepTimes((1, 64), (0, 8), ((1.0, 100.0), (1.0, 100.0)))
PROMPT = [1, 2, 3, 4]
PHRASE = list(range(100, 160))
OTHER = list(range(130, 100, -1))


class Rig:
    """A source, and a row per open chunk: its length, and the tokens that the source has not received."""

    def __init__(self, step_times=FLAT, paths=1, lengths=(), **settings):
        drafter = GroupedDrafter(Settings(**settings), None)
        host = DraftContext("a", 8, 512, 1000, 8, step_times, paths, lengths)
        self.source = GroupedSource(msgspec.to_builtins(drafter.source().settings), host)
        self.lengths = [0] * 8
        self.unsent = [[] for _ in self.lengths]

    def open(self, row, request, response=(), group="g", **more):
        ids = [*PROMPT, *response]
        job = ChunkJob(f"{request}#0", request, group, ids, len(PROMPT), 256, Sampling(), 7, 0, **more)
        self.lengths[row], self.unsent[row] = len(ids), []
        return self.source.open(job)

    def add_sibling_tokens(self, request, start, tokens, group="g", rollout=""):
        self.source.add_sibling_tokens(SiblingTokens(rollout, group, request, start, Tokens(tokens)))

    def write(self, row, tokens):
        self.unsent[row] += tokens
        self.lengths[row] += len(tokens)

    def propose(self, handles, rows, limits=8):
        size = len(handles)
        written = [self.unsent[row] for row in rows]
        for row in rows:
            self.unsent[row] = []
        self.batch = batch = DraftBatch(
            handles=np.array(handles, np.int32),
            lengths=np.array([self.lengths[row] for row in rows], np.int32),
            written=np.array(list(map(len, written)), np.int32),
            new_tokens=np.array([*chain(*written)], np.int32),
            limits=np.full(size, limits, np.int32),
            drafts=np.zeros((size, 8), np.int32),
            parents=np.tile(np.arange(-1, 7, dtype=np.int32), (size, 1)),
            counts=np.zeros(size, np.int32),
        )
        self.source.propose(batch)
        return [row[:count].tolist() for row, count in zip(batch.drafts, batch.counts, strict=True)]

    def parents(self):
        """Return the parents of what was drafted last."""
        return [
            row[:count].tolist() for row, count in zip(self.batch.parents, self.batch.counts, strict=True)
        ]


@pytest.fixture
def make_rig():
    rigs = []

    def make(*arguments, **settings):
        rigs.append(Rig(*arguments, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.source.stop()


def test_a_sibling_s_text_is_drafted_where_it_was_written_before(make_rig):
    rig = make_rig()
    first = rig.open(0, "g/0")
    rig.write(0, PHRASE)
    rig.propose([first], [0])
    rig.source.close(first)
    second = rig.open(1, "g/1", PHRASE[:6])
    (draft,) = rig.propose([second], [1])
    assert draft == PHRASE[6:14]


def test_a_sibling_of_a_family_with_another_prompt_drafts_from_its_text(make_rig):
    rig = make_rig()
    first = rig.open(0, "a/0", PHRASE)
    rig.propose([first], [0])
    ids = [*PROMPT, *OTHER, *PHRASE[:6]]
    job = ChunkJob("b/0#0", "b/0", "g", ids, len(PROMPT) + len(OTHER), 256, Sampling(), 7, 0)
    second = rig.source.open(job)
    rig.lengths[1] = len(ids)
    assert rig.propose([second], [1]) == [PHRASE[6:14]]
    rig.write(1, PHRASE[6:10])
    assert rig.propose([first, second], [0, 1])[1] == PHRASE[10:18]
    assert rig.source.stats()["index_mismatched"] == 0


def test_a_group_s_text_is_not_drafted_for_another_while_it_lives(make_rig):
    rig = make_rig()
    first = rig.open(0, "g/0", PHRASE)
    rig.propose([first], [0])
    other = rig.open(1, "h/0", PHRASE[:6], group="h")
    assert rig.propose([other], [1]) == [[]]


def test_a_request_s_text_goes_on_where_it_was_in_its_next_chunk(make_rig):
    rig = make_rig()
    first = rig.open(0, "g/0", PHRASE[:20])
    rig.propose([first], [0])
    rig.source.close(first)
    again = rig.open(0, "g/0", [*PHRASE, 7, *PHRASE[:5]])  # it ran elsewhere meanwhile
    (draft,) = rig.propose([again], [0])
    assert draft == PHRASE[5:13]


def test_a_request_that_is_set_back_is_drafted_from_what_had_been_written_of_it(make_rig):
    rig = make_rig()
    rig.source.close(rig.open(0, "g/0", PHRASE))  # a chunk that was given up
    again = rig.open(0, "g/0", PHRASE[:20])
    assert rig.propose([again], [0]) == [PHRASE[20:28]]
    assert rig.source.stats()["index_mismatched"] == 0


def test_what_a_sibling_writes_elsewhere_is_drafted_here(make_rig):
    rig = make_rig()
    handle = rig.open(0, "g/1", PHRASE[:6])
    assert rig.propose([handle], [0]) == [[]]
    rig.add_sibling_tokens("g/0", 0, PHRASE[:20])
    rig.add_sibling_tokens("g/0", 20, PHRASE[20:])
    assert rig.propose([handle], [0]) == [PHRASE[6:14]]
    assert rig.source.stats()["learnt_tokens"] == len(PHRASE)


def test_a_sibling_that_moves_here_goes_on_where_it_was_elsewhere(make_rig):
    rig = make_rig()
    rig.source.close(rig.open(0, "g/1"))
    rig.add_sibling_tokens("g/0", 0, PHRASE[:30])
    handle = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]])
    assert rig.propose([handle], [0]) == [PHRASE[5:13]]
    rig.source.close(handle)
    rig.add_sibling_tokens("g/0", len(PHRASE) + 5, OTHER)  # and away again
    handle = rig.open(0, "g/2", OTHER[:6])
    assert rig.propose([handle], [0]) == [OTHER[6:14]]
    assert rig.source.stats()["index_mismatched"] == 0


def test_what_was_written_here_before_a_sibling_moved_may_be_sent_again(make_rig):
    rig = make_rig()
    rig.source.close(rig.open(0, "g/0", PHRASE[:30]))  # the chunk goes on to here, and is given up
    rig.add_sibling_tokens("g/0", 10, PHRASE[10:])
    handle = rig.open(0, "g/1", PHRASE[:40])
    assert rig.propose([handle], [0]) == [PHRASE[40:48]]


def test_text_that_fits_nowhere_is_left_out(make_rig):
    rig = make_rig()
    rig.add_sibling_tokens("g/0", 0, PHRASE)  # before any chunk of its group
    handle = rig.open(0, "g/1", PHRASE[:6], rollout_id="now")
    rig.add_sibling_tokens("g/0", 0, PHRASE, group="h", rollout="now")
    rig.add_sibling_tokens("g/0", 0, PHRASE, rollout="before")
    rig.add_sibling_tokens("g/2", 5, PHRASE[5:], rollout="now")  # what came before is missing
    rig.add_sibling_tokens("g/1", 3, OTHER, rollout="now")  # it has written something else here
    rig.add_sibling_tokens("g/earlier-0", 0, [*PHRASE, 1000], rollout="now")  # no token of this model
    assert rig.propose([handle], [0]) == [[]]
    assert rig.source.stats()["learnt_tokens"] == 0
    rig.source.forget("g")
    rig.add_sibling_tokens("g/0", 0, PHRASE, rollout="now")
    assert rig.source.stats()["index_groups"] == 0


def test_a_gap_is_closed_when_the_whole_text_is_sent(make_rig):
    rig = make_rig()
    handle = rig.open(0, "g/1", PHRASE[:26])
    rig.add_sibling_tokens("g/0", 20, PHRASE[20:])
    assert rig.propose([handle], [0]) == [[]]
    rig.add_sibling_tokens("g/0", 0, PHRASE)
    assert rig.propose([handle], [0]) == [PHRASE[26:34]]


def test_a_text_that_differs_from_what_is_known_replaces_it(make_rig):
    rig = make_rig()
    first = rig.open(0, "g/0", PHRASE)
    rig.source.close(first)
    again = rig.open(0, "g/0", [9, 8, 7, 6, 5, 9, 8])
    (draft,) = rig.propose([again], [0])
    assert draft[:3] == [7, 6, 5]


def test_limits_are_respected_and_prefilling_rows_get_nothing(make_rig):
    rig = make_rig()
    handle = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]])
    assert rig.propose([handle], [0], limits=3) == [PHRASE[5:8]]
    assert rig.propose([handle], [0], limits=0) == [[]]


def test_drafts_that_would_not_pay_are_left_out(make_rig):
    rig = make_rig(COSTLY)
    handle = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]])
    assert rig.propose([handle], [0]) == [[]]


PLAIN_IS_SLOW = StepTimes((1, 64), (0, 8), ((2.3, 1.3), (2.3, 1.3)))


def test_where_a_step_without_drafts_is_the_slower_one_a_token_of_no_meaning_is_drafted(make_rig):
    for times, lengths, wanted in (
        (PLAIN_IS_SLOW, (0, 8), [[0], []]),
        (FLAT, (0, 8), [[], []]),
        (PLAIN_IS_SLOW, (), [[], []]),  # drafts have their own lengths, and no graphs
    ):
        rig = make_rig(times, lengths=lengths)
        handles = [rig.open(0, "g/0", [9]), rig.open(1, "g/1", [8])]
        assert rig.propose(handles, [0, 1]) == wanted
        assert rig.propose(handles, [0, 1], limits=0) == [[], []]


def test_real_drafts_come_before_padding_and_nothing_is_learnt_from_it(make_rig):
    rig = make_rig(PLAIN_IS_SLOW, lengths=(0, 8))
    handles = [rig.open(0, "g/0", PHRASE), rig.open(1, "g/1", [8])]
    for number in range(100):  # all of it rejected
        assert rig.propose(handles, [0, 1]) == [[0], []]
        rig.write(1, [200 + number])
    rig.source.close(handles[1])
    again = rig.open(1, "g/1", PHRASE[:6])
    assert rig.propose([handles[0], again], [0, 1]) == [[], PHRASE[6:14]]


@pytest.mark.parametrize("paths", [1, 3])
def test_drafts_that_are_rejected_again_and_again_are_given_up(make_rig, paths):
    rig = make_rig(StepTimes((1, 64), (0, 8), ((1.0, 2.0), (1.0, 2.0))), paths=paths)
    handle = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]])
    assert rig.propose([handle], [0]) != [[]]
    for number in range(400):
        rig.write(0, [*PHRASE[number % 50 : number % 50 + 1]])
        if rig.lengths[0] > 500:
            break
        last = rig.propose([handle], [0])
    assert last == [[]]


def write_in_two_ways(rig):
    """Let one sibling write a phrase, and another go on differently in the middle of it."""
    rig.source.close(rig.open(0, "g/0", PHRASE[:12]))
    rig.source.close(rig.open(0, "g/1", [*PHRASE[:6], *OTHER[:6]]))


@pytest.mark.parametrize("policy", ["token", "class"])
def test_an_engine_that_verifies_trees_gets_what_several_siblings_wrote(make_rig, policy):
    rig = make_rig(paths=2, policy=policy)
    write_in_two_ways(rig)
    (draft,) = rig.propose([rig.open(0, "g/2", PHRASE[:6])], [0])
    (parents,) = rig.parents()
    assert len(draft) == 8
    assert {token for token, parent in zip(draft, parents, strict=True) if parent < 0} == {
        PHRASE[6],
        OTHER[0],
    }
    paths = []
    for token, parent in zip(draft, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        assert paths[-1] in (PHRASE[6:12][: len(paths[-1])], OTHER[:6][: len(paths[-1])])


def test_an_engine_that_verifies_lines_gets_the_likelier_one(make_rig):
    rig = make_rig()
    write_in_two_ways(rig)
    assert rig.propose([rig.open(0, "g/2", PHRASE[:6])], [0]) == [OTHER[:6]]
    assert rig.parents() == [[-1, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("policy", ["token", "class"])
def test_each_policy_drafts_what_pays(make_rig, policy):
    rig = make_rig(policy=policy)
    handle = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]], probe=True)
    (draft,) = rig.propose([handle], [0])
    assert draft == PHRASE[5 : 5 + len(draft)]
    assert len(draft) == 8


def test_a_forgotten_group_drafts_no_more_and_may_come_back(make_rig):
    rig = make_rig()
    first = rig.open(0, "g/0", PHRASE)
    rig.source.forget("g")
    rig.source.forget("unknown")
    assert rig.propose([first], [0]) == [[]]
    rig.source.close(first)
    again = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]])
    assert rig.propose([again], [0]) == [PHRASE[5:13]]


def test_ids_that_come_again_in_another_rollout_are_drafted_from_what_is_written_there(make_rig):
    rig = make_rig()
    rig.source.close(rig.open(0, "g/0", PHRASE, rollout_id="first"))
    again = rig.open(0, "g/0", rollout_id="second")
    rig.write(0, OTHER)
    assert rig.propose([again], [0]) == [[]]
    sibling = rig.open(1, "g/1", OTHER[:6], rollout_id="second")
    assert rig.propose([sibling], [1]) == [OTHER[6:14]]
    assert rig.source.stats()["index_groups"] == 1
    assert rig.source.stats()["index_mismatched"] == 0


def test_reset_drops_everything(make_rig):
    rig = make_rig()
    rig.source.close(rig.open(0, "g/0", PHRASE))
    assert rig.source.stats()["index_tokens"] > 0
    rig.source.reset()
    assert rig.source.stats()["index_tokens"] == 0
    handle = rig.open(0, "g/1", PHRASE[:6])
    assert rig.propose([handle], [0]) == [[]]


def test_without_memory_chunks_run_without_drafts(make_rig):
    rig = make_rig(memory_bytes=1 << 20)
    texts = [np.random.default_rng(seed).integers(0, 1000, 400).tolist() for seed in range(300)]
    for number, text in enumerate(texts):
        handle = rig.open(0, f"g{number}/0", text, group=f"g{number}")
        rig.propose([handle], [0])
        rig.source.close(handle)
    figures = rig.source.stats()
    assert figures["index_dropped_for_memory"] > 0
    assert figures["index_bytes"] <= 1 << 20
    handle = rig.open(0, "g0/0", [*texts[0][:50], *texts[0][:5]], group="g0")
    assert rig.propose([handle], [0]) == [texts[0][5:13]]


def test_a_group_of_512_and_a_response_of_400_tokens_each_fit(make_rig):
    rig = make_rig()
    for number in range(512):
        rig.source.close(rig.open(0, f"g/{number}", [*range(number, number + 400)]))
    handle = rig.open(0, "g/512", [*range(300, 310)])
    assert rig.propose([handle], [0]) == [[*range(310, 318)]]


def test_more_chunks_may_be_open_than_run_at_once(make_rig):
    rig = make_rig()
    handles = [rig.open(number % 8, f"g/{number}", [*PHRASE, *PHRASE[:5]]) for number in range(100)]
    assert len(set(handles)) == 100
    assert rig.propose(handles[-2:], [2, 3]) == [PHRASE[5:13]] * 2
    for handle in handles:
        rig.source.close(handle)


def test_handles_are_used_again_without_mixing_requests_up(make_rig):
    rig = make_rig()
    one = rig.open(0, "g/0", [*PHRASE, *PHRASE[:5]])
    rig.source.close(one)
    other = rig.open(1, "h/0", [500, 501, 502, 503, 500, 501], group="h")
    assert other == one
    assert rig.propose([other], [1])[0][:2] == [502, 503]


def test_a_worker_gets_every_setting_that_its_source_has():
    settings = GroupedDrafter(Settings(lookup_min=3, draft_tokens=4), None).source().settings
    source = msgspec.convert(msgspec.to_builtins(settings), SourceSettings)
    assert source == SourceSettings(lookup_min=3)
