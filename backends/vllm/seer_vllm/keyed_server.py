"""Seer in a stock ``vllm serve``.  vLLM calls ``register``, in each of its processes.

It is an entry point of the group ``vllm.general_plugins``, and does nothing unless the environment asks for
it: by ``VLLM_PLUGINS``, where it names ``seer``, for the routes (``served_core``), and by
``SEER_KEYED_SAMPLING=1`` for keyed sampling, as in Seer's own engines.  Then a request's tokens depend on its
``seed`` and their places alone, so a chunk goes on where the one before ended.  A request
without a seed gets one by chance, as without it.

``register`` runs before there is a model.  So it wraps what both model runners do when they have one, and
what admits requests.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seer_vllm import GROUPED_DRAFTS
from seer_vllm import KEYED_SERVER as VARIABLE

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import SamplingParams

__all__ = ["register"]

DRAFTED = ("custom_class", "ngram", "suffix")
"""The methods of drafting that go with keyed sampling on the first model runner."""

OURS = ("seed", "context_tokens", "bad_words", "request", "sampling", "temperature")
"""What Seer's samplers read of ``extra_args``, which a client may fill as it likes."""

NAME = "seer"
"""The name by which ``VLLM_PLUGINS`` lets Seer's routes in."""

_registered = False


def register() -> None:
    """Do in this process what the environment asks for.

    Raises:
        EngineError: this vLLM is not the one it was written for.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm import envs

    if NAME in (envs.VLLM_PLUGINS or ()):
        from seer_vllm import served_core

        served_core.install()
    if os.environ.get(VARIABLE, "") in ("1", "true"):
        _sample_by_key()


def _sample_by_key() -> None:
    """Have each model runner of this process sample by key."""
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from seer_vllm import cpu_rounding, internals

    internals.check_imports(on_cpu=current_platform.is_cpu())
    if current_platform.is_cpu():
        cpu_rounding.install()
    _check_requests(SamplingParams)
    _wrap(GPUModelRunner, _install_first)
    try:
        from vllm.v1.worker.gpu import model_runner
    except ImportError:  # without Triton
        return
    _wrap(model_runner.GPUModelRunner, _install_second)


def _wrap(runner_class: Any, install: Any) -> None:
    original = runner_class.initialize_kv_cache

    def initialize_kv_cache(self: Any, *arguments: Any, **named: Any) -> Any:
        found = original(self, *arguments, **named)
        if not named.get("is_profiling"):
            install(self)
        return found

    runner_class.initialize_kv_cache = initialize_kv_cache


def _check_requests(params_class: Any) -> None:
    """Refuse requests that keyed sampling does not serve, where vLLM refuses others."""
    from vllm.exceptions import VLLMValidationError

    original = params_class.verify

    def verify(self: Any, *arguments: Any, **named: Any) -> Any:
        extra = self.extra_args or {}
        config = arguments[0] if arguments else named["model_config"]
        vocab_size = config.get_vocab_size()
        if "seer" in extra:
            raise VLLMValidationError(f"Seer samples by key. Vocabulary size: {vocab_size}")
        if self.thinking_token_budget is not None and self.thinking_token_budget >= 0:
            raise VLLMValidationError(f"thinking_token_budget does not go together with {VARIABLE}")
        for name in ("seed", "context_tokens"):
            given = extra.get(name)
            if given is not None and not (isinstance(given, int) and -(2**63) <= given < 2**63):
                raise VLLMValidationError(f"extra_args.{name} is {given!r}; give an integer of 64 bits")
        try:
            words = _bad_words(extra)
        except ValueError as error:
            raise VLLMValidationError("extra_args.bad_words has no token ids, as in '1,2 3'") from error
        if any(not 0 <= token < vocab_size for word in words for token in word):
            raise VLLMValidationError(f"extra_args.bad_words goes beyond the vocabulary of {vocab_size}")
        return original(self, *arguments, **named)

    params_class.verify = verify
    # vLLM's own sampler has no min_p and logit bias where it verifies drafts; this one has.
    params_class._validate_spec_decode = lambda self, speculative_config: None


def _bad_words(extra: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the words that a client gives as token ids: ``1,2 3`` are two.

    Raises:
        ValueError: it gives something else.
    """
    text = str(extra.get("bad_words", ""))
    return tuple(tuple(map(int, word.split(","))) for word in text.split())


def _prepare(params: SamplingParams, request_id: str, prompt_tokens: int) -> None:
    """Give a request what Seer's samplers read of it, in place of what its client may have put there."""
    from seer_core.model import Sampling

    extra = dict(params.extra_args or {})
    seed, context_tokens = extra.get("seed"), extra.get("context_tokens")
    for name in OURS:
        extra.pop(name, None)
    if not isinstance(seed, int):
        seed = secrets.randbits(63) if params.seed is None else params.seed
    if not isinstance(context_tokens, int) or not 0 < context_tokens <= prompt_tokens:
        context_tokens = prompt_tokens
    bad_words = _bad_words(params.extra_args or {})
    sampling = Sampling(
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias or {}),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words=(*bad_words, *(tuple(word) for word in params.bad_words_token_ids or ())),
        min_tokens=params.min_tokens,
    )  # vLLM itself masks logits for structured outputs
    if sampling.changes_logits:
        extra["sampling"] = sampling
    params.extra_args = extra | {"seed": seed, "context_tokens": context_tokens, "request": request_id}


