"""slime, or its stand-in, its arguments, and a data source."""

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))  # slime imports its users' functions by name, as it does theirs: slime_task

if importlib.util.find_spec("slime") is None:
    import slime_standin

    slime_standin.install()


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
    return Namespace(
        seer_config=str(config),
        hf_checkpoint=str(tiny_reasoner),
        rollout_num_gpus=0,
        update_weight_mode="full",
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path / "weights"),
        update_weight_disk_keep_files=True,
        debug_rollout_only=True,
        offload_rollout=False,
        partial_rollout=False,
        use_rollout_routing_replay=False,
        moe_router_topk=2,
        num_layers=3,
        ci_test=False,
        mask_offpolicy_in_partial_rollout=False,
        n_samples_per_prompt=3,
        rollout_global_dataset=True,
        rollout_num_gpus_per_engine=1,
        rollout_seed=42,
        sglang_dp_size=1,
        sglang_server_concurrency=8,
        use_distributed_post=False,
        custom_generate_function_path=None,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=16,
        rollout_batch_size=4,
        over_sampling_batch_size=4,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        rollout_sample_hook_path=None,
        group_rm=False,
        rm_type=None,
        custom_rm_path="slime_task.reward",
        reward_key=None,
        eval_reward_key=None,
        eval_max_prompt_len=None,
        eval_datasets=None,
    )


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
    yield started
    for each in started:
        each.close()
