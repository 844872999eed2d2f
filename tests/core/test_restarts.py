"""How long instances pause before they are started again."""

from seer_core.runtime.restarts import LONGEST_PAUSE_S, RestartBudget, RestartsTable


def test_pauses_double_up_to_a_minute_however_many_restarts_there_are():
    budget = RestartBudget(RestartsTable(attempts=2000, window_s=1.0, backoff_s=0.5))
    pauses = [budget.take("one") for _ in range(2000)]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert budget.take("one") is None
