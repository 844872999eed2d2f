"""With ``--gate`` a run leaves out the tests that only ``make test-all`` runs.

Others cover what they show on a smaller scale.  A name of ``REST`` is a file, a folder, or a test with all
its parameters.
"""

REST = {
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
    "plugins/openenv/tests/test_openenv.py": "plugins/openenv's other tests, on a server of their own",
    "plugins/prometheus/tests/test_real_prometheus.py": "plugins/prometheus/tests/test_prometheus.py",
}
"""The tests that are left out, and which of the gate's cover the same on a smaller scale."""


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
    test = nodeid.split("[")[0]
    return any(
        test == name or test.startswith((name if name.endswith("/") else name + "::",)) for name in REST
    )
