from types import SimpleNamespace

import pytest
import seer_divided_rollout
from hypothesis import given
from hypothesis import strategies as st
from seer_divided_rollout import Chunks, Settings

from seer_core.model import GroupContext, Request


@given(chunk=st.integers(1, 5000), limit=st.integers(1, 5000), data=st.data())
def test_a_chunk_is_full_or_the_last(chunk, limit, data):
    generated = data.draw(st.integers(0, limit - 1))
    request = Request("g/0", 0, 0, GroupContext("g", 0, 1, 10, limit), generated_tokens=generated)
    assert Chunks(chunk).split(request) == min(chunk, limit - generated)


@pytest.mark.parametrize(("limit", "sizes"), [(100, [40, 40, 20]), (80, [40, 40]), (3, [3])])
def test_chunks_add_up_to_the_whole_request(limit, sizes):
    request = Request("g/0", 0, 0, GroupContext("g", 0, 1, 10, limit))
    splitter = Chunks(40)
    found = []
    while request.remaining_tokens:
        found.append(splitter.split(request))
        request.generated_tokens += found[-1]
    assert found == sizes


def test_the_hook_passes_its_setting_on():
    splitter = seer_divided_rollout.seer_make_splitter(Settings(chunk_tokens=7), SimpleNamespace())
    assert splitter.chunk_tokens == 7
