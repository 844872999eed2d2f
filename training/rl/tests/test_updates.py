"""The updates of an iteration: what is laid out, which log-probs are the old ones, and the metrics."""

import math

import pytest
import torch
from seer_rl.config import LossTable, TorchTable, TrainTable
from seer_rl.errors import TrainError
from seer_rl.trainer import Sample
from seer_rl.updates import PolicyUpdates, check_finite

SAMPLES = [
    Sample([1], [2, 3], [-1.0, -1.0], 1.0),
    Sample([1], [4, 5, 6], [-1.0] * 3, 0.0),
    Sample([1], [7], [-1.0], -2.0),
]


def table(**loss):
    return TrainTable("", "", torch=TorchTable(micro_tokens=3), loss=LossTable(**loss))


def no_reference(batches):
    raise AssertionError("no reference is computed without a penalty")


def test_samples_without_an_advantage_are_laid_out_only_with_a_penalty():
    def reference(batches):
        return [torch.zeros(len(batch.targets)) for batch in batches]

    assert len(PolicyUpdates.plan(table(), SAMPLES, no_reference).batches) == 2
    assert len(PolicyUpdates.plan(table(kl=0.1), SAMPLES, reference).batches) == 3
    assert PolicyUpdates.plan(table(), SAMPLES[1:2], no_reference) is None


def test_replicas_take_micro_batches_in_turn():
    whole = PolicyUpdates.plan(table(), SAMPLES, no_reference).batches
    parts = [PolicyUpdates.plan(table(), SAMPLES, no_reference, replica, 2).batches for replica in (0, 1)]
    assert [[batch.targets.tolist() for batch in part] for part in parts] == [
        [whole[0].targets.tolist()],
        [whole[1].targets.tolist()],
    ]


def test_the_log_probs_of_the_first_epoch_are_the_old_ones_of_the_next():
    updates = PolicyUpdates.plan(table(epochs=2, clip_high=0.1), SAMPLES, no_reference)
    seen = iter([[-1.0, -1.0], [0.0, -1.0]])

    def epoch():
        first = torch.tensor(next(seen))
        totals = [updates.loss(0, first)[1], updates.loss(1, torch.tensor([-1.0]))[1]]
        return [sum(column) for column in zip(*totals, strict=True)]

    metrics = updates.run(epoch, lambda loss: (2.0, 0.5))
    # Six tokens in all responses, three of them trained, one of those clipped at 1.1 in the second epoch.
    first, second = -(1 + 1 - 2) / 6, -(1.1 + 1 - 2) / 6
    assert metrics["loss"] == pytest.approx((first + second) / 2, abs=1e-7)
    assert (metrics["trained_tokens"], metrics["grad_norm"], metrics["learning_rate"]) == (3, 2.0, 0.5)
    assert (metrics["clipped"], metrics["kl"]) == (pytest.approx(1 / 6), 0.0)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (0.0, math.inf), (-math.inf, 1.0)])
def test_an_update_that_is_not_finite_is_refused(loss, norm):
    check_finite(0.0, 1.0)
    with pytest.raises(TrainError, match="the weights would be lost; lower the learning rate"):
        check_finite(loss, norm)
