"""slime's arguments, as far as the hook and slime's own rollout read them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

__all__ = ["slime_arguments"]


def slime_arguments(model: Path, folder: Path, config: str | None = None) -> Namespace:
    """Return those of a training that starts no servers of its own, with Seer's config if one is given."""
    return Namespace(
        seer_config=config,
        hf_checkpoint=str(model),
        rollout_num_gpus=0,
        update_weight_mode="full",
        update_weight_transport="disk",
        update_weight_disk_dir=str(folder / "weights"),
        update_weight_disk_keep_files=True,
        debug_rollout_only=True,
        offload_rollout=False,
        partial_rollout=False,
        use_rollout_routing_replay=False,
        moe_router_topk=2,
        num_layers=3,
        ci_test=False,
        multimodal_keys=None,
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
