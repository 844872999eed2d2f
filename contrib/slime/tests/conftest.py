"""slime, or its stand-in, and a data source."""

import importlib.util
import json
import sys
from itertools import count
from pathlib import Path

import pytest

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))  # slime imports its users' functions by name, as it does theirs: slime_task

if importlib.util.find_spec("slime") is None:
    import slime_standin

    slime_standin.install()

from slime_arguments import slime_arguments  # noqa: E402

CONFIG = """
[engine.remote]
require = "exact"
[plugin.divided_rollout]
chunk_tokens = {}
"""


class Source:
    """Gives groups of three, of prompts that count upwards; the tokenizer's digits are tokens."""

    def __init__(self):
        self.groups = 0

    def get_samples(self, num_samples):
        from slime.utils.types import Sample

        found = []
        for number in range(self.groups, self.groups + num_samples):
            prompt = f"ring {number} ?"
            found.append(
                [Sample(group_index=number, index=3 * number + place, prompt=prompt) for place in range(3)]
            )
        self.groups += num_samples
        return found


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def args(tmp_path, config, tiny_reasoner):
    """Return slime's arguments, as far as the hook reads them."""
    return slime_arguments(tiny_reasoner, tmp_path, str(config))


@pytest.fixture
def evaluation_set(tmp_path):
    """Return the description of an evaluation set: two prompts, answered twice."""
    from slime.utils.eval_config import EvalDatasetConfig

    rows = [{"text": "ring 6 ?", "answer": "a"}, {"text": "ring 7 ?", "answer": "b"}]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return EvalDatasetConfig(
        name="held out",
        path=str(tmp_path / "held_out.jsonl"),
        input_key="text",
        label_key="answer",
        metadata_key="metadata",
        apply_chat_template=False,
        n_samples_per_eval_prompt=2,
        temperature=0.6,
        top_p=0.95,
        top_k=-1,
        max_response_len=12,
    )


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """Have each test start engines of its own, and stop them; return those that were started."""
    from functools import cache

    import seer_slime.rollout
    from seer_slime.engines import Engines

    started = []

    @cache
    def engines_of(config, journal, router):
        started.append(Engines(config, journal, router))
        return started[-1]

    monkeypatch.setattr(seer_slime.rollout, "engines_of", engines_of)
    for counts in (seer_slime.rollout.canary_of, seer_slime.rollout.fallback_of):
        counts.cache_clear()  # a router's address may come again
    yield started
    for each in started:
        each.close()


@pytest.fixture
def servers(engines):
    from sglang_standin import StandInServers

    found = StandInServers()
    yield found
    found.release()
    for each in engines:  # their connections end before the servers do
        each.close()
    found.close()


@pytest.fixture
def kept(args, servers, tmp_path):
    """Return slime's arguments where it has servers of its own, and a function that sets the chunks."""

    def chunks(tokens):
        path = tmp_path / f"seer-{tokens}.toml"
        path.write_text(CONFIG.format(tokens), "utf-8")
        args.seer_config = str(path)
        return args

    args.rollout_num_gpus = 2
    args.sglang_router_ip, _, args.sglang_router_port = servers.router.removeprefix("http://").partition(":")
    args.offload_rollout = True
    args.debug_rollout_only = False
    args.update_weight_transport = "nccl"
    args.rollout_temperature = 0.8  # log-probs are those that slime's servers report
    return chunks


@pytest.fixture
def own_client(args, kept, monkeypatch):
    """Yield the samples that slime's own client has been given, in the order of its calls."""
    import slime
    from slime.rollout import sglang_rollout

    generate, samples = sglang_rollout.generate, []

    async def recorded(args, sample, sampling_params):
        samples.append(sample)
        return await generate(args, sample, sampling_params)

    monkeypatch.setattr(sglang_rollout, "generate", recorded)
    if hasattr(slime, "is_standin"):
        yield samples
        return
    from slime.utils import async_utils, http_utils, misc

    monkeypatch.setattr(misc.SingletonMeta, "_instances", {})
    monkeypatch.setattr(http_utils, "_http_client", None)
    http_utils.init_http_client(args)  # as its rollout manager does
    yield samples
    async_utils.run(http_utils._http_client.aclose())


@pytest.fixture
def in_midst(monkeypatch):
    """Return a function that has Seer's scheduler do something at its chunk of that number, once."""
    from seer_divided_rollout.splitter import Chunks

    split = Chunks.split

    def at(number, action):
        calls = count(1)

        def disturbed(self, *arguments):
            if next(calls) == number:
                action()
            return split(self, *arguments)

        monkeypatch.setattr(Chunks, "split", disturbed)

    return at


@pytest.fixture
def breaking(in_midst):
    """Return a function that has Seer's scheduler fail at its chunk of that number, once."""

    def at(number, before=lambda: None):
        def fail():
            before()
            raise RuntimeError("broken")

        in_midst(number, fail)

    return at
