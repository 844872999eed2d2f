"""The training loop, strictly synchronous: rollout with rewards meanwhile, training, new weights, again.

However the responses finish, and if engines are lost meanwhile, the trainer gets them in the
order of their submission.  So two runs that differ in how they schedule have the same losses and weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import structlog
from seer_session import Session

from seer_core.errors import SeerError
from seer_core.ports.contracts import implemented
from seer_rl.checkpoints import Checkpoint, CheckpointWriter
from seer_rl.config import TrainTable
from seer_rl.errors import TrainError
from seer_rl.evaluation import Evaluation
from seer_rl.journals import RolloutJournals
from seer_rl.memory import return_freed_memory
from seer_rl.metrics import MetricsLog
from seer_rl.phases import Phases
from seer_rl.prompts import Prompts
from seer_rl.rewarded_rollout import RewardedRollout
from seer_rl.scoring import FinishedResponse, rollout_facts, samples, score, scored_only
from seer_rl.trainer import Trainer, checked_metrics
from seer_rl.weight_transport import WeightTransport

__all__ = ["TrainingLoop"]

log = structlog.get_logger("seer")


@attrs.frozen(eq=False)
class TrainingLoop:
    """Trains for the iterations that are left, each of which makes a version of the weights."""

    table: TrainTable
    session: Session
    trainer: Trainer
    prompts: Prompts
    rollout: RewardedRollout
    journals: RolloutJournals
    evaluation: Evaluation
    transport: WeightTransport
    checkpoints: CheckpointWriter
    metrics: MetricsLog
    phases: Phases
    experts_per_token: int | None

    def run(self, start: Checkpoint | None) -> None:
        """Train from a checkpoint, which the trainer has loaded, or from the first weights.

        Raises:
            SeerError: training cannot go on; the last checkpoint is whole.
        """
        done = 0
        if start is not None:
            done = start.state.iterations
            self.session.update_weights(start.path, done)
        with self.checkpoints, self._engines_stopped_with_the_trainer():
            for iteration in range(done, self.table.iterations):
                self._iterate(iteration)
            self._wait_for_checkpoint()

    def _iterate(self, iteration: int) -> None:
        self.phases.start(iteration)
        version = self.session.weight_version
        last = iteration + 1 == self.table.iterations
        if iteration % self.table.evaluation.every == 0:
            self.evaluation.roll_out(iteration)
        with self.phases.phase("rollout"), self.journals.open(iteration) as journal:
            finished = self.rollout.run(self.prompts(iteration), iteration, journal)
        _check_groups(finished)
        speeds = self.rollout.speeds()
        self._wait_for_checkpoint()
        with self._engines_asleep():
            with self.phases.phase("rewards"):
                self._precompute_reference(finished)
                scored = score(finished)
            kept = scored_only(scored, iteration)
            facts = rollout_facts(scored)
            if not facts["mixed_groups"]:
                log.warning(
                    "no_advantage", iteration=iteration, reason="all rewards of each group are the same"
                )
            with self.phases.phase("training"):
                batch = samples(
                    kept,
                    scale=self.table.loss.scale,
                    replay_routing=self.table.replay_routing,
                    experts_per_token=self.experts_per_token,
                )
                trained = checked_metrics(self.trainer.train(batch))
        self._check_logprobs(iteration, trained, speeds["quantization"])
        with self.phases.phase("weights"), self.transport.publish() as weights:
            self.session.update_weights(weights, iteration + 1)
        if last:
            self.evaluation.roll_out(iteration)
        evaluations = self.evaluation.results(iteration)
        record = {
            "iteration": iteration,
            "weight_version": version,
            **facts,
            **trained,
            "weights_sha256": self.transport.digest(),
            "evaluations": evaluations,
            **speeds,
            **self.phases.seconds(),
        }
        self.metrics.write(record)
        if last or (iteration + 1) % self.table.save_every == 0:
            self.phases.announce("checkpoint")
            self.checkpoints.begin(iteration + 1)
        self.phases.listener.iterated(record)

    @contextmanager
    def _engines_stopped_with_the_trainer(self) -> Iterator[None]:
        """Stop the engines as soon as the trainer is lost: nothing would be trained on what they write."""
        lost: list[TrainError] = []

        def stop(error: TrainError) -> None:
            lost.append(error)
            self.session.close()

        if when_lost := implemented(self.trainer, "when_lost"):
            when_lost(stop)
        try:
            yield
        except SeerError as error:
            if lost and not isinstance(error, TrainError):
                raise lost[0] from error
            raise

    @contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Give the trainer the engines' memory meanwhile, if it shares their devices."""
        if not self.table.colocated:
            yield
            return
        with self.phases.phase("sleep"):
            self.session.sleep()
        yield  # after an error the run ends, and engines are not woken
        return_freed_memory()
        with self.phases.phase("sleep"):
            self.session.wake()

    def _precompute_reference(self, finished: Sequence[FinishedResponse]) -> None:
        """Use the time in which the last rewards are computed."""
        precompute = implemented(self.trainer, "precompute_reference")
        if precompute is None:
            return
        precompute([each.unscored() for each in finished if each.completion.whole])

    def _check_logprobs(
        self, iteration: int, trained: Mapping[str, float], quantization: Sequence[str]
    ) -> None:
        limit = self.table.max_dlogp
        if limit and trained["dlogp_mean"] > limit:
            question = "do the engines serve the trainer's weights, in which precision?"
            if quantization:
                question = f"they are those of weights quantised by {', '.join(quantization)}; raise it"
            raise TrainError(
                f"in iteration {iteration} the engines' log-probs are {trained['dlogp_mean']:.2g} nats from"
                f" the trainer's on average, more than [train].max_dlogp = {limit:g}: {question}"
            )

    def _wait_for_checkpoint(self) -> None:
        """Wait before the trainer changes what the checkpoint is to hold."""
        if self.checkpoints.busy:
            with self.phases.measure("checkpoint"):
                self.checkpoints.wait()


def _check_groups(finished: Sequence[FinishedResponse]) -> None:
    if all(each.group.n == 1 for each in finished):
        raise TrainError(
            "every group has one response, and nothing to compare it with: a response's advantage is over the"
            " others of its group; set [rollout].n, or a prompt's `n`, to 2 or more"
        )
