"""Has a model's tokenizer read in a process of its engine's environment, where transformers is."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import attrs
import structlog
from seer_host.frames import WireError

from seer_core.errors import ConfigError, EngineError
from seer_worker.client.digest import digest_of
from seer_worker.client.local import LocalLauncher
from seer_worker.client.process_client import Launch
from seer_worker.tokenizer.library import read
from seer_worker.tokenizer.reading import TokenizerReading
from seer_worker.wire import ReadTokenizer, TokenizerRead

__all__ = ["TokenizerReader"]

log = structlog.get_logger("seer")

GRACE_S = 2.0
"""How long the process may take to end by itself."""

_read: dict[tuple[str, ...], TokenizerReading] = {}
"""What this process has read already."""
_lock = Lock()


@attrs.frozen
class TokenizerReader:
    """Reads the tokenizer of ``model_dir``, once in this process as long as its files stay the same.

    An engine that is forked has transformers in its fork server, which takes a fraction of a second.  Where
    transformers is imported here already, nothing is started.

    Args:
        launch: how workers of the engine are started; where these run on other machines, a process of this
            one's interpreter reads the tokenizer here.
        model_dir: the directory.
        trust_remote_code: whether the tokenizer may run code of it.
        textual: whether the tokenizer is read, and not the end tokens alone.
    """

    launch: Launch
    model_dir: Path
    trust_remote_code: bool = False
    textual: bool = True

    def __call__(self) -> TokenizerReading:
        """Return the reading.

        Raises:
            ConfigError: a file is damaged, or transformers cannot read it, or is nowhere.
        """
        with _lock:
            key = (
                str(self.model_dir),
                digest_of(self.model_dir),
                *map(str, (self._interpreter, *self._wanted)),
            )
            if key not in _read:
                _read[key] = self._read()
                self._log(_read[key])
            return _read[key]

    @property
    def _local(self) -> LocalLauncher | None:
        launcher = self.launch.launcher
        return launcher if isinstance(launcher, LocalLauncher) else None

    @property
    def _interpreter(self) -> str:
        return sys.executable if self._local is None else self.launch.interpreter

    @property
    def _wanted(self) -> tuple[bool, bool]:
        return self.trust_remote_code, self.textual

    def _read(self) -> TokenizerReading:
        if self._interpreter == sys.executable and "transformers" in sys.modules:
            return read(self.model_dir, *self._wanted)
        with ThreadPoolExecutor(1, "seer-tokenizer") as thread:  # an event loop may run in this one
            return thread.submit(asyncio.run, self._ask()).result()

    async def _ask(self) -> TokenizerReading:
        log.info("reading_tokenizer", model=str(self.model_dir))
        launch, request = self.launch, ReadTokenizer(str(self.model_dir.absolute()), *self._wanted)
        launcher = self._local or LocalLauncher()
        environment = dict(os.environ) if self._local is None else launch.environment
        log_file, limit_s = launch.log_dir / "tokenizer.log", launch.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                worker = await launcher.launch(
                    "tokenizer", self._interpreter, environment, log_file, launch.keep_logs
                )
        except (EngineError, TimeoutError) as error:
            raise self._flaw(str(error) or f"not after start_timeout_s = {limit_s:g}") from error
        try:
            worker.send(request)
            async with asyncio.timeout(limit_s):
                for message in await worker.receive():
                    if isinstance(message, TokenizerRead):
                        worker.discard_log()
                        return message.reading
        except EOFError as error:
            raise self._flaw(f"{await worker.end(GRACE_S)}\n{worker.last_words()}") from error
        except (WireError, TimeoutError) as error:
            flaw = str(error) or f"not after start_timeout_s = {limit_s:g}"
            raise self._flaw(f"{flaw}\n{worker.last_words()}") from error
        finally:
            await worker.end(GRACE_S)
        raise ConfigError(worker.fatal or f"the tokenizer in {self.model_dir} was not read")

    def _flaw(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the tokenizer in {self.model_dir} cannot be read by {self._interpreter}: {reason}"
        )

    def _log(self, reading: TokenizerReading) -> None:
        log.info(
            "tokenizer_read",
            kind=reading.kind or "none",
            end_token_ids=list(reading.end_token_ids),
            templates=list(reading.templates),
        )
