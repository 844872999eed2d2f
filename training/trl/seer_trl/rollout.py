"""The rollout function of TRL's GRPOTrainer: prompts in, completions of the trainer's current weights out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from safetensors import SafetensorError
from seer_host.images import png_of
from seer_host.shared_weights import SharedWeights
from seer_host.threads import in_thread
from seer_session import Sampling, Session

from seer_core.errors import ConfigError, EngineError, OutputError
from seer_trl.images import require_no_places
from seer_trl.tools import ToolTurns

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

__all__ = ["SeerRollout"]


class SeerRollout:
    """Rolls out through a session that has been started; give it to a trainer as ``rollout_func``.

    Whenever the trainer has taken a step, its weights go to the engines: by the directory ``seer_weights`` in
    its output directory, or, with ``weights="shared_memory"``, in memory that engines on its machine read.
    Seeds follow from ``[seer].seed``, the trainer's step and the place in its batch, so training that is
    resumed goes on with the tokens that it would have had.  If the engines are ``colocated`` with the
    trainer, on its devices, they sleep while it trains.  With the trainer's ``args``, settings that Seer does
    not support are refused at once: before the trainer is made and engines have started.
    """

    def __init__(
        self,
        session: Session,
        args: GRPOConfig | None = None,
        *,
        weights: Literal["directory", "shared_memory"] = "directory",
        colocated: bool = False,
    ) -> None:
        if args is not None:
            check_settings(args)
        if weights not in ("directory", "shared_memory"):
            raise ConfigError(f"weights is {weights!r}; it is 'directory' or 'shared_memory'")
        self.session = session
        self._shared = SharedWeights() if weights == "shared_memory" else None
        self.colocated = colocated
        self._step = -1
        self._batches: Counter[str] = Counter()
        """Rollouts at this step so far, by mode: a training that is resumed has no evaluation before them."""

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return ``prompt_ids``, ``completion_ids`` and ``logprobs`` for each prompt, in their order.

        Prompts are texts or conversations, each repeated as often as it shall be answered.  ``logprobs`` are
        those of the engines, in nats.  Where the session's configuration has an environment, there are
        ``env_mask``, which is 0 for its tokens, and its rewards, ``environment_reward``, too.  Where the
        trainer has tools or environments, completions and log-probs are those of the first turns: then TRL
        asks for the rest, in place of the loop in which it would call tools itself.

        Raises:
            ConfigError: the trainer asks for something that Seer's rollouts do not support.
            EngineError: an engine failed a response, or cannot load the weights.
        """
        check(trainer)
        if trainer.tools:
            self.session.runtime.refuse_environment("a trainer of TRL's with tools")
        self.session.wake()
        self._send_weights(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        records = self._records(prompt_ids, images, trainer)
        places = [(record["group_id"], index) for record in records for index in range(record["n"])]
        tools = None
        if trainer.tools:
            tools = ToolTurns(trainer, prompt_ids, {place: row for row, place in enumerate(places)})
        result = self.session.rollout(
            records,
            iteration=self._step,
            environment=tools,  # type: ignore[arg-type]  # its methods are plain ones, which run in threads
        )
        self._batches[_mode_of(trainer)] += 1
        if self.colocated:
            self.session.sleep()
        completions = result.in_order(places)
        for each in completions:
            if not each.whole:
                reason = each.error or "the engines' logs say why"
                raise EngineError(
                    f"response {each.request_id} ended with {each.finish_reason!r}, and TRL cannot train"
                    f" without it; {reason}"
                )
        if images is not None:
            require_no_places(completions, _image_token(trainer))
        _correct_by_logprobs(trainer, self)
        output: dict[str, list[Any]] = {
            "prompt_ids": prompt_ids,
            "completion_ids": [each.token_ids.tolist() for each in completions],
            "logprobs": [each.logprobs.tolist() for each in completions],
        }
        if tools is not None:
            for name in ("completion_ids", "logprobs"):
                first = zip(output[name], completions, strict=True)
                output[name] = [values[: completion.turns[0].tokens] for values, completion in first]
            results = self.session.submit(in_thread(None, tools.results, completions)).result()
            trainer._tool_call_loop = lambda *_: results
        elif self.session.runtime.environment is not None:
            output["env_mask"] = [each.loss_mask for each in completions]
            output["environment_reward"] = [each.reward for each in completions]
        return output

    def sync_weights(self) -> None:
        """Do nothing: TRL calls this just before the rollout, which sends the weights itself."""

    def _send_weights(self, trainer: GRPOTrainer) -> None:
        """Have the engines load the trainer's weights, unless they have those of this step."""
        if self._step == trainer.state.global_step:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        # It enters the engines' fingerprints, by which a journal recognises the weights after a death.
        version = max(trainer.state.global_step, self.session.weight_version) + 1
        if self._shared is not None:
            with self._shared.offer(*_tensors(model)) as source:
                self.session.update_weights(source, version)
        else:
            kind = "adapter" if _has_adapter(model) else "weights"
            directory = Path(trainer.args.output_dir) / f"seer_{kind}"
            try:
                model.save_pretrained(directory)
            except (OSError, SafetensorError) as error:  # the latter where a disk is full
                raise OutputError(f"cannot write the weights to {directory}: {error}; make room") from error
            self.session.update_weights(directory, version)
        self._step = trainer.state.global_step
        self._batches.clear()

    def _records(
        self,
        prompt_ids: Sequence[Sequence[int]],
        images: Sequence[Sequence[Any] | None] | None,
        trainer: GRPOTrainer,
    ) -> list[dict[str, Any]]:
        """Return a record for each group: TRL repeats a prompt as often as it shall be answered."""
        records = self._records_of_text(prompt_ids, trainer)
        if images is None:
            return records
        if trainer.tools:
            raise ConfigError(
                "prompts with images and a trainer with tools do not go together; leave one out"
            )
        row = 0
        for record in records:
            record["images"] = [png_of(image) for image in images[row] or ()]
            row += record["n"]
        return records

    def _records_of_text(
        self, prompt_ids: Sequence[Sequence[int]], trainer: GRPOTrainer
    ) -> list[dict[str, Any]]:
        mode = _mode_of(trainer)
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        places = [(place // size, ids) for place, ids in enumerate(prompt_ids)]
        return [
            {
                "group_id": f"{mode}-{self._step}-{self._batches[mode]}-{number}",
                "prompt_token_ids": ids,
                "n": len(list(members)),
                "max_tokens": trainer.max_completion_length,
                **sampling_of(trainer.args).fields,
            }
            for number, ((_, ids), members) in enumerate(groupby(places))
        ]


def _mode_of(trainer: GRPOTrainer) -> Literal["train", "eval"]:
    return "train" if trainer.model.training else "eval"


def _image_token(trainer: GRPOTrainer) -> int:
    """Return the token that stands for a part of an image."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return int(model.config.image_token_id)


def check(trainer: GRPOTrainer) -> None:
    """Refuse a trainer that Seer cannot roll out for.

    Raises:
        ConfigError: a setting is not supported; the error names it and the remedy.
    """
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"TRL trains in {trainer.accelerator.num_processes} processes, and a session's engines serve one;"
            " start one process"
        )
    check_settings(trainer.args)


def check_settings(args: GRPOConfig) -> None:
    """Refuse settings of a trainer's that Seer's rollouts do not support.

    Raises:
        ConfigError: the error names the setting and the remedy.
    """
    if args.use_vllm:
        raise ConfigError("use_vllm starts TRL's own vLLM, and Seer's engines take its place; leave it out")
    sampling = sampling_of(args)
    if args.vllm_importance_sampling_correction and not sampling.raw:
        raise ConfigError(
            f"sampled by {sampling.described}, the engines' log-probs, the model's own, are not those that"
            " TRL corrects by; sample at temperature 1, top_p 1 and top_k 0, or set"
            " vllm_importance_sampling_correction=False"
        )


def sampling_of(args: GRPOConfig) -> Sampling:
    """Return how a trainer samples; ``generation_kwargs`` go over its other settings, as in TRL.

    Raises:
        ConfigError: they name a field that Seer does not have.
    """
    given = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": max(args.top_k, 0),
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        **(args.generation_kwargs or {}),
    }
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return msgspec.convert(given, Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Seer cannot sample as GRPOConfig has it: {error}; leave that out") from error


def _has_adapter(model: Any) -> bool:
    """Return whether PEFT trains an adapter of a model, and ``save_pretrained`` writes that alone."""
    return hasattr(model, "peft_config")


def _tensors(model: Any) -> tuple[Iterable[tuple[str, Any]], dict[str, Any] | None]:
    """Return a model's weights as ``save_pretrained`` names them, tied ones once, and PEFT's config."""
    if _has_adapter(model):
        from peft import get_peft_model_state_dict

        config = model.peft_config["default"].to_dict()
        return get_peft_model_state_dict(model).items(), msgspec.to_builtins(config, enc_hook=str)

    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    once = remove_tied_weights_from_state_dict(model.state_dict(), model)
    tensors: dict[str, Any] = revert_weight_conversion(model, once)
    return tensors.items(), None


def _correct_by_logprobs(trainer: GRPOTrainer, rollout: SeerRollout) -> None:
    """Have TRL weigh tokens by the engines' log-probs, as it does those of its own vLLM, where that is on.

    It does so only where ``use_vllm`` is set, which in GRPOConfig would start that vLLM.  Set later, it has
    TRL ask for ``sync_weights`` before each rollout of another step, and nothing more.
    """
    if trainer.vllm_importance_sampling_correction:
        trainer.use_vllm = True
        trainer.vllm_generation = rollout
        trainer._last_loaded_step = trainer.state.global_step
