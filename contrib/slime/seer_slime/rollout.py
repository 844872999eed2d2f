"""The hook of slime: a batch of groups rolled out through Seer, scored and filtered as slime does it."""

from __future__ import annotations

import asyncio
import copy
import threading
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
from seer_host.off_switch import is_off
from seer_host.routed_experts import routed_experts
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.async_utils import get_async_loop
from slime.utils.data import Dataset
from slime.utils.misc import load_function
from slime.utils.types import Sample

from seer_core import Sampling
from seer_core.errors import ConfigError, EngineError, SeerError
from seer_core.model.requests import group_seed, request_seed
from seer_slime.canary import ClientCanary, canary_limits
from seer_slime.engines import Engines, check, router_of, seed_of_run
from seer_slime.fallback import Fallback, Unfinished, WatchedRollout, go_on, limits_of
from seer_slime.figures import figures_of
from seer_slime.nucleus import ASKED, NO_NUCLEUS, nucleus_of, wants_nucleus
from seer_slime.prompts import has_images, processor_of, prompt_of, tokenizer_of

if TYPE_CHECKING:
    from seer_session import Summary
    from slime.rollout.data_source import DataSource

    from seer_core import Completion

__all__ = ["generate_rollout"]

Group = list[Any]
"""Samples of one prompt."""

CLOSING_S = 10.0
"""How long engines that have failed are waited for."""

BEFORE = 5
"""The tokens of a prompt that SGLang decodes with a response."""

engines_of = cache(Engines)
fallback_of = cache(lambda router: Fallback())
canary_of = cache(lambda router: ClientCanary())


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Roll out slime's next batch, or its evaluation sets, by the newest weights of its trainer.

    Engines are the servers behind slime's router, or, where slime starts none, those of Seer's config.
    ``args.seer_config`` names that config, and ``args.seer_journal``, if there is one, the directory of a
    journal, from which a run that died in a rollout goes on with it.  Seeds follow from ``[seer].seed``, the
    rollout's id and the group's place in it.

    Raises:
        ConfigError: slime asks for something that Seer's rollouts do not support.
        EngineError: an engine cannot load the weights, or all groups have failed.
    """
    if is_off() or canary_of(router_of(args)).stopped:
        from slime.rollout.sglang_rollout import generate_rollout as stock

        return stock(args, rollout_id, data_source, evaluation)
    check(args)
    with _Step(args) as step:
        return _evaluate(args, step) if evaluation else _batch(args, rollout_id, data_source, step)


class _Step:
    """A rollout of slime's: the engines, and the way on without Seer where slime keeps its servers.

    ``reason`` is why Seer has failed, empty where it has not.  Engines are closed then, and the next step
    starts them anew.  ``label`` is the name that slime gives the weights in its servers.
    """

    def __init__(self, args: Namespace) -> None:
        config, journal = (getattr(args, name, None) for name in ("seer_config", "seer_journal"))
        router = router_of(args)
        self._args, self._named = args, (config, journal, router)
        self.most, self.stall_s = limits_of(args)
        self.canaries, self.stop_after = canary_limits(args)
        self.canary = canary_of(router)
        # With a journal the rollout goes on where it was when it is begun again.
        self._fallback = fallback_of(router) if router is not None and journal is None else None
        self.reason = ""
        self.label = ""
        self.replaced = 0
        self.summaries: list[Summary] = []

    def __enter__(self) -> _Step:
        try:
            self.engines = engines_of(*self._named)
            self.engines.session.wake()
            self.engines.load_weights(self._args)
            self.label = self.engines.label
        except SeerError as error:
            if self._fallback is None or not self._fallback.worked or isinstance(error, ConfigError):
                raise
            self.fail(str(error))
        if self._fallback is not None:
            self._fallback.worked = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self.reason and self._args.offload_rollout:
            self.engines.session.sleep()

    def fail(self, reason: str) -> None:
        """Close the engines; what hangs is left behind."""
        self.reason = reason
        if engines_of.cache_info().currsize:
            closing = threading.Thread(target=self.engines.close, daemon=True)
            closing.start()
            closing.join(CLOSING_S)
            engines_of.cache_clear()

    def completions(self, records: Sequence[dict[str, Any]], iteration: int) -> Iterator[Completion]:
        """Roll out records; what Seer has not finished in the end is in ``left``."""
        self.left: list[Unfinished] = []
        if self._fallback is None:
            yield from self.engines.session.stream(records, iteration, keep=False)
            self.summaries.append(self.engines.session.result.summary)
            return
        if self.reason:
            self.left = WatchedRollout(None, records, iteration, self.stall_s).left
        else:
            watched = WatchedRollout(self.engines.session, records, iteration, self.stall_s)
            yield from watched
            if watched.reason:
                self.left = watched.left
                self.fail(watched.reason)
            else:
                self.summaries.append(self.engines.session.result.summary)
        if self.left:
            self._fallback.take(len(self.left), self.most, self.reason)
            self.replaced += len(self.left)


def _batch(args: Namespace, rollout_id: int, data_source: DataSource, step: _Step) -> RolloutFnTrainOutput:
    """Roll out groups until slime's dynamic filter has kept a batch; keep the first of them by index."""
    path = args.dynamic_sampling_filter_path
    wanted = load_function(path) if path is not None else None
    sampling = {
        "max_tokens": args.rollout_max_response_len,
        **Sampling.of(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k).fields,
        **_ends(args.rollout_stop, args.rollout_stop_token_ids),
    }
    dropped = MetricGatherer()
    kept: list[Group] = []
    seen: list[Group] = []
    submitted = remaining = failed = 0
    while len(kept) < args.rollout_batch_size:
        groups = data_source.get_samples(args.over_sampling_batch_size)
        names = [f"{rollout_id}-{submitted + number}" for number in range(len(groups))]
        submitted += len(groups)
        whole = _roll_out(args, step, groups, names, sampling, rollout_id)
        failed += len(groups) - len(whole)
        remaining += len(whole)
        seen += whole
        for group in whole:
            verdict = call_dynamic_filter(wanted, args, group)
            if should_drop_dynamic_filter_output(
                verdict, remaining_batch_size=remaining, target_data_size=args.rollout_batch_size
            ):
                dropped.on_dynamic_filter_drop(verdict.reason)
                remaining -= 1
            else:
                kept.append(group)
    kept = kept[: args.rollout_batch_size]
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, kept)
    if args.rollout_all_samples_process_path is not None:
        load_function(args.rollout_all_samples_process_path)(args, seen, data_source)
    mine = {"rollout/seer/failed_groups": failed, "rollout/seer/fallbacks": step.replaced}
    if canary_limits(args)[0]:
        mine["rollout/seer/canary_compared"] = step.canary.compared
        mine["rollout/seer/canary_different"] = step.canary.different
    metrics = {**dropped.collect(), **figures_of(step.summaries), **mine}
    return RolloutFnTrainOutput(samples=kept, metrics=metrics)


