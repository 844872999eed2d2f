import numpy as np
import pytest
from seer_grouped_spec import DraftIndex, DraftIndexError, Voting

from seer_core.errors import SeerError

from .helpers import FOREVER, draft, ids

PROMPT = ids(1, 2, 3)


@pytest.fixture
def index():
    return DraftIndex()


def open_pair(index, prompt=PROMPT):
    group = index.open_group(prompt, 0.0, FOREVER)
    return group, index.open_request(group), index.open_request(group)


def test_a_request_is_drafted_what_its_sibling_wrote(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(10, 11, 12, 13, 14))
    (drafted,) = draft(index, [(request, [1, 2, 3, 10])])
    assert drafted.tokens == [11, 12, 13, 14]


def test_the_prompt_is_drafted_from_and_its_end_leads_into_the_responses(index):
    _, sibling, request = open_pair(index, ids(1, 2, 3, 4, 1, 2))
    assert draft(index, [(request, [1, 2, 3, 4, 1, 2])])[0].tokens[:2] == [3, 4]
    index.append(sibling, 0, ids(90, 91))
    tree = draft(index, [(request, [1, 2, 3, 4, 1, 2])], 8, tree=True)[0]
    assert [90, 91] in tree.paths()


def test_own_text_weighs_more_than_a_siblings(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(7, 8, 50))
    assert draft(index, [(request, [1, 2, 3, 7, 8, 60, 7, 8])], 1)[0].tokens == [60]


def test_the_longer_match_wins(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(20, 21, 22, 23, 77, 50, 23, 88, 51, 23, 88))
    assert draft(index, [(request, [1, 2, 3, 20, 21, 22, 23])], 1)[0].tokens == [77]


def test_a_draft_appends_what_is_new_in_the_row(index):
    _, request, other = open_pair(index)
    draft(index, [(request, [1, 2, 3, 30, 31])], 0, width=4)
    assert index.length(request) == 2
    draft(index, [(request, [1, 2, 3, 30, 31, 32])], 4)
    assert index.tokens(request, 0, 3).tolist() == [30, 31, 32]
    assert index.length(other) == 0


def test_limit_zero_appends_and_drafts_nothing(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(10, 11))
    assert draft(index, [(request, [1, 2, 3, 10])], 0, width=8)[0].tokens == []
    assert index.length(request) == 1


def test_limits_above_the_buffer_are_cut_to_it(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(*range(10, 60)))
    assert draft(index, [(request, [1, 2, 3, 10])], 99, width=5)[0].tokens == [11, 12, 13, 14, 15]


def test_probabilities_fall_along_a_path_and_stay_within_0_and_1(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(10, 11, 12, 13, 10, 11, 12, 14, 10, 11, 15))
    (drafted,) = draft(index, [(request, [1, 2, 3, 10])])
    assert drafted.tokens[0] == 11
    assert all(
        1 >= a >= b > 0 for a, b in zip([1, *drafted.probabilities], drafted.probabilities, strict=False)
    )


def test_weak_candidates_are_cut_by_min_probability():
    text, siblings = [1, 2, 3, 10], ids(10, 11, 12, 13, 10, 11, 12, 14)
    cut, whole = [], []
    for floor, drafts in ((0.0, whole), (0.3, cut)):
        index = DraftIndex(voting=Voting(min_probability=floor))
        _, sibling, request = open_pair(index)
        index.append(sibling, 0, siblings)
        drafts += draft(index, [(request, text)])
        drafts += draft(index, [(request, text)], 16, tree=True)
    for kept, full in zip(cut, whole, strict=True):
        assert all(p >= 0.3 for p in kept.probabilities)
        assert len(kept.tokens) == sum(p >= 0.3 for p in full.probabilities)


def test_a_match_shorter_than_lookup_min_does_not_draft():
    for least, expected in ((2, [33]), (3, [])):
        index = DraftIndex(voting=Voting(lookup_min=least))
        _, sibling, request = open_pair(index)
        index.append(sibling, 0, ids(31, 32, 33))
        assert draft(index, [(request, [1, 2, 3, 40, 31, 32])])[0].tokens == expected


