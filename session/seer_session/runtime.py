"""The runtime: a driver for those who have prompts, as text or tokens, and environments that answer turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import attrs
import msgspec
import structlog
from seer_host.config_files import Config, RolloutTable, load_config
from seer_host.contract_checks import flaw_of
from seer_host.tables import SeerTable
from seer_host.text import text_before_stop
from seer_host.weight_copies import NO_COPY, WeightCopies

from seer_core.error_origin import shown
from seer_core.errors import ConfigError, InputError, PluginError
from seer_core.model import PromptGroup, Sampling, WrittenResponse
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.extension import MakeExtender
from seer_core.ports.kv import KVPool
from seer_core.ports.policy import Observer
from seer_core.runtime.driver import Driver
from seer_core.scheduling.scheduler import CORE, Slot
from seer_session.assembly import assemble, fill_slots
from seer_session.environment import Environment
from seer_session.environment_calls import EnvironmentCalls
from seer_session.factories import environment_of
from seer_session.group_checks import check_groups, undivided_attachments
from seer_session.guard import guarded_strategies
from seer_session.journal import Journal
from seer_session.prompts import check_record, make_groups
from seer_session.results import Tally
from seer_session.rollouts import Rollout

__all__ = ["Runtime"]

log = structlog.get_logger("seer")


class Runtime(Driver):
    """A fleet of engines, a scheduler and a clock; one rollout at a time, of a batch or open.

    Use as an async context manager: entering starts all engines in parallel, leaving stops them.
    """

    def __init__(
        self,
        assembly: Assembly,
        settings: SeerTable = SeerTable(),  # noqa: B008, immutable
        defaults: RolloutTable = RolloutTable(),  # noqa: B008, immutable
    ) -> None:
        self.settings = settings
        self.defaults = defaults
        self._undivided: set[str] = set()
        """The names of attachments under which responses are not divided, as far as prompts have had them."""
        super().__init__(
            attrs.evolve(assembly, strategies=self._checked(assembly.strategies)),
            settings.restarts,
            settings.max_chunk_failures,
            WeightCopies(settings.weights_dir),
            self._text_of_response,
            debug=settings.debug,
        )

    @classmethod
    def from_config(cls, config: Config | str | Path, observers: Iterable[Observer] = ()) -> Self:
        """Assemble a runtime from a configuration or its file, with more observers; nothing is started yet.

        Raises:
            ConfigError, PluginError: see ``load_config`` and ``assemble``.
        """
        config = config if isinstance(config, Config) else load_config(config)
        settings = config.seer
        if settings.weights_dir not in ("", NO_COPY):
            place = str(config.base_dir / settings.weights_dir)
            settings = msgspec.structs.replace(settings, weights_dir=place)
        return cls(assemble(config).with_observer(*observers), settings, config.rollout)

    def _checked(self, strategies: Strategies) -> Strategies:
        """Return strategies, guarded in ``debug``; raises PluginError for an observer that is none."""
        for slot in strategies.observers:
            if flaw := flaw_of(slot.strategy, Observer):
                raise PluginError(f"the observer {type(slot.strategy).__name__} is no Observer: {flaw}")
        return guarded_strategies(strategies) if self.settings.debug else strategies

    def _text_of_response(
        self, sampling: Sampling, prompt: Sequence[int], token_ids: Sequence[int], stopped: bool
    ) -> tuple[str | None, str | int | None]:
        decode = None if self.tokenizer is None else self.tokenizer.decode
        found = text_before_stop(decode, sampling, prompt, token_ids, stopped)
        return found.text, found.stop_reason

    @staticmethod
    def check_record(record: Mapping[str, Any]) -> None:
        """Check of one record for ``groups`` what needs neither model nor images: its fields.

        Raises:
            PromptError: it cannot be rolled out.
        """
        check_record(record)

    def groups(
        self, records: Iterable[Mapping[str, Any]], iteration: int | None = None, *, fitting: bool = False
    ) -> list[PromptGroup]:
        """Build prompt groups from mappings with the fields of a prompts file's lines.

        ``iteration`` enters the default seeds, so that the same prompts get other responses in the next one.
        Without one it is this runtime's ``iteration``; give one to resume a run or to repeat it.  Groups keep
        their seeds, so rolling out the same groups again gives the same responses.  But a prompt without an
        id gets another id, and so other responses, each time that it is built while one rollout is open.

        If groups are to be ``fitting``, the default ``max_tokens`` of ``[rollout]`` is lowered to what fits
        beside the prompt.

        Raises:
            PromptError: a record cannot be rolled out.
            ConfigError: the default ``max_tokens`` is beyond the model's length.
        """
        rollout, longest = self.current, self.model.max_model_tokens
        room = max((info.kv_capacity_tokens for info in self.alive.values()), default=longest)
        return make_groups(
            records,
            self.defaults,
            self.model,
            self.tokenizer,
            seed=self.settings.seed,
            iteration=self.iteration if iteration is None else iteration,
            named=rollout.named if rollout is not None and rollout.open else None,
            most_tokens=min(longest, room) if fitting else None,
        )

    async def renew_strategies(self, config: Config, observers: Sequence[Observer] = ()) -> None:
        """Use fresh strategies of its configuration; these observers see rollouts then.

        It is the remedy after a rollout that failed midway, which leaves strategies in an undefined state.
        Engines go on as they are, with their weights; but they start anew where the drafter fills another
        slot too.

        Raises:
            SeerError: something else is under way.
            ConfigError, PluginError: as when the runtime was made.
        """
        fresh = fill_slots(config).with_observer(*observers)
        shared = [slot for slot in fresh.slots if fresh.drafter and slot.strategy is fresh.drafter.strategy]
        if len(shared) < 2:
            # Engines start anew with another drafter, even an equal one.
            fresh = attrs.evolve(fresh, drafter=self.drafter)
        await self.use(fresh)

    async def use(
        self, strategies: Strategies, kv_pool: Slot[KVPool] | Literal["keep"] | None = "keep"
    ) -> None:
        """Use other strategies from now on, as ``Driver.use``."""
        await super().use(self._checked(strategies), kv_pool)

    @property
    def current(self) -> Rollout | None:
        """The rollout under way, if any."""
        return cast("Rollout | None", super().current)

    @property
    def environment(self) -> Slot[Environment] | None:
        """The environment that the configuration names, if any."""
        return environment_of(self._controller.strategies)

    def refuse_environment(self, user: str) -> None:
        """Raise ConfigError where an environment is configured for a ``user`` that reads no turns."""
        if self.environment is not None:
            name = self.environment.owner
            raise ConfigError(
                f"{user} takes no environment yet, and [seer].plugins names {name!r}; leave it out:"
                f" --set seer.slots.environment={CORE}, or take it out of the file"
            )

    def rollout(
        self,
        groups: Iterable[PromptGroup],
        *,
        keep: bool = True,
        journal: Journal | None = None,
        make_extender: MakeExtender | None = None,
        environment: Environment | None = None,
    ) -> Rollout:
        """Begin to roll out a batch: ``open``, ``add`` and ``close`` in one; raises as they do."""
        rollout = self.open(keep=keep, journal=journal, make_extender=make_extender, environment=environment)
        try:
            rollout.add(groups)
        finally:
            rollout.close()
        return rollout

    def open(  # type: ignore[override]
        self,
        *,
        keep: bool = True,
        most_requests: int | None = None,
        journal: Journal | None = None,
        make_extender: MakeExtender | None = None,
        environment: Environment | None = None,
    ) -> Rollout:
        """Begin a rollout that takes groups until it is closed, as ``Driver.open``.

        Without ``keep``, its result holds only completions that have not been read.  Tokens that a
        ``journal`` has of an added group are not computed again, and those that are computed go there.  An
        ``environment`` answers the turns of all responses, in place of the one that the configuration names,
        if any.  Its ``start`` and ``stop`` are the caller's.

        Raises:
            SeerError: something else is under way, the instances sleep, or the last rollout failed midway.
            InputError: the journal or the environment is none.
        """
        _require("environment", environment, Environment, "an object with a method step")
        _require("journal", journal, Journal, "one of seer-journal, such as DiskJournal('out/journal')")
        made = self._extender_of(make_extender, environment)
        tally = Tally(
            self.clock.now(),
            self._fleet.reports,
            self._fleet.degradations,
            len(self._fleet.failed),
            self.alive.values(),
        )
        rollout = super().open(
            most_requests=most_requests,
            make_extender=made,
            make_rollout=partial(
                Rollout,
                begin=partial(self._begin, journal),
                is_whole=self._is_whole,
                tally=tally,
                journal=journal,
                keep=keep,
            ),
        )
        return cast("Rollout", rollout)

    def _begin(
        self, journal: Journal | None, groups: Sequence[PromptGroup]
    ) -> Sequence[Sequence[WrittenResponse]]:
        """Refuse groups that do not fit; return what an earlier process has written of the others."""
        check_groups(groups, self.model, self.alive.values())
        if journal is None:
            return [()] * len(groups)
        weights, digest = self._fleet.weights, self.model.digest
        version = weights.current.version
        first = {"model": digest} if digest and not version else {}
        return journal.begin(groups, version, weights.fingerprints | first, self._fleet.end_token_ids)

    def _is_whole(self, group: PromptGroup) -> bool:
        """Return whether a group's responses are not divided; names of attachments are logged once each."""
        names = undivided_attachments(group.attachments, self.model) if group.attachments else []
        if new := [name for name in names if name not in self._undivided]:
            self._undivided.update(new)
            log.warning("responses_not_divided", attachments=new)
        return bool(names) or not set(self.model.whole_controls).isdisjoint(group.sampling.controls)

    def _extender_of(
        self, make_extender: MakeExtender | None, environment: Environment | None
    ) -> MakeExtender | None:
        """Return what makes the extender of a rollout: the caller's own, or that of an environment."""
        if make_extender is not None:
            return make_extender
        if environment is None and self.environment is not None:
            environment = self.environment.strategy
        if environment is None:
            return None
        return partial(
            EnvironmentCalls,
            environment,
            self.settings.turns,
            self.clock,
            self.model,
            self.tokenizer,
            image_roots=self.defaults.image_roots,
        )


def _require(name: str, given: object, protocol: type, remedy: str) -> None:
    """Raise InputError if something is given that lacks what the runtime will call."""
    if given is not None and (flaw := flaw_of(given, protocol)):
        raise InputError(f"{name} is {shown(given)}, which is no {protocol.__name__}: {flaw}; give {remedy}")
