"""Draft policies, drafters and draft sources that break their contract in one way each."""

import re
import threading

import pytest
from seer_testing import DrafterContract, DraftPolicyContract, DraftSourceContract

from seer_core.ports.drafting import SourceSpec


def contract_of(base, make):
    """Return a contract whose parts are made like that."""
    methods = {
        DraftPolicyContract: {"make_policy": lambda self, step_times: make()},
        DrafterContract: {"make": lambda self: make(), "patience_s": 0.05},
        DraftSourceContract: {"make_source": lambda self, host: make()},
    }
    return type(f"{base.__name__} of {make.__name__}", (base,), methods[base])


# Policies


class Policy:
    """Drafts of one length, in order until broken."""

    def lengths(self, probes, others):
        return (2, 2)

    def record_acceptance(self, drafted_at, accepted_at):
        pass


class Lister(Policy):
    def lengths(self, probes, others):
        return [2, 2]


class Dreamer(Policy):
    def lengths(self, probes, others):
        return (9, 2) if probes > others else (2, 2)


class Moody(Policy):
    made = 0

    def __init__(self):
        type(self).made += 1
        self.mood = self.made % 2

    def lengths(self, probes, others):
        return (self.mood, 0)


class Sorter(Policy):
    def record_acceptance(self, drafted_at, accepted_at):
        drafted_at.sort()


# Drafters


class Drafter:
    def source(self):
        return SourceSpec("module:Class", {"letters": "ab"}, 2)

    def shares(self):
        return False

    def policy(self, step_times):
        return Policy()


class NoDrafter:
    source = shares = print


class Coy(Drafter):
    """It says where its source is, and not what that is made of."""

    def source(self):
        return "module:Class"


class Fickle(Drafter):
    asked = 0

    def shares(self):
        self.asked += 1
        return self.asked == 1


class Stretching(Drafter):
    def policy(self, step_times):
        return Dreamer()


class MoodyDrafter(Drafter):
    def policy(self, step_times):
        return Moody()


class SortingDrafter(Drafter):
    def policy(self, step_times):
        return Sorter()


THE_END = threading.Event()


@pytest.fixture(autouse=True, scope="module")
def _end():
    yield
    THE_END.set()


# Sources


class Source:
    """Drafts the last token again, in order until broken."""

    def __init__(self):
        self.last = {}

    def open(self, job):
        handle = next(number for number in range(len(self.last) + 1) if number not in self.last)
        self.last[handle] = job.token_ids[-1]
        return handle

    def add_sibling_tokens(self, text):
        pass

    def propose(self, batch):
        for b, (handle, written) in enumerate(zip(batch.handles, batch.each_written(), strict=True)):
            if len(written):
                self.last[handle] = written[-1]
            limit = batch.limits[b]
            batch.drafts[b, :limit] = self.draft(self.last[handle], limit)
            batch.counts[b] = limit

    def draft(self, last, limit):
        return [last] * limit

    def close(self, handle):
        del self.last[handle]

    def forget(self, group_id):
        pass

    def reset(self):
        self.last.clear()

    def stats(self):
        return {"open": float(len(self.last))}

    def stop(self):
        pass


class NoSource(Source):
    forget = property()


class Generous(Source):
    def propose(self, batch):
        batch.drafts[:] = 7
        batch.counts[:] = batch.drafts.shape[1]


class Writer(Source):
    def propose(self, batch):
        super().propose(batch)
        batch.new_tokens[:] = 7


class Bush(Source):
    """Every token comes first, and they are all the same."""

    def propose(self, batch):
        super().propose(batch)
        batch.parents[:] = -1


class Nameless(Source):
    def open(self, job):
        return 0


class Strict(Source):
    def forget(self, group_id):
        assert group_id == "g", f"unknown group {group_id}"


class Touchy(Source):
    def add_sibling_tokens(self, text):
        assert text.start == 0, f"tokens before {text.start} are missing"


class Elephant(Source):
    """It drafts one text all the time."""

    def draft(self, last, limit):
        return [last + 1 + i for i in range(limit)]


class Reporter(Source):
    def stats(self):
        return {"mood": "good"}


class Haunted(Source):
    def open(self, job):
        threading.Thread(target=THE_END.wait, daemon=True).start()
        return super().open(job)


LENGTHS = "test_lengths_are_two_numbers_within_the_limit"
ALIKE = "test_two_with_the_same_input_decide_the_same"
UNCHANGED = "test_it_does_not_change_its_input"
PLAIN = "test_what_a_source_is_made_of_is_plain_data"
PLAIN = "test_what_a_source_is_made_of_is_plain_data"
LIMITS = "test_drafts_keep_to_their_limits"
WRITTEN = "test_only_drafts_and_counts_are_written"
TREES = "test_trees_are_trees_of_no_more_paths_than_the_engine_verifies"

FAULTS = {
    DraftPolicyContract: [
        (Lister, LENGTHS, "which is no pair"),
        (Moody, ALIKE, r"in step 0 one answered \(\d, 0\), and another \(\d, 0\)"),
        (Sorter, UNCHANGED, r"record_acceptance\(\) changed its arguments"),
    ],
    DrafterContract: [
        (NoDrafter, "test_it_is_a_drafter", ""),
        (Coy, PLAIN, "which is no SourceSpec"),
        (Fickle, "test_it_always_says_the_same_of_sharing", "answered .True, False, False."),
        (Stretching, LENGTHS, "drafts have 0 to 8 tokens"),
        (MoodyDrafter, ALIKE, ""),
        (SortingDrafter, UNCHANGED, ""),
    ],
    DraftSourceContract: [
        (NoSource, "test_it_has_the_methods_of_a_source", "lacks forget"),
        (Generous, LIMITS, r"drafted 6 tokens where \d were allowed"),
        (Writer, WRITTEN, "wrote into new_tokens"),
        (Bush, TREES, "two children of one parent are the same token"),
        (Nameless, "test_open_chunks_have_handles_of_their_own", ""),
        (Strict, "test_a_group_may_be_forgotten_at_any_time", "unknown group"),
        (Touchy, "test_siblings_may_be_learnt_at_any_time", "tokens before 100 are missing"),
        (Elephant, "test_after_a_reset_it_goes_on", "from before the reset"),
        (Reporter, "test_figures_are_numbers_by_name", ""),
        (Haunted, "test_it_stops_and_leaves_no_thread", "leaves a thread behind"),
    ],
}
BROKEN = [
    (contract_of(contract, make), test, words)
    for contract, faults in FAULTS.items()
    for make, test, words in faults
]


@pytest.mark.parametrize(
    ("contract", "test", "words"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in BROKEN],
)
def test_the_fault_is_found_and_named(contract, test, words, catches):
    assert re.search(words, catches(contract, test), re.DOTALL)


@pytest.mark.parametrize("contract", FAULTS)
def test_every_test_of_the_contract_finds_a_fault(contract, uncaught):
    assert not uncaught(contract, BROKEN)


class TestPolicyInOrder(DraftPolicyContract):
    def make_policy(self, step_times):
        return Policy()


class TestDrafterInOrder(DrafterContract):
    def make(self):
        return Drafter()


class TestSourceInOrder(DraftSourceContract):
    def make_source(self, host):
        return Source()
