"""Drafts of one length find their full CUDA graph by vLLM's own dispatch; ragged ones do not."""

from types import SimpleNamespace

import pytest
from seer_vllm.draft_lengths import length_of, lengths_of, schedule_of

LONGEST, MOST = 8, 32
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch imports inductor


def test_a_step_s_length_is_the_least_that_holds_its_longest_draft():
    assert [length_of(longest, (0, 2, 4, 8)) for longest in (0, 1, 2, 3, 8)] == [0, 2, 2, 4, 8]


@pytest.fixture
def config():
    """The part of a config that vLLM's dispatchers read, as on a GPU: it records graphs for these sizes."""
    pytest.importorskip("vllm")
    from vllm.config import CompilationConfig, CUDAGraphMode

    compilation = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=[1, 2, 4, *range(8, 257, 8)],
        max_cudagraph_capture_size=256,
    )
    schedule = schedule_of(lengths_of(LONGEST))
    return SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=LONGEST,
        scheduler_config=SimpleNamespace(max_num_seqs=MOST),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        lora_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=LONGEST,
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: True,
        ),
    )


def test_the_second_runner_finds_a_full_graph_for_the_longest_length_and_many_steps_without_drafts(
    config, monkeypatch
):
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.utils import get_uniform_decode_token_count

    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: stage)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None)
    manager = cudagraph_utils.CudaGraphManager(config, None, CUDAGraphMode.FULL_DECODE_ONLY, 1 + LONGEST)
    manager._graphs_captured = True  # as after ``capture``, which needs a GPU

    def mode(positions):
        count = get_uniform_decode_token_count(len(positions), sum(positions), max(positions), True)
        return manager.dispatch(len(positions), sum(positions), count, 0, max(positions)).cg_mode

    assert {mode([9] * requests) for requests in range(1, 29)} == {CUDAGraphMode.FULL}
    assert {mode(ragged) for ragged in ([9, 5, 1], [5] * 4, [9, 9, 8])} == {CUDAGraphMode.NONE}
    plain = [mode([1] * requests) for requests in range(1, MOST + 1)]
    assert MOST / 2 <= plain.count(CUDAGraphMode.FULL) < MOST


def test_the_first_runner_finds_one_for_its_longest_length_alone(config):
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    config.compilation_config.adjust_cudagraph_sizes_for_spec_decode(1 + LONGEST)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1 + LONGEST)

    def mode(positions):
        uniform = GPUModelRunner._is_uniform_decode(
            max(positions), 1 + LONGEST, sum(positions), len(positions)
        )
        return dispatcher.dispatch(sum(positions), uniform)[0]

    assert mode([9] * 4) == CUDAGraphMode.FULL
    for positions in ([9, 5, 1], [5] * 4, [1] * 4):
        assert mode(positions) == CUDAGraphMode.NONE
