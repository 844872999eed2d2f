"""The loop, strictly synchronous: rollout with rewards meanwhile, training, new weights, again.

Whatever order responses finish in, and whatever became of the engines, the trainer gets them in the order in
which they were submitted.  So two runs that differ in how they schedule have the same losses and weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs
import msgspec
import structlog

from seer_core import Completion, Config, PromptGroup, Session
from seer_core.errors import OutputError, SeerError
from seer_core.files import LineFile
from seer_rl.advantages import group_advantages
from seer_rl.checkpoints import Checkpoint, Checkpoints, state_of
from seer_rl.config import TrainTable
from seer_rl.errors import RewardError, TrainError
from seer_rl.memory import give_back
from seer_rl.prompts import Prompts
from seer_rl.responses import Response
from seer_rl.rewards import RewardPool
from seer_rl.trackers import Trackers
from seer_rl.trainer import ForeseeingTrainer, Sample, Trainer, WatchedTrainer
from seer_rl.weights import Way

__all__ = ["Loop", "Watch"]

WHOLE = ("stop", "length")
"""How a response ends that no engine has failed."""

log = structlog.get_logger("seer")


class Watch(Protocol):
    """Whoever looks on; called in the loop's thread."""

    def phase(self, iteration: int, name: str) -> None:
        """An iteration has come to a phase.

        They are evaluation, rollout, sleep, rewards, training, weights and checkpoint.
        """

    def responses(self, finished: int, wanted: int) -> None:
        """So many responses of the rollout have finished."""

    def iterated(self, metrics: Mapping[str, Any]) -> None:
        """An iteration is over; these are its metrics."""


@attrs.frozen(eq=False)
class _Finished:
    """A response in the place where it was submitted, and its reward, which may not be there yet."""

    group: PromptGroup
    completion: Completion
    reward: Future[float]


@attrs.frozen(eq=False)
class _Judged:
    """A response and its reward, None if it failed."""

    group: PromptGroup
    completion: Completion
    reward: float | None


@attrs.frozen(eq=False)
class _Evaluation:
    """Responses to held-out prompts."""

    weight_version: int
    finished: list[_Finished]