def test_matches_beyond_lookup_max_count_as_equally_long():
    votes = {}
    for most in (1, 64):
        index = DraftIndex(voting=Voting(lookup_max=most, soft_match=0.0))
        _, sibling, request = open_pair(index)
        index.append(sibling, 0, ids(20, 21, 22, 23, 77, 50, 23, 88, 51, 23, 88))
        votes[most] = draft(index, [(request, [1, 2, 3, 20, 21, 22, 23])], 1)[0].tokens
    assert votes == {1: [88], 64: [77]}


def test_a_tree_holds_several_continuations_most_probable_first(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(5, 6, 5, 7, 5, 6, 5, 8))
    (tree,) = draft(index, [(request, [1, 2, 3, 5])], 12, tree=True)
    assert {6, 7, 8} <= {path[0] for path in tree.paths()}
    assert tree.tokens[0] == 6
    assert tree.probabilities == sorted(tree.probabilities, reverse=True)
    assert all(parent < number for number, parent in enumerate(tree.parents))


def test_top_k_bounds_the_children_of_every_node(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(5, 6, 5, 7, 5, 6, 5, 8, 5, 9))
    for top_k in (1, 2):
        (tree,) = draft(index, [(request, [1, 2, 3, 5])], 24, tree=True, top_k=top_k)
        assert max(tree.parents.count(parent) for parent in tree.parents) == top_k


def test_paths_bounds_the_leaves_of_a_tree_and_one_path_is_a_line(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(5, 6, 5, 7, 9, 5, 6, 5, 8, 5, 9, 5, 6, 5, 7))
    asked = [(request, [1, 2, 3, 5])]
    [line] = draft(index, asked)
    for paths in (1, 2, 3):
        (tree,) = draft(index, asked, 12, tree=True, paths=paths)
        leaves = set(range(len(tree.tokens))) - set(tree.parents)
        assert len(leaves) == paths
        assert tree.probabilities == sorted(tree.probabilities, reverse=True)
    (tree,) = draft(index, asked, tree=True, paths=1)
    assert (tree.tokens, tree.parents) == (line.tokens, line.parents)
    assert tree.probabilities == pytest.approx(line.probabilities, rel=1e-5)


def test_max_depth_bounds_every_path(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(*range(10, 60)))
    assert len(draft(index, [(request, [1, 2, 3, 10])], 24, tree=True, max_depth=3)[0].tokens) == 3


def test_siblings_that_write_in_turns_make_no_path_that_none_of_them_wrote(index):
    _, first, second = open_pair(index)
    for token in range(50):
        index.append(first, token, ids(100 + token))
        index.append(second, token, ids(200 + token))
    (tree,) = draft(index, [(first, [1, 2, 3, *range(100, 150), 220])], 16, tree=True)
    assert tree.tokens
    assert all(path == list(range(221, 221 + len(path))) for path in tree.paths())


def test_a_siblings_tokens_are_not_drafted_for_another_group(index):
    _, sibling, _ = open_pair(index)
    index.append(sibling, 0, ids(10, 11, 12))
    _, _, stranger = open_pair(index)
    assert draft(index, [(stranger, [1, 2, 3, 10])])[0].tokens == []


def test_text_of_dropped_groups_drafts_for_others_at_a_low_weight(index):
    group, sibling, _ = open_pair(index)
    index.append(sibling, 0, ids(10, 11, 12, 13))
    index.drop_group(group)
    _, second, request = open_pair(index)
    assert index.stats().common_tokens == 4
    assert draft(index, [(request, [1, 2, 3, 10, 11])])[0].tokens == [12, 13]
    index.append(second, 0, ids(10, 11, 99))
    assert draft(index, [(request, [1, 2, 3, 10, 11])], 1)[0].tokens == [99]


