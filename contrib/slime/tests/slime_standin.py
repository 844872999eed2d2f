"""The parts of slime that the adapter uses, as small as they can be, for where slime itself is not installed.

It is no package of an index.  With a checkout on ``PYTHONPATH`` the tests run on slime's own modules.
"""

import asyncio
import base64
import importlib
import io
import json
import sys
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType

import aiohttp
import numpy as np
import torch


@dataclass
class Sample:
    """A response, to be."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    tokens: list = field(default_factory=list)
    multimodal_inputs: dict | None = None
    multimodal_train_inputs: dict | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list | None = None
    weight_versions: list = field(default_factory=list)
    rollout_log_probs: list | None = None
    rollout_top_p_token_ids: object = None
    rollout_top_p_token_offsets: object = None
    rollout_routed_experts: object = None
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    custom_rm_path: str | None = None


@dataclass
class RolloutFnTrainOutput:
    samples: list
    metrics: dict | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict
    metrics: dict | None = None


def call_rollout_fn(function, *args, evaluation):
    return function(*args, evaluation=evaluation)


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(function, *args):
    return DynamicFilterOutput(keep=True) if function is None else function(*args)


def should_drop_dynamic_filter_output(output, *, remaining_batch_size, target_data_size):
    spare = remaining_batch_size > target_data_size or not output.keep_when_insufficient
    return not output.keep and spare


class MetricGatherer:
    def __init__(self):
        self.counts = {}

    def on_dynamic_filter_drop(self, reason):
        name = f"rollout/dynamic_filter/drop_{reason}"
        self.counts[name] = self.counts.get(name, 0) + 1

    def collect(self):
        return dict(self.counts)


def load_function(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def async_rm(args, sample):
    return await load_function(sample.custom_rm_path or args.custom_rm_path)(args, sample)


async def batched_async_rm(args, samples):
    return await load_function(args.custom_rm_path)(args, samples)


async def apply_rollout_sample_hooks(args, sample, **facts):
    for path in args.rollout_sample_hook_path or []:
        sample = load_function(path)(args, sample) or sample
    return sample


class AsyncLoopThread:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()


_loops = []


def get_async_loop():
    if not _loops:
        _loops.append(AsyncLoopThread())
    return _loops[0]


def load_tokenizer(name_or_path, **_):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path)


def load_processor(name_or_path, **_):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(name_or_path)


def encode_image_for_rollout_engine(image):
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def build_processor_kwargs(multimodal_inputs):
    plain = {"return_tensors": None, "return_mm_token_type_ids": False}
    return {**multimodal_inputs, "text_kwargs": plain, "images_kwargs": {"return_tensors": "pt"}}


def int32_of(meta, name):
    return np.frombuffer(base64.b64decode(meta[name]), np.int32).copy() if name in meta else None


ENDS = {"length": Sample.Status.TRUNCATED, "stop": Sample.Status.COMPLETED, "abort": Sample.Status.ABORTED}


class GenerateState:
    def __init__(self, args):
        self.semaphore = asyncio.Semaphore(8)


async def generate(args, sample, sampling_params):
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    if images := (sample.multimodal_inputs or {}).get("images"):
        body["image_data"] = [encode_image_for_rollout_engine(each) for each in images]
    if args.use_rollout_routing_replay:
        body["return_routed_experts"] = True
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    async with aiohttp.ClientSession() as session:
        meta = (await (await session.post(url, json=body)).json())["meta_info"]
    pairs = meta["output_token_logprobs"]
    sample.tokens = [*sample.tokens, *(token for _, token, _ in pairs)]
    sample.response_length = len(pairs)
    sample.rollout_log_probs = [logprob for logprob, _, _ in pairs]
    sample.weight_versions.append(meta["weight_version"])
    if (experts := int32_of(meta, "routed_experts")) is not None:
        shape = (len(sample.tokens) - 1, args.num_layers, args.moe_router_topk)
        sample.rollout_routed_experts = torch.from_numpy(experts.reshape(shape))
    if (tokens := int32_of(meta, "top_p_token_ids")) is not None:
        sample.rollout_top_p_token_ids = torch.from_numpy(tokens)
        sample.rollout_top_p_token_offsets = torch.from_numpy(int32_of(meta, "top_p_token_offsets"))
    sample.status = ENDS[meta["finish_reason"]["type"]]
    return sample


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    own_client = sys.modules["slime.rollout.sglang_rollout"].generate  # as tests may have replaced it
    tokenizer = load_tokenizer(args.hf_checkpoint)
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
            how = {"temperature": args.rollout_temperature, "max_new_tokens": args.rollout_max_response_len}
            asyncio.run(own_client(args, sample, how))
    return RolloutFnTrainOutput(groups)


class Dataset:
    def __init__(self, path, *, prompt_key, label_key, **_):
        rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        self.samples = [Sample(prompt=row[prompt_key], label=row[label_key]) for row in rows]


@dataclass
class EvalDatasetConfig:
    name: str
    path: str
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    multimodal_keys: dict | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list | None = None
    stop_token_ids: list | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None

    def inject_metadata(self, metadata):
        return dict(metadata)


MODULES = {
    "slime": (),
    "slime.rollout": (),
    "slime.rollout.base_types": (RolloutFnTrainOutput, RolloutFnEvalOutput, call_rollout_fn),
    "slime.rollout.filter_hub": (),
    "slime.rollout.filter_hub.base_types": (
        DynamicFilterOutput,
        MetricGatherer,
        call_dynamic_filter,
        should_drop_dynamic_filter_output,
    ),
    "slime.rollout.rm_hub": (async_rm, batched_async_rm),
    "slime.rollout.sample_hooks": (apply_rollout_sample_hooks,),
    "slime.rollout.sglang_rollout": (GenerateState, generate, generate_rollout),
    "slime.utils": (),
    "slime.utils.async_utils": (get_async_loop,),
    "slime.utils.data": (Dataset,),
    "slime.utils.eval_config": (EvalDatasetConfig,),
    "slime.utils.misc": (load_function,),
    "slime.utils.processing_utils": (
        build_processor_kwargs,
        encode_image_for_rollout_engine,
        load_processor,
        load_tokenizer,
    ),
    "slime.utils.types": (Sample,),
}


def install():
    """Register the stand-in under slime's module names."""
    for name, contents in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        for each in contents:
            setattr(module, each.__name__, each)
    sys.modules["slime"].is_standin = True
