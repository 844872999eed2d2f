"""The weights that a fleet serves: the current version, the instances that have loaded it, fingerprints."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog
from msgspec import structs

from seer_core.errors import EngineError, OtherWeightsError, WeightVersionError
from seer_core.ports.engine import InstanceClient
from seer_core.ports.weights import FIRST_WEIGHTS, OWNER, WeightSpec, WeightStore

__all__ = ["WeightVersions"]

log = structlog.get_logger("seer")


class WeightVersions:
    """Brings engines to the ``current`` weights, which instances load when they start."""

    def __init__(self, store: WeightStore) -> None:
        self.current = FIRST_WEIGHTS
        self._store = store
        self._loaded: dict[str, int] = {}
        self._fingerprints: dict[tuple[int, str], str] = {}
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def changing(self) -> bool:
        """Whether weights are being updated."""
        return not self._settled.is_set()

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the current weights, by the recipe they were made by."""
        version = self.current.version
        return {recipe: each for (known, recipe), each in self._fingerprints.items() if known == version}

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold back the weights of instances that start meanwhile."""
        self._settled.clear()
        try:
            yield
        finally:
            self._settled.set()

    def next(self, version: int | None) -> int:
        """Return the version of an update: the given one, or the next.

        Raises:
            WeightVersionError: it is no higher than the current one, so KV and tokens of both would mix.
        """
        current = self.current.version
        if version is None:
            return current + 1
        if version <= current:
            raise WeightVersionError(
                f"cannot update weights to version {version}: version {current} is loaded, and versions must"
                " increase; give a higher one, such as the number of the training step"
            )
        return version

    async def update(
        self, source: WeightSpec, version: int, engines: Mapping[str, InstanceClient]
    ) -> dict[str, str]:
        """Make ``source`` the current weights; return the reasons of instances that do not serve them, by id.

        Raises:
            EngineError: the weights could not be kept, or no engine could load them; the old ones stay.
        """
        if not engines:
            raise EngineError(f"no instance could load the weights in {str(source)!r}: none is alive")
        old = self.current
        new = await asyncio.to_thread(self._store.keep, source, version)
        if new.kept.adapter_config is not None:
            whole = old if old.kept.adapter_config is None else old.base
            new = structs.replace(new, base=None if whole == FIRST_WEIGHTS else whole)
        answers = await asyncio.gather(
            *(engine.update_weights(new.kept, version) for engine in engines.values()), return_exceptions=True
        )
        fingerprints: dict[str, str] = {}
        refused: dict[str, str] = {}
        for name, answer in zip(engines, answers, strict=True):
            if isinstance(answer, BaseException):
                refused[name] = str(answer)
            elif answer is not None:
                fingerprints[name] = answer
        if len(refused) == len(engines):
            await asyncio.to_thread(self._store.drop, version)
            fact = next(iter(refused.values()))
            raise EngineError(f"no instance could load the weights in {str(source)!r}: {fact}")
        if fingerprints:
            rarest_first = reversed(Counter(fingerprints.values()).most_common())
            self._fingerprints = {(version, _recipe(each)): each for each, _ in rarest_first}
            for name, fingerprint in fingerprints.items():
                if fingerprint != (usual := self._fingerprints[version, _recipe(fingerprint)]):
                    refused[name] = f"their fingerprint is {fingerprint} there, not {usual} as elsewhere"
        self.current = new
        self._loaded |= {name: version for name in engines if name not in refused}
        for each in (old, old.base):
            if each not in (None, new.base):
                await asyncio.to_thread(self._store.drop, each.version)
        facts = {"digest": new.digest} if new.digest else {"fingerprints": sorted(self.fingerprints.values())}
        log.info("weights_updated", version=version, **facts)
        return refused

    async def load_current(self, engine: InstanceClient, fingerprint: str | None) -> None:
        """Bring an engine that has just started to the current weights, and compare its fingerprint.

        Raises:
            OtherWeightsError: it serves others than the owner of the servers has loaded into the others.
            EngineError: it cannot load them, they have changed, or it serves other weights.
        """
        version = FIRST_WEIGHTS.version
        while True:
            await self._settled.wait()
            weights = self.current
            if weights.version == version:
                break
            version = weights.version
            try:
                for each in filter(None, (weights.base, weights)):
                    if each.digest:
                        await asyncio.to_thread(self._store.check, each)
                    fingerprint = await engine.update_weights(each.kept, each.version)
            except EngineError:
                await self._settled.wait()
                if self.current.version == version:
                    raise
                # An update has dropped them meanwhile: the new ones are next.
        key = version, _recipe(fingerprint or "")
        if fingerprint and (known := self._fingerprints.setdefault(key, fingerprint)) != fingerprint:
            flaw = (
                f"instance {engine.id!r} came up with other weights than version {version} of the others:"
                f" their fingerprint is {fingerprint}, not {known};"
            )
            if weights.kept.path == OWNER:
                raise OtherWeightsError(f"{flaw} load those there, too")
            first = version == FIRST_WEIGHTS.version
            raise EngineError(flaw + (" has the model's directory changed?" if first else " report this"))
        self._loaded[engine.id] = version

    def served_by(self, name: str) -> bool:
        """Return whether an instance has loaded the current weights."""
        return self._loaded.get(name, FIRST_WEIGHTS.version) == self.current.version

    def forget(self, name: str) -> None:
        """Drop an instance."""
        self._loaded.pop(name, None)

    async def close(self) -> None:
        """Delete the copies; the next start loads the current weights from the user's source."""
        self.current = await asyncio.to_thread(self._store.close, self.current)


def _recipe(fingerprint: str) -> str:
    """Return the recipe of a fingerprint; those of different recipes cannot be compared."""
    recipe, colon, _ = fingerprint.rpartition(":")
    return recipe if colon else ""
