"""Updates of weights: made, sent, and seen in tokens."""

import json
from contextlib import ExitStack, contextmanager

import structlog
import torch
from ray_rollouts import play, some_groups, tokens
from safetensors.torch import save_file
from seer_host.shared_weights import SharedWeights

TENSORS = {
    "embed": torch.arange(3_000_000, dtype=torch.float32).reshape(1000, 3000),
    "norm": torch.tensor([1.5, -2.0]),
    "none": torch.empty(0, 3),
}
NEXT = TENSORS | {"norm": torch.tensor([1.5, 2.0])}
ADAPTED = TENSORS | {"proj.weight": torch.arange(12.0).reshape(4, 3)}
"""Whole weights to which ``FACTORS``, an adapter, belong."""
FACTORS = {
    f"base_model.model.proj.lora_{name}.weight": torch.full(shape, 0.5)
    for name, shape in (("A", (2, 3)), ("B", (4, 2)))
}
ADAPTER_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["proj"]}


def save(place, tensors):
    """Write a checkpoint of two files and an index; return its directory."""
    place.mkdir(parents=True, exist_ok=True)
    names = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place


async def rolled_out(runtime):
    return tokens(await runtime.rollout(some_groups()).wait())


def after(runtime, *sources):
    """Return a rollout's tokens after each update, in a runtime of its own."""

    async def run():
        found = []
        async with runtime:
            for source in sources:
                await runtime.update_weights(source)
                found.append(await rolled_out(runtime))
        return found

    return play(run())


def save_adapter(place):
    """Write the adapter as PEFT does; return its directory."""
    place.mkdir()
    save_file(FACTORS, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    return place


@contextmanager
def offered(*each, adapter=False):
    """Yield the specs of tensors in shared memory; the last are an ``adapter``."""
    configs = [None] * (len(each) - adapter) + [ADAPTER_CONFIG] * adapter
    with ExitStack() as stack:
        yield [
            stack.enter_context(stack.enter_context(SharedWeights()).offer(one.items(), config))
            for one, config in zip(each, configs, strict=True)
        ]


@contextmanager
def deliveries():
    """Yield a list that holds the nodes to which weights have been sent."""
    sent = []
    with structlog.testing.capture_logs() as logs:
        yield sent
    sent += [each["node"] for each in logs if each["event"] == "weights_sent"]
