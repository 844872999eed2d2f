"""The index against a naive model: lists of tokens, and a search through all of them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from seer_grouped_spec import DraftIndex, DraftIndexError, Voting

from .helpers import draft

TEXT = st.lists(st.integers(0, 3), max_size=40)  # few tokens, so that contexts recur


def follows(context, path, text):
    """Say whether ``text`` goes on with ``path`` where its context ends like ``context``."""
    n = len(path)
    return any(
        text[at : at + n] == path and text[at - 1] == context[-1] for at in range(1, len(text) - n + 1)
    )


class Group:
    def __init__(self, handle, prompt, touched, ttl):
        self.handle, self.prompt, self.touched, self.ttl = handle, prompt, touched, ttl
        self.requests = []

    def texts(self):
        return [self.prompt, *(self.prompt + request.text for request in self.requests)]


class Request:
    def __init__(self, handle, group):
        self.handle, self.group = handle, group
        self.text, self.open = [], True


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        common_weight=st.sampled_from([0.0, 0.05, 1.0]),
        gather=st.sampled_from([1, 8, 48, 256]),
        lookup_min=st.sampled_from([1, 2, 3, 5]),
        floor=st.sampled_from([0.0, 0.1]),
    )
    def start(self, common_weight, gather, lookup_min, floor):
        self.voting = Voting(
            common_weight=common_weight, gather=gather, lookup_min=lookup_min, min_probability=floor
        )
        self.index = DraftIndex(1 << 22, voting=self.voting)
        self.now, self.groups, self.gone, self.stale = 0.0, [], [], []

    def requests(self):
        return [request for group in self.groups for request in group.requests]

    @rule(prompt=TEXT, ttl=st.integers(1, 30))
    def open_group(self, prompt, ttl):
        handle = self.index.open_group(np.array(prompt, np.int32), self.now, float(ttl))
        self.groups.append(Group(handle, prompt, self.now, ttl))

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def open_request(self, data):
        group = data.draw(st.sampled_from(self.groups))
        group.requests.append(Request(self.index.open_request(group.handle), group))

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), tokens=TEXT, shift=st.integers(-3, 1))
    def append(self, data, tokens, shift):
        request = data.draw(st.sampled_from(self.requests()))
        before = len(request.text) + shift
        overlap = request.text[max(before, 0) :]
        good = (
            before >= 0 and shift <= 0 and request.open and tokens[: len(overlap)] == overlap[: len(tokens)]
        )
        new = np.array(tokens, np.int32)
        if good:
            self.index.append(request.handle, before, new)
            request.text += tokens[-shift:]
        else:
            with pytest.raises(DraftIndexError, match=str(before) if before < 0 else str(request.handle)):
                self.index.append(request.handle, before, new)

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 3), min_size=1, max_size=12))
    def append_one_by_one_in_turns(self, data, tokens):
        open_ones = [request for request in self.requests() if request.open]
        for token in tokens:
            for request in open_ones:
                self.index.append(request.handle, len(request.text), np.array([token], np.int32))
                request.text.append(token)

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def close_request(self, data):
        request = data.draw(st.sampled_from(self.requests()))
        self.index.close_request(request.handle)
        request.open = False

    def forget(self, group):
        self.groups.remove(group)
        self.stale += [request.handle for request in group.requests]
        self.gone += [request.text for request in group.requests]

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def drop_group(self, data):
        group = data.draw(st.sampled_from(self.groups))
        self.index.drop_group(group.handle)
        self.forget(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def touch_group(self, data):
        group = data.draw(st.sampled_from(self.groups))
        self.index.touch_group(group.handle, self.now)
        group.touched = self.now

    @rule(passed=st.integers(0, 10))
    def expire(self, passed):
        self.now += passed
        over = [group for group in self.groups if self.now - group.touched >= group.ttl]
        assert sorted(self.index.expire(self.now)) == sorted(group.handle for group in over)
        for group in over:
            self.forget(group)

    @precondition(lambda self: self.requests())
    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, 3), max_size=5),
        limit=st.integers(0, 12),
        tree=st.booleans(),
        top_k=st.integers(0, 3),
        paths=st.integers(0, 4),
    )
    def draft(self, data, tail, limit, tree, top_k, paths):
        chosen = data.draw(st.lists(st.sampled_from(self.requests()), max_size=10, unique=True))
        for request in chosen:
            if request.open:
                request.text += tail
        items = [(request.handle, request.group.prompt + request.text) for request in chosen]
        items += [(handle, [0, 1]) for handle in self.stale[-2:]]
        drafts = draft(self.index, items, limit, tree=tree, top_k=top_k, paths=paths, width=max(limit, 1))
        if tree and not top_k and not paths:
            # At each place a token at least as probable as the line's: the line's next one could be had.
            for line, drafted in zip(
                draft(self.index, items, limit, width=max(limit, 1)), drafts, strict=True
            ):
                assert len(line.tokens) <= len(drafted.tokens)
                assert all(
                    a <= b * 1.0001 for a, b in zip(line.probabilities, drafted.probabilities, strict=False)
                )
        for request, (_, text), drafted in zip(chosen, items, drafts, strict=False):
            if request.open:
                self.check(request, text, drafted, limit, tree, top_k, paths)
            else:
                assert drafted.tokens == []
        assert all(drafted.tokens == [] for drafted in drafts[len(chosen) :])

    def check(self, request, text, drafted, limit, tree, top_k, paths):
        assert len(drafted.tokens) <= limit
        assert all(parent < number for number, parent in enumerate(drafted.parents))
        for number, parent in enumerate(drafted.parents):
            above = 1.0 if parent < 0 else drafted.probabilities[parent]
            assert self.voting.min_probability <= drafted.probabilities[number] <= above
        if tree:
            edges = list(zip(drafted.parents, drafted.tokens, strict=True))
            assert len(set(edges)) == len(edges)
            assert not paths or len(set(range(len(edges))) - set(drafted.parents)) <= paths
            assert drafted.probabilities == sorted(drafted.probabilities, reverse=True)
            assert not top_k or all(drafted.parents.count(p) <= top_k for p in drafted.parents)
        texts = request.group.texts()
        common = self.gone if self.voting.common_weight else []
        for path in drafted.paths():
            assert any(follows(text, path, source) for source in (*texts, *common))
        least = self.voting.lookup_min
        if limit and not self.voting.min_probability and self.voting.gather == 256 and len(text) >= least:
            # Few places, so all are looked at: every match drafts.
            ends = [(source, at) for source in texts for at in range(least, len(source))]
            matching = any(source[at - least : at] == text[-least:] for source, at in ends)
            if sum(map(len, texts)) < 60:
                assert bool(drafted.tokens) or not matching

    @invariant()
    def what_is_stored_is_what_was_written(self):
        if not hasattr(self, "index"):
            return
        for request in self.requests():
            stored = self.index.tokens(request.handle, 0, self.index.length(request.handle))
            assert stored.tolist() == request.text
        stats = self.index.stats()
        assert (stats.groups, stats.requests) == (len(self.groups), len(self.requests()))
        assert stats.tokens == sum(len(g.prompt) for g in self.groups) + sum(
            len(r.text) for r in self.requests()
        )


IndexMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
test_the_index_agrees_with_a_naive_model = IndexMachine.TestCase
