"""Prompts with images through verl's own workers, on a real vLLM behind ``seer serve``.

verl's processor of images needs torchvision, so this runs in Seer's environment, as ``test_kept_vllm.py``.
"""

import asyncio
import base64
import io
import random
import sys

import numpy as np
import pytest

pytest.importorskip(
    "torchvision",
    reason="torchvision is not in verl's environment for CPUs; `make verl-test` brings it in",
)

from batches import column, prompts, responses
from seer_client import ClientError
from seer_verl.agent_loop import AgentLoopManager, AgentLoopWorker
from seer_verl.llm_client import LLMClient
from seer_verl.rows import ROW, BatchRow
from verl.protocol import DataProto

from conftest import ROOT, Server

EXAMPLE = ROOT / "examples/tiny_vision"
IMAGE, VIDEO = 4, 5
CONFIG = f"""
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "vllm"
kv_pool = "none"

[engine.vllm]
model = "{EXAMPLE / "weights"}"
dtype = "float32"
instances = 2
threads = 1
kv_cache_bytes = 33_554_432
max_model_tokens = 128

[plugin.divided_rollout]
chunk_tokens = 4
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("server"), CONFIG)
    yield found
    found.close()


@pytest.fixture(scope="module")
def pictures():
    """Return pictures of squares, as verl's data sets decode them."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import squares
    finally:
        sys.path.remove(str(EXAMPLE))
    rng = random.Random(3)
    return [squares.draw(squares.make_rows(rng), rng) for _ in range(3)]


class Pictures:
    """A data set whose messages hold their images, which verl has in a package of its own else."""

    @classmethod
    async def process_multi_modal_info(cls, messages, **_):
        parts = [part for each in messages for part in each["content"] if isinstance(part, dict)]
        return [part["image"] for part in parts if part["type"] == "image"] or None, None, None


class Here:
    """A worker in place of Ray's handle of it, with a data set of pictures."""

    def __init__(self, config, llm_client):
        self.worker = AgentLoopWorker(config, llm_client)
        self.worker.dataset_cls = Pictures
        self.worker.hf_model_type = None  # or else verl looks for the tokens of ChatML
        self.generate_sequences = self

    async def remote(self, chunk):
        return await self.worker.generate_sequences(chunk)


@pytest.fixture
def config(configure, server):
    rollout = "actor_rollout_ref.rollout"
    return configure(
        server,
        f"actor_rollout_ref.model.path={EXAMPLE / 'weights'}",
        f"{rollout}.prompt_length=48",
        f"{rollout}.val_kwargs.do_sample=False",
        workers=1,
    )


def messages(*pictures):
    shown = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*shown, {"type": "text", "text": "how many squares ?"}]}]


def batch(chats, n, **meta):
    rows = [number for number in range(len(chats)) for _ in range(n)]
    return DataProto.from_single_dict(
        {
            "raw_prompt": column([chats[each] for each in rows]),
            "uid": column([f"uid-{each}" for each in rows]),
            "index": np.array(rows),
        },
        meta_info={"global_steps": 0, **meta},
    )


def url(picture):
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_responses_to_images_are_the_librarys_in_each_turn(config, server, pictures):
    chats = [messages(pictures[0]), messages(pictures[1]), messages(), messages(*pictures[1:])]
    manager = AgentLoopManager(config)
    manager.agent_loop_workers = [Here(config, manager.llm_client)]
    trained = manager.generate_sequences(batch(chats, n=3))
    validated = manager.generate_sequences(batch(chats[:2], n=1, validate=True))
    inputs = trained.non_tensor_batch["multi_modal_inputs"]
    assert ["pixel_values" in each for each in inputs] == [True] * 6 + [False] * 3 + [True] * 3
    turns = asyncio.run(talk(config, prompts(trained)[0], pictures))

    records = [
        *({"group_id": f"0-{number}", "n": 3, **plain(chat)} for number, chat in enumerate(chats)),
        *(
            {"group_id": f"val-{number}", "n": 1, "temperature": 0, **plain(chat)}
            for number, chat in enumerate(chats[:2])
        ),
        *(
            {"group_id": name, "n": 1, "prompt_token_ids": ids, "images": [url(each) for each in shown]}
            for name, ids, shown, _ in turns
        ),
    ]
    library = server.library([each | {"max_tokens": 12} for each in records], 0)
    assert responses(trained) == [library[f"0-{row // 3}", row % 3] for row in range(12)]
    assert responses(validated) == [library[f"val-{row}", 0] for row in range(2)]
    assert library["val-0", 0][0] != library["val-1", 0][0]
    for name, _, _, output in turns:
        token_ids, logprobs = library[name, 0]
        assert (output.token_ids, output.log_probs) == (token_ids, pytest.approx(logprobs))


def plain(chat):
    """Return the fields of a prompts file for messages with images, whose tokens are not written then."""
    parts = [{"type": "image"} if "image" in part else part for part in chat[0]["content"]]
    images = [url(part["image"]) for part in chat[0]["content"] if "image" in part]
    never = {"bad_words": [[IMAGE], [VIDEO]]} if images else {}
    return {"messages": [{"role": "user", "content": parts}], "images": images, **never}


async def talk(config, prompt, pictures):
    """Return the name, the prompt, the images and the output of two turns, as a loop with tools has them.

    ``prompt`` has the first picture; the second comes between the turns, from a tool.
    """
    client, sampling = LLMClient(config), {"temperature": 1.0, "top_k": -1, "logprobs": True}
    async with client.connect() as other, other.reserve([{"group_id": "talk", "n": 1}]):
        ROW.set(BatchRow("talk", 0, 0))
        turns, ids = [], prompt
        for name, shown in (("talk", pictures[:1]), ("talk-0-1", pictures[:2])):
            output = await client.generate("a", prompt_ids=ids, sampling_params=sampling, image_data=shown)
            turns.append((name, ids, shown, output))
            written = [token for token in output.token_ids if token != IMAGE]
            ids = [*ids, *written, *[IMAGE] * prompt.count(IMAGE)]
        return turns


@pytest.mark.parametrize(
    ("places", "images", "words"),
    [
        (9, 2, "has 9 places for images, and 2 images that take 18 tokens"),
        (8, 1, "has 8 places for images, and 1 images that take 9 tokens"),
    ],
)
def test_as_many_images_as_places_are_needed(config, pictures, places, images, words):
    client = LLMClient(config)

    async def ask():
        async with client.connect() as other, other.reserve([{"group_id": "wrong", "n": 1}]):
            ROW.set(BatchRow("wrong", 0, 0))
            return await client.generate(
                "a", prompt_ids=[1, *[IMAGE] * places, 9], sampling_params={}, image_data=pictures[:images]
            )

    with pytest.raises(ClientError, match=words):
        asyncio.run(ask())
