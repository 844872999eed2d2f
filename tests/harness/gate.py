"""With ``--gate`` a run leaves out the tests that only ``make test-all`` runs.

Both tables name, for each, the tests of the gate that cover the same on a smaller scale.
"""

FILES = {
    "tests/soak/": "tests/integration/test_real_rollout.py, test_real_turns.py and test_runtime_losses.py:"
    " tokens of divided, moved, drafted and killed rollouts; training/rl/tests/test_loop.py",
    "tests/test_gpu_check.py": "the tests of what its parts call, each beside its package",
    "tests/test_packages.py": "tests/test_core_alone.py, and the set-up, which installs every distribution",
    "backends/vllm/tests/test_vllm_next.py": "test_vllm_internals.py: the same names in the pinned vLLM",
    "backends/ray/tests/test_machines.py": "test_ray_rollout.py on raylets of one machine",
    "backends/ray/tests/test_ray_autoscaler.py": "test_ray_rollout.py: a worker that waits for its place",
    "backends/ray/tests/test_ray_deaths.py": "tests/cli/test_resume.py, and test_ray_rollout.py",
    "backends/ray/tests/test_ray_elastic.py": "tests/core/test_fleet.py: instances that join and leave",
    "backends/ray/tests/test_ray_engines.py": "test_ray_rollout.py, with engines without a model",
    "backends/ray/tests/test_ray_pools.py": "backends/mooncake/tests, and test_ray_rollout.py",
    "backends/ray/tests/test_ray_weights.py": "test_ray_weights_here.py and test_ray_keeper.py",
    "training/rl/tests/test_megatron.py": "training/rl/tests/test_loop.py with the trainer of one process",
    "training/rl/tests/test_resume.py": "training/rl/tests/test_journals.py and test_loop.py",
    "plugins/openenv/tests/test_openenv.py": "tests/integration/test_turns.py: environments, of any kind",
    "plugins/prometheus/tests/test_real_prometheus.py": "plugins/prometheus/tests/test_prometheus.py",
}
"""Files, and folders, that are left out."""

TESTS = {
    "backends/vllm/tests/test_vllm_second_runner.py": {
        "test_controls_see_the_tokens_before_and_hold_as_on_the_first": "test_vllm_controls.py on the first"
        " runner, and requests of one batch sampled each by its own rule on the second",
        "test_drafts_are_verified_under_every_control": "test_drafts_of_any_kind_change_no_token",
        "test_drafts_padded_to_one_length_change_no_token_on_the_second": "the same on the first runner",
    },
    "backends/vllm/tests/test_vllm_async_scheduling.py": {
        "test_controls_see_the_tokens_before": "test_whole_divided_and_alone_its_tokens_are_those_of_steps_"
        "planned_one_by_one",
        "test_responses_that_move_find_all_blocks_that_were_saved_while_their_chunks_ran": "the same of the"
        " first runner, in test_vllm_kv_pool.py",
        "test_preemptions_change_no_token_and_are_accounted_for": "the same on the second runner",
    },
    "backends/vllm/tests/test_vllm_tensor_parallel.py": {
        "test_ranks_of_the_second_runner_write_the_same_and_go_on_with_the_kv_of_the_first": "the second"
        " runner on one rank, and ranks of the first",
        "test_a_divided_and_drafted_rollout_in_which_a_rank_dies_has_the_tokens_of_one_rank": "test_a_rank_"
        "that_is_killed_ends_its_instance_and_the_other_goes_on_with_its_kv",
        "test_a_head_that_both_ranks_have_is_stored_once": "backends/worker/tests/test_kv_parts.py",
        "test_a_rank_that_cannot_read_its_part_costs_the_pool_and_no_token": "test_a_damaged_part_of_one_"
        "rank_makes_the_whole_block_a_miss_and_no_token_another",
    },
}
"""Tests of other files that are left out, with all their parameters."""


def pytest_addoption(parser):
    """Add the option."""
    parser.getgroup("gate").addoption(
        "--gate", action="store_true", help="without the tests that only make test-all runs"
    )


def pytest_collection_modifyitems(config, items):
    """Leave the rest out."""
    if config.getoption("--gate"):
        rest = [item for item in items if is_of_the_rest(item.nodeid)]
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if not is_of_the_rest(item.nodeid)]


def is_of_the_rest(nodeid):
    """Return whether a test is left out."""
    file, *_, test = nodeid.split("[")[0].split("::")
    folders = tuple(name for name in FILES if name.endswith("/"))
    return file in FILES or file.startswith(folders) or test in TESTS.get(file, ())
