"""Seer's engines behind SkyRL's interface of inference engines, one batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from seer_host.routed_experts import routed_experts
from seer_session import Completion, Sampling, Session
from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
)

from seer_core.errors import ConfigError, EngineError
from seer_core.model.sampling import CONTROLS
from seer_skyrl.turns import BatchTurns, group_id_of, iteration_of

if TYPE_CHECKING:
    from skyrl.train.generators.base import GeneratorInput

__all__ = ["SeerEngines", "sampling"]

NEUTRAL = {
    "min_tokens": 1,  # SkyRL always asks for 1; a response of Seer has its end token at least
    "skip_special_tokens": True,
}
"""Sampling parameters of SkyRL that change nothing at these values."""

ABSENT = (
    "Seer's engines take whole batches of SkyRL's and a directory of weights, no single requests and no"
    " transfers; train by `python -m seer_skyrl`, and give single requests to `seer serve`"
)
USED = ("max_tokens", "temperature", "top_p", "top_k", "logprobs")


class SeerEngines(InferenceEngineInterface):
    """The engines of a session that has been started.

    ``batch`` is the input of SkyRL's generator: it names the groups, the step, and the phase.
    """

    def __init__(
        self, session: Session, tokenizer: Any, model_name: str = "seer", *, replays_routing: bool = False
    ) -> None:
        self.session = session
        self.replays_routing = replays_routing
        self.tokenizer = tokenizer
        self.batch: GeneratorInput | None = None
        self._model_name = model_name
        self._turns: BatchTurns | None = None

    @property
    def model_name(self) -> str:
        """The model's name; engines serve one."""
        return self._model_name

    async def generate(
        self, input_batch: InferenceEngineInput, model: str | None = None
    ) -> InferenceEngineOutput:
        """Roll out a whole batch of prompts, and return the responses in their order.

        Within ``turn_by_turn`` they are the next turns of the sessions that are named.

        Seeds follow from ``[seer].seed``, SkyRL's step, the prompt's place in its data, the repetition and
        the turn.  Evaluations have the same ones each time.  Log-probs are those of the engines, in nats.

        Raises:
            ConfigError: SkyRL asks for something that a rollout of Seer's cannot give.
            EngineError: an engine failed a response.
        """
        batch, prompts = self.batch, input_batch["prompt_token_ids"]
        how = input_batch["sampling_params"] or {}
        sessions = input_batch.get("session_ids")
        if self._turns is not None and prompts is not None and sessions is not None:
            turns = zip(sessions, prompts, strict=True)
            asked = [self._turns.ask(session, prompt, sampling(how)) for session, prompt in turns]
            return self._output(await asyncio.gather(*asked), prompts, how)
        if batch is None or prompts is None or len(prompts) != len(batch["prompts"]):
            raise ConfigError("Seer rolls out batches of SkyRL's; let a SeerGenerator ask for them")
        ids = [group_id_of(batch, each) for each in batch["trajectory_ids"]]
        groups: dict[str, dict[str, Any]] = {}
        for group_id, prompt in zip(ids, prompts, strict=True):
            group = groups.setdefault(
                group_id, {"group_id": group_id, "prompt_token_ids": prompt, "n": 0, **sampling(how)}
            )
            if group["prompt_token_ids"] != prompt:
                raise ConfigError(
                    f"SkyRL's environment gives responses of {group_id} different prompts, and a group has"
                    " one; let it give them the same"
                )
            group["n"] += 1
        result = await asyncio.to_thread(self.session.rollout, list(groups.values()), iteration_of(batch))
        places = [each.repetition_id for each in batch["trajectory_ids"]]
        return self._output(result.in_order(zip(ids, places, strict=True)), prompts, how)

    @asynccontextmanager
    async def turn_by_turn(self, batch: GeneratorInput) -> AsyncIterator[None]:
        """Let SkyRL's agent loops ask for the turns of a batch, each by a request of its own."""
        rollout = self.session.open()
        opened = await asyncio.to_thread(rollout.__enter__)
        try:
            self._turns = BatchTurns(opened, batch)
            yield
        finally:
            turns, self._turns = self._turns, None
            await asyncio.to_thread(rollout.__exit__, None, None, None)
            if turns is not None:
                await asyncio.to_thread(turns.forget)

    def _output(
        self, completions: Sequence[Completion], prompts: Sequence[Sequence[int]], how: Mapping[str, Any]
    ) -> InferenceEngineOutput:
        for each in completions:
            if not each.whole:
                raise EngineError(
                    f"response {each.request_id} ended with {each.finish_reason!r}, and SkyRL cannot train"
                    " without it; the engines' logs say why"
                )
        tokens = [each.token_ids.tolist() for each in completions]
        wanted = how.get("logprobs") is not None
        return InferenceEngineOutput(
            responses=[self.tokenizer.decode(each, skip_special_tokens=True) for each in tokens],
            response_ids=tokens,
            stop_reasons=[each.finish_reason for each in completions],
            response_logprobs=[each.logprobs.tolist() for each in completions] if wanted else None,
            prompt_logprobs=None,
            rollout_expert_indices=self._experts(completions, prompts) if self.replays_routing else None,
        )

    def _experts(self, completions: Sequence[Completion], prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Return the experts of each response, uint16 [positions, layers, experts per token]."""
        found = [routed_experts(each, len(prompt)) for each, prompt in zip(completions, prompts, strict=True)]
        if any(each is None for each in found):
            raise ConfigError(
                "generator.inference_engine.enable_return_routed_experts: Seer's engines do not answer the"
                " experts that they take; write engine_args = { enable_return_routed_experts = true } into"
                " [engine.sglang] or [engine.vllm]"
            )
        return found

    async def load(self, directory: Path, step: int) -> None:
        """Wake the engines if they sleep, and have them load the weights in a directory, those after a step.

        A run that is resumed after the step gives them the same version, by which a journal recognises them.
        """
        await self.wake_up()
        version = max(step, self.session.weight_version) + 1
        await asyncio.to_thread(self.session.update_weights, directory, version)

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Wake the engines, which take back all of their memory at once."""
        await asyncio.to_thread(self.session.wake)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Put the engines to sleep, so that the trainer has their memory."""
        await asyncio.to_thread(self.session.sleep)

    async def teardown(self) -> None:
        """Stop the engines."""
        await asyncio.to_thread(self.session.close)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Do nothing: the engines drop cached prefixes when they load new weights."""

    async def pause_generation(self) -> None:
        """Do nothing: no request runs between two batches."""

    async def resume_generation(self) -> None:
        """Do nothing: nothing was paused."""

    async def finish_session(self, session_id: str) -> None:
        """Do nothing: nothing is kept for a session."""

    def get_endpoint_url(self) -> NoReturn:
        """Refuse: single requests go to `seer serve`."""
        raise ConfigError(ABSENT)

    async def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(ABSENT)

    chat_completion = render_chat_completion = completion = _refuse
    init_weight_update_communicator = update_named_weights = get_world_size = _refuse


def sampling(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields of a prompt's record, of the parameters that SkyRL sends to vLLM.

    Raises:
        ConfigError: SkyRL samples in a way that Seer does not, or wants log-probs that are not the model's.
    """
    for name, value in how.items():
        if name not in (*USED, *CONTROLS) and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise ConfigError(f"Seer does not sample by {name}; leave it out of SkyRL's sampling parameters")
    try:
        return {
            "max_tokens": how["max_tokens"],
            **Sampling.of(how["temperature"], how["top_p"], how["top_k"]).fields,
            **{
                name: how[name]
                for name in CONTROLS
                if how.get(name) is not None and how[name] != NEUTRAL.get(name)
            },
        }
    except KeyError as error:
        raise ConfigError(f"SkyRL's sampling parameters have no {error}; give all of them") from None
