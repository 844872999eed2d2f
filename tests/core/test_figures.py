import pytest
from seer_cli.stats import Stats, ratios, spread


def test_a_spread_is_the_median_the_least_and_the_most():
    assert spread([3, 1, 2]) == (2, 1, 3)
    assert spread(iter([4, 1])) == (2.5, 1, 4)


def test_ratios_are_taken_run_by_run():
    assert ratios([2, 9], [4, 3]) == [0.5, 3]
    with pytest.raises(ValueError, match="longer"):
        ratios([2], [4, 3])


def test_a_row_s_ratio_is_the_median_of_its_runs_ratios_and_not_the_ratio_of_medians():
    base, mine = Stats({"chunks": [1, 10, 100]}), Stats({"chunks": [4, 20, 100]})
    assert mine.ratio("chunks", base) == 2
    assert mine.to_json() == {"chunks": 20, "spread": {"chunks": [4, 100]}}


@pytest.mark.parametrize(("figure", "nothing"), [("chunks", 0), ("tail_time_s", 0.04)])
def test_there_is_no_ratio_to_nothing_not_even_in_one_run(figure, nothing):
    row = Stats({figure: [3, 3]})
    assert row.ratio(figure, Stats({figure: [1, nothing]})) is None
    assert row.ratios(Stats({figure: [1, nothing]})) == {}
    assert row.ratios(Stats({figure: [1, 3]})) == {figure: 2}