def test_common_weight_zero_keeps_no_text_of_dropped_groups():
    index = DraftIndex(voting=Voting(common_weight=0.0))
    group, sibling, _ = open_pair(index)
    index.append(sibling, 0, ids(10, 11, 12, 13))
    index.drop_group(group)
    assert (index.stats().common_tokens, index.stats().bytes) == (0, 0)


def test_the_common_text_is_a_ring_of_the_newest():
    index = DraftIndex(common_bytes=1 << 15, voting=Voting(common_weight=1.0))
    for start in range(0, 20_000, 1_000):
        group, sibling, _ = open_pair(index)
        index.append(sibling, 0, np.arange(start, start + 1_000, dtype=np.int32))
        index.drop_group(group)
    assert index.stats().common_tokens < 4_000
    _, _, request = open_pair(index)
    assert draft(index, [(request, [1, 2, 3, 19_900, 19_901])], 2)[0].tokens == [19_902, 19_903]
    assert draft(index, [(request, [1, 2, 3, 19_900, 19_901, 100, 101])], 2)[0].tokens == []


def test_overlap_that_is_equal_is_skipped(index):
    _, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11, 12))
    index.append(request, 1, ids(11, 12, 13))
    index.append(request, 0, ids(10))
    assert index.tokens(request, 0, 4).tolist() == [10, 11, 12, 13]


def test_overlap_that_differs_is_an_error(index):
    _, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11, 12))
    with pytest.raises(DraftIndexError, match=r"tokens differ .* between 1 and 3"):
        index.append(request, 1, ids(11, 99, 13))
    assert index.length(request) == 3


def test_a_gap_is_an_error_that_says_what_is_missing(index):
    _, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11))
    with pytest.raises(
        DraftIndexError, match=r"prev_token_count is 3, but it has 2 tokens; send those from 2 on"
    ):
        index.append(request, 3, ids(13))


def test_negative_ids_and_counts_are_errors(index):
    _, request, _ = open_pair(index)
    with pytest.raises(DraftIndexError, match=r"append: token 1 is -5, but token ids are >= 0"):
        index.append(request, 0, ids(3, -5))
    with pytest.raises(DraftIndexError, match="open_group: token 0 is -1"):
        index.open_group(ids(-1), 0.0, FOREVER)
    with pytest.raises(DraftIndexError, match="prev_token_count is -1"):
        index.append(request, -1, ids(3))
    assert index.length(request) == 0


def test_the_largest_token_id_is_drafted(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(2**31 - 1, 0, 2**31 - 1))
    assert draft(index, [(request, [1, 2, 3, 0])])[0].tokens == [2**31 - 1]


def test_a_closed_request_keeps_its_text_but_takes_no_more(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(10, 11, 12))
    index.close_request(sibling)
    index.close_request(sibling)
    assert index.tokens(sibling, 0, 3).tolist() == [10, 11, 12]
    assert draft(index, [(request, [1, 2, 3, 10])])[0].tokens == [11, 12]
    assert draft(index, [(sibling, [1, 2, 3, 10, 11, 12])])[0].tokens == []
    with pytest.raises(DraftIndexError, match="it is closed"):
        index.append(sibling, 3, ids(13))


def test_stale_handles_raise_and_are_named_but_draft_gives_nothing(index):
    group, request, _ = open_pair(index)
    index.drop_group(group)
    for call in (
        lambda: index.append(request, 0, ids(1)),
        lambda: index.length(request),
        lambda: index.tokens(request, 0, 0),
        lambda: index.close_request(request),
    ):
        with pytest.raises(DraftIndexError, match=f"request {request} is unknown"):
            call()
    for call in (
        lambda: index.open_request(group),
        lambda: index.drop_group(group),
        lambda: index.touch_group(group, 1.0),
    ):
        with pytest.raises(DraftIndexError, match=f"group {group} is unknown"):
            call()
    assert [d.tokens for d in draft(index, [(request, [1, 2, 3]), (-1, [1]), (2**62, [1])])] == [[], [], []]
    assert index.stats().stale == 3