def _evaluate(args: Namespace, step: _Step) -> RolloutFnEvalOutput:
    """Roll out slime's evaluation sets, with the same seeds each time."""
    if args.group_rm:
        raise ConfigError("slime has no evaluation with --group-rm; leave one of them out")
    tokenizer = tokenizer_of(args.hf_checkpoint, trust_remote_code=True)
    reward_key = args.eval_reward_key or args.reward_key
    data = {}
    for wanted in args.eval_datasets or []:
        keys = _of_all(args, wanted, "multimodal_keys")
        prompts = Dataset(
            wanted.path,
            tokenizer=tokenizer,
            processor=processor_of(args.hf_checkpoint, trust_remote_code=True) if keys else None,
            multimodal_keys=keys,
            max_length=args.eval_max_prompt_len,
            prompt_key=wanted.input_key,
            label_key=wanted.label_key,
            metadata_key=wanted.metadata_key,
            tool_key=wanted.tool_key,
            apply_chat_template=_of_all(args, wanted, "apply_chat_template"),
            apply_chat_template_kwargs=_of_all(args, wanted, "apply_chat_template_kwargs"),
        ).samples
        size = wanted.n_samples_per_eval_prompt
        groups = [[copy.deepcopy(prompt) for _ in range(size)] for prompt in prompts]
        samples = [sample for group in groups for sample in group]
        for index, sample in enumerate(samples):
            sample.index = index
            sample.metadata = wanted.inject_metadata(sample.metadata)
            sample.custom_rm_path = wanted.custom_rm_path
        sampling = {
            "max_tokens": wanted.max_response_len,
            **Sampling.of(wanted.temperature, wanted.top_p, wanted.top_k).fields,
            **_ends(
                _of_all(args, wanted, "stop", "rollout_stop"),
                _of_all(args, wanted, "stop_token_ids", "rollout_stop_token_ids"),
            ),
            "min_tokens": _of_all(args, wanted, "min_new_tokens", "eval_min_new_tokens"),
            "repetition_penalty": wanted.repetition_penalty,
        }
        names = [f"eval-{wanted.name}-{number}" for number in range(len(groups))]
        whole = _roll_out(args, step, groups, names, sampling, iteration=0, evaluation=True)
        samples = [sample for group in whole for sample in group]
        data[wanted.name] = {
            "rewards": [each.reward if not reward_key else each.reward[reward_key] for each in samples],
            "truncated": [each.status == Sample.Status.TRUNCATED for each in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data=data)


def _of_all(args: Namespace, wanted: Any, name: str, of_all: str = "") -> Any:
    """Return a setting of an evaluation set, or slime's argument ``of_all`` where the set has none."""
    own = getattr(wanted, name, None)
    return getattr(args, of_all or name, None) if own is None else own


def _ends(stop: Sequence[str] | None, stop_token_ids: Sequence[int] | None) -> dict[str, Any]:
    """Return where responses end besides the model's own end; as slime has it, texts keep the stop string."""
    if not stop and not stop_token_ids:
        return {}
    return {
        "stop": stop or (),
        "stop_token_ids": stop_token_ids or (),
        "include_stop_str_in_output": True,
    }


def _roll_out(
    args: Namespace,
    step: _Step,
    groups: Sequence[Group],
    names: Iterable[str],
    sampling: dict[str, Any],
    iteration: int,
    *,
    evaluation: bool = False,
) -> list[Group]:
    """Fill and score samples while engines go on; return the groups without a failed response, in order."""
    tokenizer = tokenizer_of(args.hf_checkpoint, trust_remote_code=True)
    named = dict(zip(names, groups, strict=True))
    nucleus = wants_nucleus(args, evaluation=evaluation)
    attached: dict[str, Any] = {}
    if args.use_rollout_routing_replay and router_of(args) is not None:
        attached["return_routed_experts"] = True
    if nucleus:
        attached["sampling_params"] = {"custom_params": ASKED}
    records = []
    for name, group in named.items():
        ids, images = prompt_of(args, group)
        more = {"attachments": {**attached, **images}} if attached or images else {}
        records.append({"group_id": name, "prompt_token_ids": ids, "n": len(group), **more, **sampling})
    prompts = {record["group_id"]: record["prompt_token_ids"] for record in records}
    scored: dict[tuple[str, int], Future[Any]] = {}
    failed: set[str] = set()
    compared: list[Future[None]] = []
    for completion in step.completions(records, iteration):
        name, index = completion.group_id, completion.index
        if not completion.whole:
            failed.add(name)
            continue
        if step.canaries and not evaluation:
            step.canaries -= 1
            blank = copy.deepcopy(named[name][index])
            work = step.canary.compare(args, blank, prompts[name], completion, sampling, step.stop_after)
            compared.append(_submit(work))
        text = _text_of(args, tokenizer, prompts[name], completion.token_ids.tolist())
        _fill(named[name][index], prompts[name], completion, text, step.label)
        if args.use_rollout_routing_replay:
            experts = _experts(args, completion, len(prompts[name]))
            named[name][index].rollout_routed_experts = experts
        if nucleus:
            sample = named[name][index]
            sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = nucleus_of(completion)
        scored[name, index] = _submit(_score(args, named[name][index], evaluation))
    seed = seed_of_run(args) if step.left else None
    for each in step.left:
        if seed is not None:
            own = request_seed(group_seed(seed, iteration, each.group), each.place)
            each = attrs.evolve(each, seed=own)
        sample, ids = named[each.group][each.place], prompts[each.group]
        work = _go_on(args, sample, ids, each, sampling, evaluation, step.label)
        scored[each.group, each.place] = _submit(work)
    if named and len(failed) == len(named):
        raise EngineError("in every group of slime's batch a response has failed; the engines' logs say why")
    for (name, index), sample in scored.items():
        named[name][index] = sample.result()
        if named[name][index].status == Sample.Status.ABORTED:
            failed.add(name)
    for comparison in compared:
        comparison.result()
    whole = [group for name, group in named.items() if name not in failed]
    if args.group_rm:
        for group, rewards in [(group, _submit(batched_async_rm(args, group))) for group in whole]:
            for sample, reward in zip(group, rewards.result(), strict=True):
                sample.reward = reward
    return whole


def _text_of(args: Namespace, tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return a response as text, as slime's servers have it: what it adds to the text before it.

    Alone it would lose a space at its beginning, with tokenizers that drop the first of a text.
    """
    before = list(prompt_ids[-BEFORE:])
    skip = args.rollout_skip_special_tokens
    whole: str = tokenizer.decode([*before, *ids], skip_special_tokens=skip)
    return whole[len(tokenizer.decode(before, skip_special_tokens=skip)) :]


def _fill(sample: Any, prompt_ids: Sequence[int], completion: Completion, text: str, label: str) -> None:
    """Write a completion into slime's sample."""
    ids = completion.token_ids.tolist()
    sample.tokens = [*prompt_ids, *ids]
    sample.response = text
    sample.response_length = len(ids)
    sample.loss_mask = [1] * len(ids)
    sample.rollout_log_probs = completion.logprobs.tolist()
    sample.weight_versions = [label or str(completion.weight_version)]
    cut = completion.finish_reason == "length"
    sample.status = Sample.Status.TRUNCATED if cut else Sample.Status.COMPLETED


def _experts(args: Namespace, completion: Completion, prompt_tokens: int) -> Any:
    """Return the experts of a response as slime has them, int32 [positions, layers, experts per token]."""
    experts = routed_experts(completion, prompt_tokens, args.moe_router_topk)
    if experts is None:
        raise ConfigError(
            "--use-rollout-routing-replay: the engines do not answer the experts that they take; write"
            " engine_args = { enable_return_routed_experts = true } into [engine.sglang] or [engine.vllm], or"
            " start external servers with --enable-return-routed-experts"
        )
    return experts.astype("int32")


async def _go_on(
    args: Namespace,
    sample: Any,
    prompt_ids: Sequence[int],
    has: Unfinished,
    sampling: dict[str, Any],
    evaluation: bool,
    label: str,
) -> Any:
    """Return a sample that slime's own client has finished, scored.

    If its servers have other weights by now than those that ``label`` names, the response begins anew.
    """
    nucleus = wants_nucleus(args, evaluation=evaluation)
    if nucleus or has_images(sample):  # the response begins anew
        has = attrs.evolve(has, token_ids=[], logprobs=[])
    if nucleus:  # it is not known of the tokens so far
        sampling = sampling | {"custom_params": dict(ASKED)}
    ids, logprobs, rest = list(has.token_ids), list(has.logprobs), sample
    status = Sample.Status.TRUNCATED
    if len(ids) < sampling["max_tokens"]:
        ids, logprobs, rest = await go_on(args, sample, prompt_ids, has, sampling)
        if has.token_ids and label and {*rest.weight_versions} - {label}:
            has = attrs.evolve(has, token_ids=[], logprobs=[])
            ids, logprobs, rest = await go_on(args, sample, prompt_ids, has, sampling)
        status = rest.status
    tokenizer = tokenizer_of(args.hf_checkpoint, trust_remote_code=True)
    sample.tokens = [*prompt_ids, *ids]
    sample.response = _text_of(args, tokenizer, prompt_ids, ids)
    sample.response_length = len(ids)
    sample.loss_mask = [1] * len(ids)
    sample.rollout_log_probs = logprobs
    sample.weight_versions = list(rest.weight_versions) or [label]
    sample.metadata = {**(sample.metadata or {}), "seer_fallback": True}
    if nucleus and status != Sample.Status.ABORTED:
        if rest.rollout_top_p_token_ids is None:
            raise NO_NUCLEUS
        sample.rollout_top_p_token_ids = rest.rollout_top_p_token_ids
        sample.rollout_top_p_token_offsets = rest.rollout_top_p_token_offsets
    if args.use_rollout_routing_replay:
        sample.rollout_routed_experts = rest.rollout_routed_experts
        if rest.rollout_routed_experts is None:  # it had all of its tokens, and no server is asked once more
            status = Sample.Status.ABORTED
    sample.status = status
    return sample if status == Sample.Status.ABORTED else await _score(args, sample, evaluation)


async def _score(args: Namespace, sample: Any, evaluation: bool) -> Any:
    """Return a sample as slime's hooks leave it, with its reward, unless whole groups are scored."""
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    if not args.group_rm and sample.reward is None:
        sample.reward = await async_rm(args, sample)
    return sample


def _submit(work: Any) -> Future[Any]:
    """Run a coroutine in slime's own event loop."""
    return asyncio.run_coroutine_threadsafe(work, get_async_loop().loop)
