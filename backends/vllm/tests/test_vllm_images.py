"""Prompts with images: the tokens of vLLM's own, wherever and however a response is written."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.installed import skip_without

pytest.register_assert_rewrite("backends.tests.families", "backends.tests.image_rollouts")
pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")
skip_without("vllm")
skip_without("PIL")

from backends.tests.image_rollouts import BOUND_S, expect_images_to_change_no_token  # noqa: E402

pytestmark = pytest.mark.engine

VLLM_ALONE = """
import io, json, sys
from PIL import Image
from vllm import LLM, SamplingParams

given = json.load(sys.stdin)
llm = LLM(given["model"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=16,
          kv_cache_memory_bytes=32 << 20)
texts = []
for prompt, images in given["prompts"]:
    data = {"image": [Image.open(io.BytesIO(bytes.fromhex(image))) for image in images]}
    params = SamplingParams(temperature=0, max_tokens=given["max_tokens"], ignore_eos=True)
    [answer] = llm.generate({"prompt_token_ids": prompt, "multi_modal_data": data}, params)
    texts.append([list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)])
print("\\n" + json.dumps(texts))
"""


def alone(model, prompts, max_tokens):
    """Return greedy responses of vLLM without Seer, which fills the places of images itself."""
    unfilled = []
    for filled, places, images in prompts:
        ids, end = [], 0
        for offset, length in places:
            ids += filled[end : offset + 1]
            end = offset + length
        unfilled.append(([*ids, *filled[end:]], [image.hex() for image in images]))
    given = {"model": str(model), "prompts": unfilled, "max_tokens": max_tokens}
    answer = subprocess.run(
        [sys.executable, "-c", VLLM_ALONE],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert [filled for filled, _ in found] == [filled for filled, _, _ in prompts]
    return [text for _, text in found]


@pytest.mark.parametrize(
    "name",
    [
        "Qwen2-VL",
        pytest.param("Qwen2.5-VL", marks=pytest.mark.long),
        pytest.param("Qwen3-VL", marks=pytest.mark.long),
    ],
)
def test_images_move_turn_are_drafted_and_survive_a_kill_with_the_tokens_of_vllm_alone(tmp_path, name):
    expect_images_to_change_no_token("vllm", "vLLM", name, tmp_path, alone)
