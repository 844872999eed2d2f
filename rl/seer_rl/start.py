"""A run of training: everything that it needs, started in order and ended in order."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from seer_core import Config, Session
from seer_core.errors import ConfigError, OutputError, SeerError, quote
from seer_rl.checkpoints import Checkpoint, Checkpoints, State, state_of
from seer_rl.config import TrainTable, first_model
from seer_rl.fit import check_fit
from seer_rl.loop import Loop, Watch
from seer_rl.metrics import METRICS, metrics_file, records
from seer_rl.prompts import prompts_of
from seer_rl.references import resolve
from seer_rl.rewards import RewardPool
from seer_rl.trackers import tracking
from seer_rl.trainer import Trainer
from seer_rl.weights import way_of

__all__ = ["train"]

PLOT = "training.png"

log = structlog.get_logger("seer")

TRAINERS = {
    "torch": "seer_rl.torch_trainer:TorchTrainer",
    "megatron": "seer_rl.megatron:MegatronTrainer",
}

MAY_CHANGE = (
    "iterations",
    "colocated",
    "evaluation",
    "save_every",
    "keep",
    "rewards",
    "max_dlogp",
    "tracking",
    "weights",
)
"""Of ``[train]``, between a checkpoint and going on from it: what losses do not depend on."""


def train(table: TrainTable, config: Config, out: Path, watch: Watch, *, resume: bool = False) -> Path | None:
    """Train as configured, into a directory; return its last checkpoint, None if nothing was left to do.

    With ``resume`` go on from the last checkpoint in ``out``, or begin if there is none.

    Raises:
        SeerError: it cannot begin, or not go on.
    """
    with _claimed(out):
        return _train(table, config, out, watch, resume)


def _train(table: TrainTable, config: Config, out: Path, watch: Watch, resume: bool) -> Path | None:
    checkpoints = Checkpoints(out / "checkpoints", table.keep)
    begin = _beginning(checkpoints, table, config, out, resume)
    done = 0 if begin is None else begin.state.iterations
    if done >= table.iterations:
        _plot(out)
        return None
    base_dir, seed, evaluation = config.base_dir, config.seer.seed, table.evaluation
    prompts = prompts_of("[train].prompts", table.prompts, base_dir, table.groups, seed)
    held_out = evaluation.prompts and prompts_of(
        "[train.evaluation].prompts", evaluation.prompts, base_dir, evaluation.groups, seed
    )
    with ExitStack() as stack:
        pool = RewardPool(table.reward, config.base_dir, table.rewards.workers, table.rewards.timeout_s)
        rewards = stack.enter_context(pool)
        session = Session(config)
        trainer = _make_trainer(table, config)
        check_fit(table, config, trainer.vocab_size, session.runtime.fleet.model.vocab_size)
        if isinstance(trainer, AbstractContextManager):
            stack.enter_context(trainer)
        if begin is not None:
            trainer.load(begin.path)
        stack.callback(_plot, out)
        metrics = stack.enter_context(metrics_file(out, done))
        trackers = stack.enter_context(tracking(table, out, records(out)))
        way = stack.enter_context(way_of(table, trainer, out))
        stack.enter_context(session)
        loop = Loop(
            table,
            config,
            session,
            rewards,
            trainer,
            prompts,
            way,
            metrics,
            checkpoints,
            watch,
            trackers,
            held_out or None,
        )
        loop.run(begin)
    latest = checkpoints.latest()
    assert latest is not None
    return latest.path


def _beginning(
    checkpoints: Checkpoints, table: TrainTable, config: Config, out: Path, resume: bool
) -> Checkpoint | None:
    if not resume:
        if (out / METRICS).exists() or checkpoints.latest() is not None:
            raise OutputError(
                f"{out} holds a training run already; go on with it with --resume, or name another directory"
            )
        return None
    begin = checkpoints.latest()
    if begin is None:
        return None
    before, now = _settings(begin.state), _settings(state_of(begin.state.iterations, table, config))
    changed = [key for key in now if now[key] != before[key]]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} changed since {begin.path} was written: training would go on as another"
            " run; restore it, or begin anew in another directory"
        )
    return begin


def _settings(state: State) -> dict[str, Any]:
    """Return what losses depend on, under the names that it has in a config."""
    table = msgspec.to_builtins(state.train)
    return {
        **{f"[train].{key}": value for key, value in table.items() if key not in (*MAY_CHANGE, "model")},
        "[train].model": state.model,  # the directory, whichever table names it
        **{f"[rollout].{key}": value for key, value in msgspec.to_builtins(state.rollout).items()},
        "[seer].seed": state.seed,
    }


def _make_trainer(table: TrainTable, config: Config) -> Trainer:
    model = first_model(table, config)
    if not model.is_dir():
        raise ConfigError(f"the trainer's model, {model}, is no directory; mend [train].model")
    if table.trainer not in TRAINERS and ":" not in table.trainer:
        raise ConfigError(
            f"[train].trainer: {quote(table.trainer)} is none; use {' or '.join(map(quote, TRAINERS))},"
            " or name one of your own as FILE.py:CLASS"
        )
    make = resolve("[train].trainer", TRAINERS.get(table.trainer, table.trainer), config.base_dir)
    try:
        trainer = make(table, model, config.seer.seed)
    except SeerError:
        raise
    except Exception as error:
        raise ConfigError(
            f"[train].trainer: {quote(table.trainer)} raised {type(error).__name__}: {error}; it is called"
            " with the table, the directory of the first weights and the seed"
        ) from error
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"[train].trainer: {quote(table.trainer)} made a {type(trainer).__name__}, which is no trainer:"
            " see seer_rl.trainer.Trainer for the methods that it must have"
        )
    return trainer


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Make a directory, and keep other runs out of it, until this one ends in whatever way."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        claim = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"cannot write to {out}: {error.strerror}; name another directory") from error
    try:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another run is training into {out}; let it end first, or name another directory"
            ) from error
        except OSError as error:
            log.warning("not_locked", reason=f"{out} cannot be locked: {error.strerror}; start no second run")
        yield
    finally:
        os.close(claim)


def _plot(out: Path) -> None:
    """Draw what there is; a plot that fails is no reason to fail."""
    try:
        from seer_rl.plots import draw

        if found := records(out):
            draw(out / PLOT, found)
    except ImportError as error:
        log.warning("no_plot", reason=f"{error}; install matplotlib: pip install 'seer-rl[plot]'")
    except Exception as error:
        log.warning("no_plot", reason=str(error))
