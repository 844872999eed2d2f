"""Agreement of engines: with the same seeds, how many responses are token for token the same on each?

For a response that differs, the first place at which it does, and how far the two tokens are apart there, by
logits that transformers computes in float64 from the text before:

  log-prob gap  between the two tokens
  choice gap    between what keyed sampling compares: log-prob / temperature + noise

The choice gap is how much rounding it took to choose the other token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from seer_host.config_files import load_config
from seer_session.runtime import Runtime
from seer_worker.sampling.noise import gumbel, noise_steps
from transformers import AutoModelForCausalLM

from bench.harness import EXAMPLE, Row
from seer_core.model import Completion, PromptGroup, Sampling

TEMPERATURES = (0.0, 1.0)


async def roll_out(
    engine: str, records: Sequence[Row], plugins: Sequence[str], overrides: Sequence[str]
) -> tuple[dict[float, dict[str, Completion]], dict[str, PromptGroup]]:
    """Return an engine's completions by temperature and request, and the prompts by group."""
    config = load_config(EXAMPLE / "demo.toml", [*overrides, f"seer.engine={engine}"])
    found = {}
    async with Runtime.from_config(config.with_plugins(tuple(plugins))) as runtime:
        groups = runtime.groups(records, iteration=0)
        for temperature in TEMPERATURES:
            now = [msgspec.structs.replace(each, sampling=Sampling(temperature)) for each in groups]
            result = await runtime.rollout(now).wait()
            found[temperature] = {each.request_id: each for each in result.completions}
    return found, {group.id: group for group in groups}


class Reference:
    """The model in float64, for one position at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)

    @torch.no_grad()
    def difference(self, group: PromptGroup, ours: Completion, theirs: Completion, temperature: float) -> Row:
        """Describe the first place at which two responses differ."""
        place = next(
            i
            for i, (a, b) in enumerate(zip([*ours.token_ids, None], [*theirs.token_ids, None], strict=False))
            if a != b
        )
        text = [*group.prompt_token_ids, *ours.token_ids[:place]]
        logprobs = self._model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        scores = logprobs
        if temperature:
            seeds, positions = torch.tensor([ours.seed]), torch.tensor([len(text)])
            scores = logprobs / temperature + gumbel(seeds, positions, noise_steps(len(logprobs)))[0]
        tokens = [ours.token_ids[place], theirs.token_ids[place]]
        best = int(scores.argmax())
        return {
            "request": ours.request_id,
            "place": place,
            "tokens": tokens,
            "logprobs": [float(logprobs[token]) for token in tokens],
            "logprob_gap": abs(float(logprobs[tokens[0]] - logprobs[tokens[1]])),
            "choice_gap": abs(float(scores[tokens[0]] - scores[tokens[1]])),
            "chosen_in_float64": tokens.index(best) if best in tokens else None,
        }


def compare(
    engines: tuple[str, str],
    temperature: float,
    ours: Mapping[str, Completion],
    theirs: Mapping[str, Completion],
    groups: Mapping[str, PromptGroup],
    reference: Reference,
) -> Row:
    """Compare two engines' responses at one temperature."""
    pairs = [(ours[name], theirs[name]) for name in ours]
    differing = [(a, b) for a, b in pairs if a.token_ids != b.token_ids]
    apart = [
        abs(x - y)
        for a, b in pairs
        if a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    return {
        "engines": engines,
        "temperature": temperature,
        "responses": len(pairs),
        "tokens": sum(len(each.token_ids) for each in ours.values()),
        "differing_responses": len(differing),
        "share_equal": 1 - len(differing) / len(pairs),
        "mean_logprob_difference": sum(apart) / max(1, len(apart)),
        "largest_logprob_difference": max(apart, default=0.0),
        "differences": [reference.difference(groups[a.group_id], a, b, temperature) for a, b in differing],
    }


async def agreement(
    engines: tuple[str, str], records: Sequence[Row], plugins: Sequence[str], overrides: Sequence[str] = ()
) -> list[Row]:
    """Roll out on both engines, and compare at each temperature."""
    first, second = engines
    ours, groups = await roll_out(first, records, plugins, overrides)
    theirs, _ = await roll_out(second, records, plugins, overrides)
    reference = Reference(EXAMPLE / "weights")
    return [compare(engines, each, ours[each], theirs[each], groups, reference) for each in TEMPERATURES]
