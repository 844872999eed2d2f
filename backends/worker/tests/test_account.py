"""The account of a request's drafts."""

import pytest
from seer_worker.process.account import RequestStats


@pytest.mark.parametrize(
    ("drafts", "kept", "accepted", "computed"),
    [
        ([5, 6, 7], [5, 6, 7, 8], [1, 1, 1], 4),
        ([5, 6, 7], [9], [0, 0, 0], 1),
        ([5, 6, 7], [5, 9], [1, 0, 0], 2),
        ([5, 2, 7], [5, 2], [1, 1, 0], 2),
        ([2], [2], [1], 1),
    ],
    ids=["all", "none", "one", "an accepted draft ends the response", "and the first one does"],
)
def test_a_step_books_what_it_verified_and_what_was_kept(drafts, kept, accepted, computed):
    account = RequestStats(computed_tokens=len(drafts) + 1)
    account.verified(drafts, len(kept), kept[-1])
    assert account.drafted_at == [1] * len(drafts)
    assert account.accepted_at == accepted
    assert account.computed_tokens == computed
    assert account.spared_steps == len(kept) - 1


def test_steps_with_drafts_of_other_lengths_add_up():
    account = RequestStats()
    account.verified([5], 2, 9)
    account.verified([1, 2, 3], 3, 9)
    account.verified([4, 4], 1, 9)
    assert (account.drafted_at, account.accepted_at) == ([3, 2, 1], [2, 1, 0])
