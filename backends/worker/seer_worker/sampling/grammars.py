"""Masks of structured outputs, by xgrammar, the back end that vLLM and SGLang have in common.

A mask depends on the grammar and the response's tokens alone.  A matcher is kept for each request, and is
brought to the tokens that are asked for: it goes on, or back behind drafts that were not accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import attrs
import msgspec
import torch
from seer_host.output_grammars import compile_grammar
from torch import Tensor

from seer_core.model.sampling import StructuredOutputs

__all__ = ["Grammars", "grammars_of"]

MOST_MATCHERS = 4096
"""Requests whose matchers are kept; that of another begins anew, from the response's tokens."""

MOST_GRAMMARS = 256
"""Grammars that are kept, the newest."""

COMPILE_S = 10.0
"""So long a grammar may hold up an instance, when it is seen for the first time."""

THREADS = 2
"""Those that compile a grammar."""


@attrs.define(eq=False)
class _Followed:
    """A matcher, and the tokens that it has accepted."""

    matcher: Any
    accepted: list[int]

    def go_to(self, token_ids: Sequence[int]) -> bool:
        """Bring the matcher behind these tokens; return whether the grammar allows them and goes on."""
        wanted = list(token_ids)
        same = len(self.accepted)
        if wanted[:same] != self.accepted:
            pairs = enumerate(zip(self.accepted, wanted, strict=False))
            same = next((at for at, (one, other) in pairs if one != other), min(same, len(wanted)))
            self.matcher.rollback(len(self.accepted) - same)
            del self.accepted[same:]
        for token in wanted[same:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self.accepted.append(token)
        return not self.matcher.is_terminated()


class Grammars:
    """The grammars of a model's requests.

    Args:
        model_dir: has the model's tokenizer.
        vocab_size: the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._xgrammar: Any = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()
        self._followed: OrderedDict[tuple[str, bytes, tuple[int, ...]], _Followed] = OrderedDict()
        self._bitmask: Tensor = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, wanted: StructuredOutputs) -> Any:
        """Return a grammar, compiled the first time.

        Raises:
            ValueError: it is none, or takes too long.
        """
        key = _key(wanted)
        if key not in self._compiled:
            self._compiled[key] = self._compile_in_time(wanted)
            if len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        found = self._compiled[key]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _compile_in_time(self, wanted: StructuredOutputs) -> Any:
        """Return a grammar, or why there is none; one that takes too long is left to its thread."""
        found: list[Any] = []

        def compile() -> None:
            try:
                found.append(compile_grammar(wanted, self._compiler))
            except ValueError as error:
                found.append(str(error))

        thread = Thread(target=compile, daemon=True)
        thread.start()
        thread.join(COMPILE_S)
        late = f"structured_outputs takes more than {COMPILE_S:g} s to compile; simplify it"
        return found[0] if found else late

    def mask(
        self,
        logits: Tensor,
        wanted: StructuredOutputs,
        request_id: str,
        written: Sequence[int],
        ends: Collection[int],
    ) -> None:
        """Set the logits of tokens that the grammar does not allow to -inf, in place.

        Where no token of the vocabulary goes on as the grammar has it, those that end the response remain.

        Args:
            logits: a row, float32 [vocab].
            wanted: the grammar.
            request_id: names the matcher; another request may have had the name.
            written: the response's tokens.
            ends: the tokens that end the response, which the grammar allows where it is complete.
        """
        last = sorted(ends)
        key = (request_id, _key(wanted), tuple(last))
        followed = self._followed.pop(key, None)
        if followed is None:
            stops = last or None
            matcher = self._xgrammar.GrammarMatcher(self.compile(wanted), override_stop_tokens=stops)
            followed = _Followed(matcher, [])
        self._followed[key] = followed
        if len(self._followed) > MOST_MATCHERS:
            self._followed.popitem(last=False)
        if followed.go_to(written):
            followed.matcher.fill_next_token_bitmask(self._bitmask)
            kept = logits[last]
            self._xgrammar.apply_token_bitmask_inplace(logits[None], self._bitmask.to(logits.device))
            if torch.isneginf(logits.max()):
                logits[last] = kept


@cache
def grammars_of(model_dir: str, vocab_size: int) -> Grammars:
    """Return the grammars of a model, which all of this process share."""
    return Grammars(Path(model_dir), vocab_size)


def _key(wanted: StructuredOutputs) -> bytes:
    return msgspec.msgpack.encode(wanted, order="deterministic")
