"""Devices, environment and arguments that plug-ins give to their workers."""

import pytest
from seer_worker.client.devices import inherited, refuse_arguments, share_devices, worker_environment

from seer_core.errors import ConfigError


def test_instances_share_the_visible_devices_in_order():
    assert share_devices("mine", 2, {}, 2) == [["0", "1"], ["2", "3"]]
    assert share_devices("mine", 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2) == [["4", "5"], ["6", "7"]]
    assert share_devices("mine", 2, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == [["4"], ["5"]]
    assert share_devices("mine", 2, {"CUDA_VISIBLE_DEVICES": ""}) == [(), ()]
    assert share_devices("mine", 1, {"CUDA_VISIBLE_DEVICES": "GPU-a"}) == [["GPU-a"]]


@pytest.mark.parametrize(
    ("each", "visible", "complaint"),
    [
        (2, "0,1,2", r"engine\.mine: 2 instances of 2 devices need 4, visible are 3; .* or tensor_parallel$"),
        (1, "4", r"engine\.mine: 2 instances of 1 devices need 2, visible are 1; lower instances$"),
    ],
)
def test_too_few_devices_is_a_config_error(each, visible, complaint):
    with pytest.raises(ConfigError, match=complaint):
        share_devices("mine", 2, {"CUDA_VISIBLE_DEVICES": visible}, each)


def test_a_worker_sees_its_own_devices_and_threads_only():
    assert worker_environment({"HOME": "h", "CUDA_VISIBLE_DEVICES": "0"}, 3, ["7", "8"], OWN="x") == {
        "CUDA_VISIBLE_DEVICES": "7,8",
        "HF_HUB_OFFLINE": "1",
        "HOME": "h",
        "OMP_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "1",
        "OWN": "x",
        "TRANSFORMERS_OFFLINE": "1",
    }


def test_a_launcher_gives_devices_where_workers_run():
    launcher = object()
    assert share_devices("mine", 2, {"CUDA_VISIBLE_DEVICES": "4"}, 2, launcher=launcher) == [None, None]
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(inherited(launcher), 1, None)


def test_an_argument_that_is_decided_elsewhere_is_refused_with_the_reason():
    refuse_arguments("mine", {"free": 1}, {"taken": "write it elsewhere"})
    with pytest.raises(
        ConfigError, match=r"engine\.mine\.engine_args\.taken cannot be set: write it elsewhere"
    ):
        refuse_arguments("mine", {"taken": 1}, {"taken": "write it elsewhere"})
