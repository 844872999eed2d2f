"""Training goes on, or goes on with --resume, after a process was killed, and the result is the same."""

import pytest

from tests.support.installed import skip_without

from .faults_of_training import FAULTS, differences, train

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

MEGATRON = ("train.trainer=megatron", "train.megatron.data_parallel=2")
KINDS = sorted(FAULTS, key=lambda fault: fault != "engine in update")


@pytest.mark.long
@pytest.mark.first_by_default("fault", KINDS)
def test_a_killed_process_does_not_change_what_is_learned(fault, tmp_path, soak):
    overrides = (*soak.overrides, *(MEGATRON if fault == "rank" else ()))
    undisturbed = train("", tmp_path, overrides)
    assert undisturbed["complaints"] == []
    found = train(fault, tmp_path, overrides)
    assert found["complaints"] == []
    assert differences(undisturbed, found) == []