@attrs.define(eq=False)
class Loop:
    """Trains for the iterations that are left, each a version of the weights."""

    table: TrainTable
    config: Config
    session: Session
    rewards: RewardPool
    trainer: Trainer
    prompts: Prompts
    way: Way
    metrics: LineFile
    checkpoints: Checkpoints
    watch: Watch
    trackers: Trackers
    held_out: Prompts | None = None
    _seconds: dict[str, float] = attrs.field(factory=dict, init=False)
    _writer: ThreadPoolExecutor = attrs.field(init=False)
    _saving: Future[None] | None = attrs.field(default=None, init=False)

    def run(self, begin: Checkpoint | None) -> None:
        """Train from a checkpoint, which the trainer has loaded, or from the first weights.

        Raises:
            SeerError: it cannot go on; the last checkpoint is whole.
        """
        done = 0
        if begin is not None:
            done = begin.state.iterations
            self.session.update_weights(begin.path, done)
        with ThreadPoolExecutor(1, "seer-checkpoint") as self._writer, self._trainer_watched():
            try:
                for iteration in range(done, self.table.iterations):
                    self._iterate(iteration)
                self._wait_for_checkpoint()
            except BaseException:
                self._tell_of_checkpoint()
                raise

    @contextmanager
    def _trainer_watched(self) -> Iterator[None]:
        """Stop the engines as soon as the trainer is lost: nobody would learn from what they go on with."""
        lost: list[TrainError] = []

        def stop(error: TrainError) -> None:
            lost.append(error)
            self.session.close()

        if isinstance(self.trainer, WatchedTrainer):
            self.trainer.when_lost(stop)
        try:
            yield
        except SeerError as error:
            if lost and not isinstance(error, TrainError):
                raise lost[0] from error
            raise

    def _iterate(self, iteration: int) -> None:
        self._seconds = {}
        version = self.session.weight_version
        last = iteration + 1 == self.table.iterations
        evaluations = []
        if iteration % self.table.evaluation.every == 0:
            evaluations += self._evaluate(iteration)
        with self._phase(iteration, "rollout"):
            finished = self._roll_out(self.prompts(iteration), iteration)
        _check_groups(finished)
        speeds = _speeds(self.session)
        self._wait_for_checkpoint()
        with self._engines_asleep(iteration):
            with self._phase(iteration, "rewards"):
                self._foresee(finished)
                judged = _judge(finished)
            kept = _with_rewards(judged, iteration)
            facts = _facts(judged)
            if not facts["mixed_groups"]:
                log.warning(
                    "no_advantage", iteration=iteration, reason="all rewards of each group are the same"
                )
            with self._phase(iteration, "training"):
                learnt = self.trainer.train(_samples(kept, scale=self.table.loss.scale))
        self._check(iteration, learnt)
        with self._phase(iteration, "weights"), self.way.offer() as weights:
            self.session.update_weights(weights, iteration + 1)
        if last:
            evaluations += self._evaluate(iteration)
        evaluated = [self._judge_evaluation(iteration, each) for each in evaluations]
        record = {
            "iteration": iteration,
            "weight_version": version,
            **facts,
            **learnt,
            "weights_sha256": self.way.digest(),
            "evaluations": evaluated,
            **speeds,
            **{f"{name}_s": round(seconds, 3) for name, seconds in self._seconds.items()},
        }
        self._write(record)
        self.trackers.iterated(record)
        if last or (iteration + 1) % self.table.save_every == 0:
            self.watch.phase(iteration, "checkpoint")
            self._saving = self._writer.submit(self._save, iteration + 1)
        self.watch.iterated(record)

    def _evaluate(self, iteration: int) -> list[_Evaluation]:
        """Roll held-out prompts out, if there are any, always with the same seeds.

        Their rewards are not waited for: the next rollout can begin while they are computed.
        """
        if self.held_out is None:
            return []
        # Ids of their own: a pool or a draft may know the text of an iteration's groups by theirs.
        records = [
            {**record, "group_id": f"held-out-{number}"} for number, record in enumerate(self.held_out(0))
        ]
        with self._phase(iteration, "evaluation"):
            return [_Evaluation(self.session.weight_version, self._roll_out(records, 0))]

    def _judge_evaluation(self, iteration: int, evaluation: _Evaluation) -> dict[str, Any]:
        """Return how weights do on held-out prompts, once all rewards are there."""
        with self._phase(iteration, "evaluation"):
            judged = _judge(evaluation.finished)
        rewards = [each.reward for each in _with_rewards(judged, iteration) if each.reward is not None]
        lengths = [len(each.completion.token_ids) for each in judged]
        return {
            "weight_version": evaluation.weight_version,
            "reward_mean": math.fsum(rewards) / len(rewards),
            "mean_tokens": sum(lengths) / len(lengths),
            **_failures(judged),
        }

    def _roll_out(self, prompts: Iterable[Mapping[str, Any]], seeds_of: int) -> list[_Finished]:
        """Return every response to prompts, in the order of their submission."""
        records = list(prompts)
        groups = self.session.runtime.groups(records, seeds_of)
        _check_sampling(groups)
        wanted = sum(group.n for group in groups)
        found: dict[tuple[str, int], tuple[Completion, Future[float]]] = {}
        for completion in self.session.stream(records, seeds_of, keep=False):
            response = Response(
                completion.metadata,
                completion.text,
                list(completion.token_ids),
                completion.finish_reason,
            )
            found[completion.group_id, completion.index] = completion, self._reward(completion, response)
            self.watch.responses(len(found), wanted)
        return [_Finished(group, *found[group.id, index]) for group in groups for index in range(group.n)]

    def _reward(self, completion: Completion, response: Response) -> Future[float]:
        if completion.finish_reason in WHOLE:
            return self.rewards.submit(response)
        none: Future[float] = Future()
        none.set_exception(RewardError(f"it ended with {completion.finish_reason!r}"))
        return none

    @contextmanager
    def _engines_asleep(self, iteration: int) -> Iterator[None]:
        """Give the trainer the engines' memory meanwhile, if it shares their devices."""
        if not self.table.colocated:
            yield
            return
        with self._phase(iteration, "sleep"):
            self.session.sleep()
        yield  # after an error nobody needs them
        give_back()
        with self._phase(iteration, "sleep"):
            self.session.wake()

    def _foresee(self, finished: Sequence[_Finished]) -> None:
        """Let the trainer begin with what needs no rewards, while the last ones are computed."""
        if isinstance(self.trainer, ForeseeingTrainer):
            self.trainer.foresee(
                [
                    Sample(
                        each.group.prompt_token_ids, each.completion.token_ids, each.completion.logprobs, 0.0
                    )
                    for each in finished
                    if each.completion.finish_reason in WHOLE
                ]
            )

    def _check(self, iteration: int, learnt: Mapping[str, float]) -> None:
        limit = self.table.max_dlogp
        if limit and learnt["dlogp_mean"] > limit:
            raise TrainError(
                f"in iteration {iteration} the engines' log-probs are {learnt['dlogp_mean']:.2g} nats from"
                f" the trainer's on average, more than [train].max_dlogp = {limit:g}: do the engines serve"
                " the trainer's weights, in which precision?"
            )

    def _save(self, iterations: int) -> None:
        state = state_of(iterations, self.table, self.config)

        def write(directory: Path) -> None:
            self.trainer.export(directory)
            self.trainer.save(directory)

        self.checkpoints.save(state, write)

    def _wait_for_checkpoint(self) -> None:
        """Let the last checkpoint be written: what it holds is about to change."""
        if self._saving is None:
            return
        began = time.monotonic()
        saving, self._saving = self._saving, None
        saving.result()
        self._seconds["checkpoint"] = time.monotonic() - began

    def _tell_of_checkpoint(self) -> None:
        """Say so if the last checkpoint could not be written either, when training ends by something else."""
        if self._saving is not None and (error := self._saving.exception()) is not None:
            log.error("checkpoint_failed", reason=str(error))

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self.metrics.write(msgspec.json.encode(record))
        except OSError as error:
            raise OutputError(f"cannot write {self.metrics.path}: {error.strerror}; make room") from error

    @contextmanager
    def _phase(self, iteration: int, name: str) -> Iterator[None]:
        self.watch.phase(iteration, name)
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


