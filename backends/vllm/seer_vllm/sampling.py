"""Keyed sampling: the token at a position depends on (seed, position, logits) and on nothing else.

    token = argmax(logits / temperature after top-k and top-p + Gumbel(seed, position, token))

The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030) draws exactly from the
softmax of its argument, so keyed sampling has the distribution of ordinary sampling.  The position is
the number of tokens before the sampled one, prompt included.  So a response is the same whatever its
chunks, its batch, its instance, and however often it was preempted or moved.

The noise is counter-based.  SplitMix64 (Steele, Lea, Flood 2014; the constants are its own) started at
``seed`` gives, as output number ``position``, the start of a second SplitMix64 whose output number
``token`` is the noise.  Sixty-three bits of it make the uniform, so the tail that decides rare tokens
is not cut off.  Everything is int64 arithmetic modulo 2**64, the same on every device.

This module is loaded in every vLLM worker (``worker_extension_cls``) and relies on vLLM 0.32's first
model runner (``VLLM_USE_V2_MODEL_RUNNER=0``) without async scheduling:

- ``GPUModelRunner._sample`` calls ``self.sampler(logits=, sampling_metadata=)``, and that
  ``self.sample(logits, sampling_metadata)`` on float32 logits of its own; ``gather_logprobs`` follows;
- without speculation, row i of the logits belongs to ``input_batch.req_ids[i]``;
- ``input_batch.num_tokens_no_spec[i]`` counts prompt and output tokens, also after a preemption.  It is
  advanced after sampling.  A row in the middle of its prefill is sampled too, and thrown away.

``install`` checks what can be checked of this and raises if it does not hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seer_vllm import SUPPORTED_VLLM, cpu_cure

__all__ = [
    "KeyedSampler",
    "KeyedSamplingExtension",
    "gumbel",
    "install",
    "keyed_choice",
    "mask_top_k_top_p",
    "noise_steps",
    "splitmix64",
]

GREEDY_BELOW = 1e-5

_MASK_63 = 0x7FFF_FFFF_FFFF_FFFF


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def splitmix64(z: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 ``z``, in place; ``&`` makes the shifts logical."""
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def gumbel(seeds: Tensor, positions: Tensor, steps: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [rows, vocab].

    Args:
        seeds: int64 [rows], each in 0 .. 2**63 - 1.
        positions: int64 [rows].
        steps: ``noise_steps(vocab)``.
    """
    keys = splitmix64(seeds + (positions + 1) * _GAMMA)
    bits = splitmix64(keys[:, None] + steps).bitwise_and_(_MASK_63)
    # The exponential -log1p(-u) is small, and the Gumbel large, where u is small: there float32 is finest.
    uniform = bits.to(torch.float32).mul_(2.0**-63).clamp_(2.0**-64, 1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_steps(vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Return SplitMix64's increments for token ids 0 .. vocab - 1, int64 [vocab]."""
    return torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _GAMMA


def mask_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set logits outside top-k, then outside top-p of what is left, to -inf.

    The cut is a value, never an index: equal logits stay or go together, so the result does not
    depend on how a sort breaks ties.

    Args:
        logits: float32 [rows, vocab].
        top_k: integer [rows], ``vocab`` for no limit, or None.
        top_p: float32 [rows], 1 for no limit, or None.
    """
    if top_k is None and top_p is None:
        return logits
    ranked = logits.sort(dim=-1, descending=True).values
    if top_k is not None:
        cut = ranked.gather(1, top_k.to(torch.int64)[:, None] - 1)
        ranked = ranked.masked_fill(ranked < cut, -torch.inf)
        logits = logits.masked_fill(logits < cut, -torch.inf)
    if top_p is not None:
        probabilities = ranked.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)
        cut = ranked.gather(1, kept - 1)
        logits = logits.masked_fill((logits < cut) & (top_p[:, None] < 1), -torch.inf)
    return logits


def keyed_choice(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, noise: Tensor
) -> Tensor:
    """Return the chosen token ids, int64 [rows]; a row of temperature 0 is greedy.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: as ``mask_top_k_top_p`` takes it.
        top_p: likewise.
        noise: ``gumbel`` of the rows.
    """
    greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    chosen = (mask_top_k_top_p(scaled, top_k, top_p) + noise).argmax(dim=-1)
    return torch.where(greedy, logits.argmax(dim=-1), chosen)


class KeyedSampler:
    """The part of a model runner's sampler that chooses."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._request_ids: list[str] = []
        self._seeds = torch.empty(0, dtype=torch.int64)
        self._steps = torch.empty(0, dtype=torch.int64)

    def sample(self, logits: Tensor, metadata: Any) -> tuple[Tensor, None]:
        """Choose one token a row; stands in for ``vllm.v1.sample.sampler.Sampler.sample``."""
        if metadata.all_greedy:
            return logits.argmax(dim=-1), None
        rows, vocab = logits.shape
        seeds, positions = self._keys(logits.device)
        if rows != len(seeds):
            raise RuntimeError(f"{rows} rows of logits for a batch of {len(seeds)} requests")
        if len(self._steps) != vocab or self._steps.device != logits.device:
            self._steps = noise_steps(vocab, logits.device)
        noise = gumbel(seeds, positions, self._steps)
        return keyed_choice(logits, metadata.temperature, metadata.top_k, metadata.top_p, noise), None

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Return the log-probabilities of the chosen tokens as vLLM's ``LogprobsTensors``, rank left 0.

        Seer asks for no alternatives (``num_logprobs`` 0).  vLLM's own would rank the token too, in a
        function compiled by inductor: three seconds of a first step, and a C++ compiler at run time.
        """
        from vllm.v1.outputs import LogprobsTensors

        if num_logprobs:
            raise ValueError(f"log-probabilities of {num_logprobs} alternatives are not kept")
        chosen = token_ids[:, None]
        ranks = torch.zeros_like(token_ids)
        return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(1, chosen), ranks)

    def _keys(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return seed and position of every row of the batch; seeds are kept while the batch stays."""
        batch = self._runner.input_batch
        if batch.req_ids != self._request_ids:
            self._request_ids = list(batch.req_ids)
            requests = self._runner.requests
            seeds = [requests[id].sampling_params.extra_args["seed"] for id in self._request_ids]
            self._seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        counts = batch.num_tokens_no_spec[: len(self._request_ids)]
        return self._seeds, torch.from_numpy(counts.astype("int64")).to(device)


def install(runner: Any) -> None:
    """Make ``runner`` sample by key.

    Raises:
        RuntimeError: this vLLM is not the one this module was written for.
    """
    import vllm
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for holds, fact in (
        (vllm.__version__.startswith(SUPPORTED_VLLM), f"vLLM {vllm.__version__} is not {SUPPORTED_VLLM}*"),
        (isinstance(runner, GPUModelRunner), f"the model runner is {type(runner).__qualname__}"),
        (not getattr(runner, "use_async_scheduling", True), "async scheduling is on"),
        (not getattr(runner, "speculative_config", True), "speculative decoding is on"),
        (hasattr(getattr(runner, "sampler", None), "sample"), "it has no sampler.sample"),
        (hasattr(getattr(runner, "sampler", None), "gather_logprobs"), "it has no sampler.gather_logprobs"),
        (hasattr(runner, "requests"), "it has no requests"),
        (hasattr(getattr(runner, "input_batch", None), "req_ids"), "it has no input_batch.req_ids"),
        (
            hasattr(getattr(runner, "input_batch", None), "num_tokens_no_spec"),
            "it has no input_batch.num_tokens_no_spec",
        ),
    ):
        if not holds:
            raise RuntimeError(f"keyed sampling cannot be installed: {fact}")
    sampler = KeyedSampler(runner)
    runner.sampler.sample = sampler.sample
    runner.sampler.gather_logprobs = sampler.gather_logprobs


class KeyedSamplingExtension:
    """Mixed into every vLLM worker; its methods are called by name through ``collective_rpc``."""

    model_runner: Any

    def seer_install_keyed_sampling(self) -> None:
        """Install keyed sampling in this worker, on a CPU with the cure of vLLM's own sampling."""
        install(self.model_runner)
        if self.model_runner.device.type == "cpu":
            cpu_cure.install()