def _install_first(runner: Any) -> None:
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from seer_core.errors import EngineError
    from seer_vllm import internals, sampling

    internals.check_runner(runner)
    if runner.scheduler_config.async_scheduling:
        raise EngineError(
            f"with {VARIABLE} vLLM's first model runner plans no step ahead: add --no-async-scheduling, or"
            " take the second"
        )
    method = None if runner.speculative_config is None else runner.speculative_config.method
    if method not in (None, *DRAFTED):
        raise EngineError(
            f"with {VARIABLE} vLLM's first model runner verifies no drafts by {method!r}, which read more of"
            f" a step than keyed sampling keeps: take one of {', '.join(DRAFTED)}, or the second runner"
        )
    _expect_raw(runner)

    class ServerSampler(sampling.VllmSampler):
        """Prepares requests as they come into the batch."""

        prepared: dict[str, SamplingParams] = {}  # noqa: RUF012, there is one runner in a process

        def sample(self, logits: Tensor, drafts: sampling.StepDrafts | None) -> Any:
            # Nothing is drawn of these.  Where a prompt is prefilled in steps, vLLM would set a request's own
            # back by what it had drawn, which generators of CPUs cannot do.
            self._runner.input_batch.generators.clear()
            return super().sample(logits, drafts)

        def _seeds_on(self, device: Any) -> Any:
            batch = self._runner.input_batch
            if batch.req_ids != self._request_ids:
                here = {}
                for id in batch.req_ids:
                    state = self._runner.requests[id]
                    params = here[id] = state.sampling_params
                    if self.prepared.get(id) is not params:
                        _prepare(params, id, state.num_prompt_tokens)
                self.prepared = here
            return super()._seeds_on(device)

    sampling.install(runner, (), ServerSampler)
    if current_platform.is_cpu() and runner.vllm_config.model_config.is_hybrid:
        from seer_vllm import cpu_delta_nets

        cpu_delta_nets.install()
    _install_first_drafts(runner)
    init_logger("vllm.seer").info("Seer: vLLM's first model runner samples by key")


def _install_first_drafts(runner: Any) -> None:
    """Have vLLM's custom proposer see the batch, if it is Seer's."""
    from vllm.platforms import current_platform

    from seer_vllm import cpu_attention
    from seer_vllm.served_drafts import ServedProposer

    proposer = getattr(runner, "drafter", None)
    if not isinstance(proposer, ServedProposer):
        return
    if current_platform.is_cpu():
        cpu_attention.install()
    # vLLM drafts nothing for a whole batch of which one request comes near this limit.
    runner.effective_drafter_max_model_len = runner.max_model_len + 2 * runner.num_spec_tokens + 2
    requests = runner.requests
    proposer.batch_ids = lambda: runner.input_batch.req_ids
    proposer.find = lambda id: (requests[id].sampling_params, requests[id].prompt_token_ids)
    proposer.runs = requests.__contains__
    runner.seer_proposer = proposer


def _install_second(runner: Any) -> None:
    from vllm.logger import init_logger

    from seer_vllm import internals, second_runner_sampling

    internals.check_second_runner(runner)
    _expect_raw(runner)

    class SecondServerSampler(second_runner_sampling.SecondRunnerSampler):
        """Prepares requests as they get a slot."""

        params: dict[int, SamplingParams] = {}  # noqa: RUF012, there is one runner in a process

        def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
            states = self._requests
            name = str(req_idx)
            self.params[req_idx] = sampling_params
            _prepare(sampling_params, name, int(states.prompt_len.np[req_idx]))
            super().add_request(req_idx, sampling_params)

    sampler = second_runner_sampling.install(runner, SecondServerSampler)
    assert isinstance(sampler, SecondServerSampler)
    if os.environ.get(GROUPED_DRAFTS, "") in ("1", "true"):
        _install_second_drafts(runner, sampler.params)
    init_logger("vllm.seer").info("Seer: vLLM's second model runner samples by key")


def _install_second_drafts(runner: Any, params: Mapping[int, SamplingParams]) -> None:
    """Put Seer's proposer in the place of vLLM's n-gram speculator."""
    from seer_core.errors import EngineError
    from seer_vllm import speculator
    from seer_vllm.served_drafts import ServedProposer

    if runner.speculator is None or runner.vllm_config.speculative_config.method != "ngram_gpu":
        raise EngineError(
            f"with {GROUPED_DRAFTS} vLLM's second model runner is made with --speculative-config"
            ' \'{"method": "ngram_gpu", "num_speculative_tokens": 8}\''
        )
    if runner.scheduler_config.async_scheduling:
        raise EngineError(f"with {GROUPED_DRAFTS} no step is planned ahead: add --no-async-scheduling")
    states = runner.req_states

    def find(id: str) -> tuple[SamplingParams, list[int]]:
        slot = states.req_id_to_index[id]
        return params[slot], states.all_token_ids.gpu[slot, : int(states.prompt_len.np[slot])].tolist()

    proposer = speculator.install(runner, ServedProposer)
    assert isinstance(proposer, ServedProposer)
    proposer.find, proposer.runs = find, states.req_id_to_index.__contains__
    runner.seer_proposer = proposer


def _expect_raw(runner: Any) -> None:
    from seer_core.errors import EngineError

    if (mode := runner.model_config.logprobs_mode) != "raw_logprobs":
        raise EngineError(f"with {VARIABLE} log-probs are raw; drop --logprobs-mode {mode}")
