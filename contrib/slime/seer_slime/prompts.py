"""Prompts of slime's samples as its own client sends them: token ids, and images beside them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import cache
from typing import Any

from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
)

from seer_core.errors import ConfigError
from seer_slime.engines import router_of

__all__ = ["has_images", "processor_of", "prompt_of", "tokenizer_of"]

TOKENS = ("input_ids", "attention_mask")
"""What a processor returns for the text, and slime's trainer does not read of it."""

processor_of = cache(load_processor)
tokenizer_of = cache(load_tokenizer)


def has_images(sample: Any) -> bool:
    """Return whether a sample's prompt has more than text."""
    return any((sample.multimodal_inputs or {}).values())


def prompt_of(args: Namespace, group: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
    """Return the token ids of a group's prompt, and the attachments with its images.

    As slime's own client does, it leaves in each sample what the trainer reads of the images.

    Raises:
        ConfigError: the prompt is no text, or has something that Seer cannot pass on.
    """
    first = group[0]
    if not isinstance(first.prompt, str):
        raise ConfigError("a prompt is a conversation and no text; give --apply-chat-template")
    if not has_images(first):
        tokenizer = tokenizer_of(args.hf_checkpoint, trust_remote_code=True)
        ids: list[int] = tokenizer.encode(first.prompt, add_special_tokens=False)
        return ids, {}
    named = [name for name, given in first.multimodal_inputs.items() if given]
    if named != ["images"]:
        raise ConfigError(f"a prompt has {' and '.join(named)}, and slime's servers get images alone")
    if router_of(args) is None:
        raise ConfigError(
            "prompts with images go to slime's own servers alone; leave out --rollout-num-gpus 0, or the"
            " multimodal keys"
        )
    processor = processor_of(args.hf_checkpoint, trust_remote_code=True)
    if processor is None:
        raise ConfigError(f"{args.hf_checkpoint} has no processor of images; name a model that reads them")
    output = processor(text=first.prompt, **build_processor_kwargs(first.multimodal_inputs))
    for sample in group:
        if sample.multimodal_train_inputs is None:
            read = {name: value for name, value in output.items() if name not in TOKENS}
            sample.multimodal_train_inputs = read or None
    images = [encode_image_for_rollout_engine(each) for each in first.multimodal_inputs["images"]]
    return list(output["input_ids"][0]), {"image_data": images}