def test_a_handle_is_never_given_out_twice(index):
    seen = set()
    for _ in range(5_000):
        group = index.open_group(ids(), 0.0, FOREVER)
        assert group not in seen
        seen.add(group)
        index.drop_group(group)
    assert max(seen) < 2**31


def test_groups_expire_after_their_ttl_unless_touched(index):
    old = index.open_group(PROMPT, 0.0, 10.0)
    touched = index.open_group(PROMPT, 0.0, 10.0)
    forever = index.open_group(PROMPT, 0.0, FOREVER)
    index.touch_group(touched, 5.0)
    assert index.expire(9.9) == []
    assert index.expire(10.0) == [old]
    assert index.expire(15.0) == [touched]
    index.touch_group(forever, 1e9)
    assert index.stats().groups == 1
    assert index.stats().dropped_by_ttl == 2


def test_memory_is_bounded_and_the_least_recently_used_group_goes_first():
    index = DraftIndex(1 << 20, voting=Voting(common_weight=0.0))
    kept, kept_request, _ = open_pair(index)
    requests = []
    rng = np.random.default_rng(0)
    for _ in range(12):
        _, request, _ = open_pair(index)
        requests.append(request)
        index.append(request, 0, rng.integers(0, 2**31, 3_000, np.int32))
        assert index.stats().bytes <= 1 << 20
        index.touch_group(kept, 0.0)
    dropped = index.stats().dropped_for_memory
    assert 0 < dropped < 12
    assert index.length(kept_request) == 0
    for request in requests[:dropped]:
        with pytest.raises(DraftIndexError, match="is unknown"):
            index.length(request)
    assert all(index.length(request) == 3_000 for request in requests[dropped:])


def test_a_group_that_is_being_drafted_for_is_not_dropped_for_memory():
    index = DraftIndex(1 << 20, voting=Voting(common_weight=0.0))
    _, request, _ = open_pair(index)
    draft(index, [(request, [1, 2, 3, 4])])
    rng = np.random.default_rng(0)
    _, hungry, _ = open_pair(index)
    with pytest.raises(DraftIndexError, match="raise memory_bytes"):
        index.append(hungry, 0, rng.integers(0, 2**31, 100_000, np.int32))
    assert index.length(request) == 1
    assert index.stats().bytes <= 1 << 20


def test_a_request_whose_new_tokens_find_no_room_is_not_drafted_for_until_its_text_is_there():
    index = DraftIndex(1 << 20, voting=Voting(common_weight=0.0))
    _, request, _ = open_pair(index)
    text = [1, 2, 3, 7, *np.random.default_rng(1).integers(0, 2**31, 60_000).tolist(), 1, 2]
    assert draft(index, [(request, text)])[0].tokens == []
    stored = index.length(request)
    assert 0 < stored < 60_000
    shorter = text[: 3 + stored]
    assert draft(index, [(request, shorter)])[0].tokens == []
    assert (index.stats().unstored, index.stats().mismatched) == (2, 0)
    index.append(request, 0, ids(*shorter[3:]))
    assert draft(index, [(request, shorter)], 0)[0].tokens == []
    assert (index.stats().unstored, index.stats().mismatched) == (2, 0)


def test_a_group_of_512_requests_keeps_them_apart(index):
    group = index.open_group(PROMPT, 0.0, FOREVER)
    requests = [index.open_request(group) for _ in range(512)]
    for number, request in enumerate(requests):
        index.append(request, 0, np.arange(1_000 * number, 1_000 * number + 20, dtype=np.int32))
    reader = index.open_request(group)
    for number in (0, 255, 256, 511):
        text = [1, 2, 3, 1_000 * number + 5]
        assert draft(index, [(index.open_request(group), text)], 3)[0].tokens == [
            text[3] + n for n in (1, 2, 3)
        ]
    assert index.length(reader) == 0


