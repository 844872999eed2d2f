"""A training run: what is checked and started before the first rollout, and ended after the last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import structlog
from seer_cli.status import StatusFile
from seer_cli.watching import WatchedSession
from seer_host.contract_checks import flaw_of
from seer_host.installation import how_to_install
from seer_host.line_files import claim
from seer_session import Config, Session

from seer_core.error_origin import describe_error, fact_of, is_ctrl_c, is_sentence
from seer_core.errors import SHOWN, ConfigError, OutputError, SeerError, printable, quote
from seer_core.ports.policy import Observer
from seer_rl.checkpoints import Checkpoint, Checkpoints, CheckpointWriter, TrainingState, state_of
from seer_rl.config import TrainTable, first_model
from seer_rl.environments import TrainingEnvironment
from seer_rl.evaluation import Evaluation
from seer_rl.journals import RolloutJournals
from seer_rl.loop import TrainingLoop
from seer_rl.metrics import METRICS, MetricsLog, metrics_file, records
from seer_rl.model_fit import check_model_fit, experts_per_token
from seer_rl.phases import Phases, ProgressListener
from seer_rl.prompts import prompts_of
from seer_rl.references import resolve
from seer_rl.rewarded_rollout import RewardedRollout
from seer_rl.rewards import RewardPool
from seer_rl.trackers import tracking
from seer_rl.trainer import Trainer
from seer_rl.weight_transport import open_transport

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
    "journal",
    "evaluation",
    "save_every",
    "keep",
    "rewards",
    "max_dlogp",
    "tracking",
    "weights",
)
"""Keys of ``[train]`` that losses do not depend on: a run that is resumed may have other values.

So may ``[train.megatron].timeout_s``.
"""


def train(
    table: TrainTable,
    config: Config,
    out: Path,
    listener: ProgressListener,
    observers: Sequence[Observer] = (),
    *,
    resume: bool = False,
    report: Path | None = None,
    dashboard: int | None = None,
) -> Path | None:
    """Train as configured, into a directory; return its last checkpoint, None if nothing was left to do.

    ``observers`` see all rollouts; ``report`` and ``dashboard`` are those of ``WatchedSession``.  With
    ``resume`` go on from the last checkpoint in ``out``, or begin if there is none.

    Raises:
        SeerError: the run cannot begin, or cannot go on.
    """
    with ExitStack() as stack:
        stack.enter_context(_claimed(out))
        checkpoints = Checkpoints(out / "checkpoints", table.keep)
        start = _start(checkpoints, table, config, out, resume)
        # What is refused so far leaves the status of the run before.
        listener = stack.enter_context(_reporting(out, table, listener))
        journals = RolloutJournals(out / "journal", table.journal)
        if start is not None:
            journals.drop(start.state.iterations)  # which a killed process may have left
        if start is not None and start.state.iterations >= table.iterations:
            _plot(out)
            return None
        session = WatchedSession(config, observers, name=out.name, report=report, dashboard=dashboard)
        _train(table, config, out, listener, session, checkpoints, journals, start)
        return checkpoints.latest_path


def _train(
    table: TrainTable,
    config: Config,
    out: Path,
    listener: ProgressListener,
    session: Session,
    checkpoints: Checkpoints,
    journals: RolloutJournals,
    start: Checkpoint | None,
) -> None:
    """Start what the loop needs, in order, run it, and end all of it in the opposite order."""
    base_dir, seed, held_out = config.base_dir, config.seer.seed, table.evaluation
    prompts = prompts_of("[train].prompts", table.prompts, base_dir, table.groups, seed)
    held_out_prompts = held_out.prompts and prompts_of(
        "[train.evaluation].prompts", held_out.prompts, base_dir, held_out.groups, seed
    )
    with ExitStack() as stack:
        rewards = None
        if table.reward:
            pool = RewardPool(table.reward, base_dir, table.rewards.workers, table.rewards.timeout_s)
            rewards = stack.enter_context(pool)
        environment = TrainingEnvironment.of(table, config, session)
        if start is not None and start.state.environment != environment.plugin:
            raise _changed(["the environment of [seer].plugins"], start)
        trainer = _make_trainer(table, config)
        check_model_fit(table, config, trainer.vocab_size, session.runtime.model.vocab_size)
        if isinstance(trainer, AbstractContextManager):
            stack.enter_context(trainer)
        if start is not None:
            with checkpoints.loading(start):
                trainer.load(start.path)
        stack.callback(_plot, out)
        file = stack.enter_context(metrics_file(out, 0 if start is None else start.state.iterations))
        trackers = stack.enter_context(tracking(table, out, records(out)))
        transport = stack.enter_context(open_transport(table, trainer, out))
        stack.enter_context(session)
        stack.enter_context(environment.opened(session))
        phases = Phases(listener)
        rollout = RewardedRollout(
            session, rewards, listener, environment.own, getattr(trainer, "takes_images", False)
        )
        TrainingLoop(
            table=table,
            session=session,
            trainer=trainer,
            prompts=prompts,
            rollout=rollout,
            journals=journals,
            evaluation=Evaluation(held_out_prompts or None, rollout, journals, phases),
            transport=transport,
            checkpoints=CheckpointWriter(checkpoints, trainer, table, config, journals, environment.plugin),
            metrics=MetricsLog(file, trackers),
            phases=phases,
            experts_per_token=experts_per_token(table, config) if table.replay_routing else None,
        ).run(start)


def _start(
    checkpoints: Checkpoints, table: TrainTable, config: Config, out: Path, resume: bool
) -> Checkpoint | None:
    if not resume:
        if (out / METRICS).exists() or checkpoints.latest_path is not None:
            raise OutputError(
                f"{out} holds a training run already; go on with it with --resume, or name another directory"
            )
        return None
    latest = checkpoints.latest()
    if latest is None:
        _check_lost(out, table.save_every)
        return None
    state = state_of(latest.state.iterations, table, config, latest.state.environment)
    before, now = _settings(latest.state), _settings(state)
    changed = [key for key in now if now[key] != before[key]]
    if changed:
        raise _changed(changed, latest)
    return latest


def _check_lost(out: Path, save_every: int) -> None:
    """Refuse to begin anew where a checkpoint has been; an iteration begins once the last one is written."""
    done = len(records(out))
    if done > save_every:
        raise OutputError(
            f"{out / METRICS} has {done} iterations, and {out / 'checkpoints'} no checkpoint to go on from:"
            f" restore them, or move {METRICS} away to begin anew"
        )
    if done:
        log.warning("training_begins_anew", reason=f"iterations done without a checkpoint: {done}")


def _changed(names: Sequence[str], latest: Checkpoint) -> ConfigError:
    return ConfigError(
        f"{', '.join(names)} changed since {latest.path} was written: training would go on as another run;"
        " restore it, or begin anew in another directory"
    )


def _settings(state: TrainingState) -> dict[str, Any]:
    """Return the settings that losses depend on, by their names in a config."""
    table = msgspec.to_builtins(state.train)
    del table["megatron"]["timeout_s"]
    return {
        **{f"[train].{key}": value for key, value in table.items() if key not in (*MAY_CHANGE, "model")},
        "[train].model": state.model,  # the directory, whichever table names it
        **{f"[rollout].{key}": value for key, value in msgspec.to_builtins(state.rollout).items()},
        "[seer].seed": state.seed,
    }


def _make_trainer(table: TrainTable, config: Config) -> Trainer:
    model = first_model(table, config)
    if not os.path.isdir(model):  # ``Path.is_dir`` raises for a name that is too long
        raise ConfigError(
            f"the trainer's model, {printable(str(model), SHOWN)}, is no directory; mend [train].model"
        )
    if table.trainer not in TRAINERS and ":" not in table.trainer:
        raise ConfigError(
            f"[train].trainer: {quote(table.trainer)} is none; use {' or '.join(map(quote, TRAINERS))},"
            " or name one of your own as FILE.py:CLASS"
        )
    if table.lora.rank and table.trainer == "megatron":
        raise ConfigError(
            'the trainer "megatron" trains all weights: take [train.lora].rank out, or use trainer = "torch"'
        )
    make = resolve("[train].trainer", TRAINERS.get(table.trainer, table.trainer), config.base_dir)
    try:
        trainer: Trainer = make(table, model, config.seer.seed)
    except SeerError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        place = str(getattr(make, "__module__", ""))
        raise ConfigError(
            f"[train].trainer: {quote(table.trainer)} raised {describe_error(error, place)}; it is called"
            " with the table, the directory of the first weights and the seed"
        ) from error
    if flaw := flaw_of(trainer, Trainer):
        raise ConfigError(
            f"[train].trainer: {quote(table.trainer)} made a {type(trainer).__name__}, which is no trainer:"
            f" {flaw}; see seer_rl.trainer.Trainer"
        )
    return trainer


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Make a directory, and keep other runs out of it until the ``with`` block ends."""
    with ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(claim(out, f"another run is training into {out}"))
        except OSError as error:
            raise OutputError(f"cannot write to {out}: {error.strerror}; name another directory") from error
        yield