def _with_rewards(judged: Sequence[_Judged], iteration: int) -> list[_Judged]:
    kept = [each for each in judged if each.reward is not None]
    if not kept:
        raise TrainError(
            f"no response of iteration {iteration} has a reward: mend the reward function;"
            " what each failed of stands above"
        )
    return kept


def _check_sampling(groups: Sequence[PromptGroup]) -> None:
    for group in groups:
        sampling = group.sampling
        if (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, 0):
            raise TrainError(
                f"group {group.id!r} is sampled at temperature {sampling.temperature:g}, top_p"
                f" {sampling.top_p:g} and top_k {sampling.top_k}: the log-probs that are trained on are the"
                " model's own; sample at temperature 1, top_p 1 and top_k 0"
            )


def _check_groups(finished: Sequence[_Finished]) -> None:
    if all(each.group.n == 1 for each in finished):
        raise TrainError(
            "every group has one response, and nothing to compare it with: a response's advantage is over the"
            " others of its group; set [rollout].n, or a prompt's `n`, to 2 or more"
        )


def _judge(finished: Sequence[_Finished]) -> list[_Judged]:
    """Wait for all rewards, and tell of those that failed, once for each reason."""
    judged, failed = [], dict[str, list[str]]()
    for each in finished:
        reward = None
        try:
            reward = each.reward.result()
        except RewardError as error:
            failed.setdefault(str(error), []).append(each.completion.request_id)
        judged.append(_Judged(each.group, each.completion, reward))
    for reason, requests in failed.items():
        log.warning("reward_failed", responses=len(requests), first=requests[0], reason=reason)
    return judged


def _samples(judged: Sequence[_Judged], *, scale: bool) -> list[Sample]:
    """Return what to learn, with advantages within groups, to which failed rewards do not belong."""
    groups: dict[str, list[_Judged]] = {}
    for each in judged:
        groups.setdefault(each.group.id, []).append(each)
    return [
        Sample(each.group.prompt_token_ids, each.completion.token_ids, each.completion.logprobs, advantage)
        for members in groups.values()
        for each, advantage in zip(
            members,
            group_advantages([each.reward for each in members if each.reward is not None], scale=scale),
            strict=True,
        )
    ]


def _failures(judged: Sequence[_Judged]) -> dict[str, int]:
    """Count responses without a reward: those that an engine failed, and those whose reward failed."""
    without = [each.completion.finish_reason in WHOLE for each in judged if each.reward is None]
    return {"failed_responses": without.count(False), "failed_rewards": without.count(True)}


def _facts(judged: Sequence[_Judged]) -> dict[str, Any]:
    """Return what was rolled out, the same whatever scheduled it."""
    rewards = [each.reward for each in judged if each.reward is not None]
    lengths = [len(each.completion.token_ids) for each in judged]
    reasons = Counter(each.completion.finish_reason for each in judged)
    mixed: dict[str, set[float]] = {}
    for each in judged:
        if each.reward is not None:
            mixed.setdefault(each.group.id, set()).add(each.reward)
    return {
        "responses": len(judged),
        **_failures(judged),
        "reward_mean": math.fsum(rewards) / len(rewards),
        "mixed_groups": sum(len(values) > 1 for values in mixed.values()) / len(mixed),
        "tokens": sum(lengths),
        "mean_tokens": sum(lengths) / len(lengths),
        "max_tokens": max(lengths),
        "cut": reasons["length"] / len(judged),
        "rewards_sha256": _digest(each.reward for each in judged),
        "tokens_sha256": _digest([each.completion.request_id, *each.completion.token_ids] for each in judged),
        "engine_logprobs_sha256": _digest(list(each.completion.logprobs) for each in judged),
    }


def _speeds(session: Session) -> dict[str, Any]:
    """Return how the rollout went."""
    summary = session.result.summary
    return {
        "tokens_per_s": round(summary.throughput_tokens_per_s, 1),
        "tail_s": round(summary.tail_time_s, 3),
        "chunks": summary.chunks,
        "preemptions": summary.preemptions,
        "instances_lost": summary.instances_lost,
        "acceptance_length": round(summary.acceptance_length, 3),
    }


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(msgspec.json.encode(value) + b"\n")
    return digest.hexdigest()