def test_the_2048th_request_of_a_group_is_an_error(index):
    group = index.open_group(PROMPT, 0.0, FOREVER)
    for _ in range(2_047):
        index.open_request(group)
    with pytest.raises(DraftIndexError, match="2047 requests, of 2047 at most"):
        index.open_request(group)


def test_a_response_of_100_000_tokens_is_drafted_from_its_far_end(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, np.arange(100_000, dtype=np.int32))
    assert draft(index, [(request, [1, 2, 3, 99_990])])[0].tokens == list(range(99_991, 99_999))
    assert index.stats().tokens == 100_004


def test_a_response_beyond_a_million_tokens_is_an_error(index):
    _, request, _ = open_pair(index)
    most = (1 << 20) - 65
    index.append(request, 0, np.zeros(most, np.int32))
    with pytest.raises(DraftIndexError, match=f"more than {most} tokens cannot be indexed"):
        index.append(request, most, ids(1))


def test_what_does_not_go_on_from_what_the_index_holds_gets_no_draft(index):
    _, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11, 12))
    short, bad = [1, 2, 3, 10], [1, 2, 3, 10, 11, 12, -4]
    other, prompt = [1, 2, 3, 10, 11, 99, 5], [1, 9, 3, 10, 11, 12, 5]
    texts = [short, bad, other, prompt]
    assert [d.tokens for d in draft(index, [(request, text) for text in texts])] == [[]] * 4
    assert index.stats().mismatched == 4
    gap = arrays(requests=np.array([request]), lengths=ids(8), written=ids(1), new_tokens=ids(14))
    index.draft(**gap)
    assert index.stats().mismatched == 5
    assert index.length(request) == 3


def test_tokens_that_the_index_has_already_are_skipped(index):
    _, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11, 12))
    asked = arrays(requests=np.array([request]), lengths=ids(8), written=ids(3), new_tokens=ids(12, 13, 14))
    index.draft(**asked)
    assert index.tokens(request, 0, index.length(request)).tolist() == [10, 11, 12, 13, 14]
    assert index.stats().mismatched == 0


def test_a_request_that_occurs_twice_in_a_batch_takes_the_first_row_only(index):
    _, request, _ = open_pair(index)
    draft(index, [(request, [1, 2, 3, 10, 11]), (request, [1, 2, 3, 20, 21, 22])])
    assert index.tokens(request, 0, index.length(request)).tolist() == [10, 11]


def arrays(**changes):
    made = {
        "requests": np.zeros(1, np.int64),
        "lengths": np.full(1, 3, np.int32),
        "written": np.zeros(1, np.int32),
        "new_tokens": np.zeros(0, np.int32),
        "limits": np.full(1, 4, np.int32),
        "out": np.zeros((1, 4), np.int32),
        "counts": np.zeros(1, np.int32),
        "probabilities": np.zeros((1, 4), np.float32),
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"written": ids(4)}, r"written\[0\] is 4, but of its tokens there are 0..3"),
        ({"written": ids(-1)}, r"written\[0\] is -1"),
        ({"lengths": ids(-1)}, r"lengths\[0\] is -1, but lengths start at 0"),
        ({"limits": ids(-1)}, r"limits\[0\] is -1, but limits start at 0"),
        ({"new_tokens": ids(5)}, "new_tokens has 1 tokens, but written adds up to 0"),
        ({"written": ids(2), "new_tokens": ids(5)}, "new_tokens has 1 tokens, but written adds up to 2"),
        ({"lengths": ids()}, "lengths has 0 items for 1 requests"),
        ({"written": np.zeros(1, np.int64)}, "written holds int64; pass a C-contiguous numpy array of int32"),
        ({"requests": np.zeros(1, np.float32)}, "requests holds float32"),
        ({"new_tokens": np.zeros((1, 1), np.int32)}, "new_tokens has rank 2"),
        ({"new_tokens": np.zeros(4, np.int32)[::2]}, "new_tokens is not contiguous"),
        ({"new_tokens": [1]}, "new_tokens is a list"),
        ({"out": np.zeros((0, 4), np.int32)}, r"out has shape \(0, 4\)"),
        ({"probabilities": np.zeros((1, 3), np.float32)}, r"probabilities has shape \(1, 3\)"),
        ({"probabilities": np.zeros((1, 4))}, "probabilities holds float64"),
        ({"out": np.broadcast_to(np.int32(0), (1, 4)).copy()[:, ::2]}, "out is not contiguous"),
    ],
)
def test_arrays_that_do_not_fit_are_errors_that_name_them(index, changes, message):
    open_pair(index)
    with pytest.raises(DraftIndexError, match=message):
        index.draft(**arrays(**changes))