@contextmanager
def _reporting(out: Path, table: TrainTable, listener: ProgressListener) -> Iterator[ProgressListener]:
    """Keep ``status.json`` for ``seer status`` while a run goes on, beside what the listener shows.

    It stays where training fails or is interrupted, with the reason.
    """
    file = StatusFile(out)
    file.enter("starting")
    try:
        yield _StatusListener(file, table.iterations, listener)
    except BaseException as error:
        if is_ctrl_c(error):
            file.end("interrupted")
        else:
            file.end("failed", _reason(error))
        raise
    file.remove()


@attrs.frozen
class _StatusListener:
    """Writes the status of a run, and passes its progress on."""

    file: StatusFile
    iterations: int
    listener: ProgressListener

    def phase(self, iteration: int, name: str) -> None:
        self.file.enter(f"in the phase {name} of iteration {iteration + 1} of {self.iterations}")
        self.listener.phase(iteration, name)

    def responses(self, finished: int, wanted: int) -> None:
        self.file.progress(f"{finished} of {wanted} responses")
        self.listener.responses(finished, wanted)

    def iterated(self, metrics: Mapping[str, Any]) -> None:
        self.listener.iterated(metrics)


def _plot(out: Path) -> None:
    """Draw the metrics that there are; a failure is logged and ends nothing."""
    try:
        from seer_rl.plots import draw

        if found := records(out):
            draw(out / PLOT, found)
    except ImportError as error:
        log.warning("no_plot", reason=f"{error}; {how_to_install('train', '`make setup`')}")
    except Exception as error:
        log.warning("no_plot", reason=_reason(error))


def _reason(error: BaseException) -> str:
    """Return the text of an error of Seer's, and of another its type as well."""
    return str(error) if is_sentence(error) else fact_of(error)
