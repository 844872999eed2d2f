"""Stop strings are found at the same token, however the response is cut into chunks and steps."""

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from seer_host.routed_experts import ROUTED_EXPERTS, packed, unpacked
from seer_worker.process.adapter import EndedChunk
from seer_worker.process.stops import StopStrings

from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob

PROMPT = [*b"xy"]


def decode(token_ids):
    return bytes(token_ids).decode(errors="replace")


def job(sampling, response=b""):
    return ChunkJob("j", "g/0", "g", [*PROMPT, *response], len(PROMPT), 99, sampling, 5, 0)


def ends_at(text, sampling):
    """Return after how many tokens, bytes here, the text has a stop string."""
    for size in range(sampling.min_tokens + 1, len(text) + 1):
        if any(text[:size].endswith(stop.encode()) for stop in sampling.stop):
            return size
    return None


@given(
    text=st.text("abé", max_size=24).map(str.encode),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    steps=st.integers(1, 4),
)
def test_a_response_ends_with_the_first_token_that_completes_a_stop_string(
    text, stops, min_tokens, cuts, steps
):
    sampling = Sampling(stop=tuple(stops), min_tokens=min_tokens)
    done, found = 0, None
    while done < len(text) and found is None:
        for size in cuts:
            watched = StopStrings(decode)
            watched.open(job(sampling, text[:done]))
            chunk = text[done : done + size]
            for start in range(0, len(chunk), steps):
                assert watched.read == {"j": start}
                found = watched.find("j", [*chunk[start : start + steps]])
                if found is not None:
                    found += done
                    break
            if found is not None:
                break
            done += len(chunk)
    assert found == ends_at(text, sampling)


def test_a_chunk_that_is_cut_has_the_experts_of_the_tokens_that_are_left():
    experts = np.arange(9 * 2 * 2).reshape(9, 2, 2)
    chunk = EndedChunk(
        "j", [*range(5)], [-1.0] * 5, attachments={ROUTED_EXPERTS: packed(experts, 3), "other": 1}
    )
    for size, left in ((5, 9), (3, 7)):
        cut = chunk.cut(size)
        start, found = unpacked(cut.attachments[ROUTED_EXPERTS])
        assert (start, cut.attachments["other"], cut.cut_tokens) == (3, 1, 5 - size)
        assert found.tolist() == experts[:left].tolist()


def test_chunks_without_stop_strings_are_not_read():
    watched = StopStrings(decode)
    watched.open(job(Sampling(stop_token_ids=(5,))))
    assert watched.read == {}
    watched.open(msgspec.structs.replace(job(Sampling(stop=("a",))), id="k"))
    watched.close("j")
    assert watched.read == {"k": 0}
    watched.close("k")
    assert watched.read == {}


def test_stops_and_min_tokens_count_from_the_beginning_of_the_turn():
    earlier, sampling = b"a=4 b", Sampling(stop=("=4", "b"), min_tokens=2)
    turn = msgspec.structs.replace(job(sampling, earlier), turn_start=len(PROMPT) + len(earlier))
    watched = StopStrings(decode)
    watched.open(turn)
    assert watched.find("j", [*b"=4b"]) == 3
    whole = StopStrings(decode)
    whole.open(job(sampling, earlier))
    assert whole.find("j", [*b"=4b"]) == 2
