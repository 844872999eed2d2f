from seer_testing import DrafterContract, DraftSourceContract

import seer_own_words

pytest_plugins = ["seer_testing.simulate"]


class TestOwnWords(DrafterContract):
    draft_tokens = 4

    def make(self):
        return seer_own_words.OwnWords(draft_tokens=4)


class TestLookup(DraftSourceContract):
    def make_source(self, host):
        return seer_own_words.Lookup({}, host)


def test_it_saves_time_and_changes_no_token(simulation):
    plain, drafted = simulation.run(), simulation.run(["own_words"])
    assert drafted.summary.drafted_tokens > 0
    assert drafted.makespan_s < plain.makespan_s
    assert drafted.tokens == plain.tokens