def test_a_read_only_output_is_an_error(index):
    out = np.zeros((1, 4), np.int32)
    out.setflags(write=False)
    with pytest.raises(DraftIndexError, match="out is read-only"):
        index.draft(**arrays(out=out))


def test_an_empty_batch_and_an_empty_row_draft_nothing(index):
    empty = {name: np.zeros((0, *a.shape[1:]), a.dtype) for name, a in arrays().items()}
    index.draft(**arrays(**empty))
    group = index.open_group(ids(), 0.0, FOREVER)
    assert draft(index, [(index.open_request(group), [])])[0].tokens == []


def test_handles_may_be_int32(index):
    _, sibling, request = open_pair(index)
    index.append(sibling, 0, ids(9, 1, 2, 3, 40))
    made = arrays(requests=np.array([request], np.int32))
    index.draft(**made)
    assert made["out"][0, 0] == 40 or made["out"][0, 0] == 9


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"lookup_min": 0}, "lookup_min is 0; pass 1 to 64"),
        ({"lookup_min": 9, "lookup_max": 8}, "lookup_max is 8; pass 9 to 64"),
        ({"gather": 257}, "gather is 257"),
        ({"min_probability": float("nan")}, "min_probability is nan"),
        ({"escape": 0.0}, "escape is 0.0"),
    ],
)
def test_parameters_out_of_range_are_errors(parameters, message):
    with pytest.raises(DraftIndexError, match=message):
        Voting(**parameters)


def test_memory_below_the_least_is_an_error():
    with pytest.raises(DraftIndexError, match="memory_bytes is 10"):
        DraftIndex(10)


def test_times_that_are_not_numbers_are_errors(index):
    with pytest.raises(DraftIndexError, match="now_s is not a number"):
        index.open_group(PROMPT, float("nan"), 1.0)
    with pytest.raises(DraftIndexError, match="now_s is not a number"):
        index.expire(float("nan"))


def test_index_errors_are_seer_errors():
    assert issubclass(DraftIndexError, SeerError)


def test_tokens_outside_the_text_are_an_error(index):
    _, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11))
    with pytest.raises(DraftIndexError, match=r"\[0, 3\) is not within its 2 tokens"):
        index.tokens(request, 0, 3)


def test_clear_drops_everything_and_makes_handles_stale(index):
    group, request, _ = open_pair(index)
    index.append(request, 0, ids(10, 11))
    index.clear()
    stats = index.stats()
    assert (stats.tokens, stats.bytes, stats.groups, stats.requests) == (0, 0, 0, 0)
    with pytest.raises(DraftIndexError):
        index.open_request(group)


def test_memory_accounts_return_to_zero_when_groups_go():
    index = DraftIndex(voting=Voting(common_weight=0.0))
    group, request, sibling = open_pair(index)
    index.append(request, 0, np.arange(5_000, dtype=np.int32))
    index.close_request(request)
    index.append(sibling, 0, np.arange(5_000, dtype=np.int32))
    assert index.stats().tokens == 10_003
    index.drop_group(group)
    assert (index.stats().bytes, index.stats().tokens) == (0, 0)
