"""An instance is sent all tokens of its group, each once, and none that it has."""

from hypothesis import given
from hypothesis import strategies as st

from seer_core.ports.drafting import SiblingTokens
from seer_core.scheduling.sibling_tokens import SiblingLog


def sent(shared, instance):
    return {text.request_id: (text.start, text.token_ids) for text in shared.take_pending(instance)}


def test_an_instance_that_joins_late_is_sent_everything_once():
    shared = SiblingLog("r", "g")
    shared.record("x", "g/0", [1, 2, 3])
    shared.record("y", "g/1", [4])
    assert shared.take_pending("late") == [
        SiblingTokens("r", "g", "g/0", 0, [1, 2, 3]),
        SiblingTokens("r", "g", "g/1", 0, [4]),
    ]
    assert shared.take_pending("late") == []


def test_only_what_is_new_is_sent():
    shared = SiblingLog("r", "g")
    shared.record("x", "g/0", [1, 2, 3])
    assert sent(shared, "y") == {"g/0": (0, [1, 2, 3])}
    shared.record("x", "g/0", [1, 2, 3, 4, 5])
    assert sent(shared, "y") == {"g/0": (3, [4, 5])}


def test_own_text_is_not_sent_back():
    shared = SiblingLog("r", "g")
    shared.record("x", "g/0", [1, 2, 3])
    assert shared.take_pending("x") == []
    shared.record("y", "g/0", [1, 2, 3, 4])  # it has moved
    assert sent(shared, "x") == {"g/0": (3, [4])}
    shared.record("x", "g/0", [1, 2, 3, 4])  # and comes back with its next chunk
    assert shared.take_pending("x") == []


def test_an_instance_that_was_lost_is_sent_everything_again():
    shared = SiblingLog("r", "g")
    shared.record("x", "g/0", [1, 2, 3])
    shared.record("y", "g/1", [4])
    shared.take_pending("x")
    shared.lost("x")
    shared.lost("never seen")
    assert sent(shared, "x") == {"g/0": (0, [1, 2, 3]), "g/1": (0, [4])}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.sampled_from("xyz"), st.integers(0, 3), st.integers(1, 5)),
            st.tuples(st.sampled_from(["send", "lose"]), st.sampled_from("xyz")),
        )
    )
)
def test_an_instance_has_all_text_after_it_was_sent_and_gets_no_token_twice(story):
    shared = SiblingLog("r", "g")
    texts = {}
    held = {name: {} for name in "xyz"}
    for what, instance, *numbers in story:
        if what == "write":
            request, tokens = str(numbers[0]), numbers[1]
            text = texts.setdefault(request, [])
            text += range(len(text), len(text) + tokens)
            shared.record(instance, request, text)
            held[instance][request] = list(text)
        elif what == "lose":
            shared.lost(instance)
            held[instance] = {}
        else:
            for each in shared.take_pending(instance):
                mine = held[instance].setdefault(each.request_id, [])
                assert each.start == len(mine)
                mine += each.token_ids
            assert held[instance] == texts
