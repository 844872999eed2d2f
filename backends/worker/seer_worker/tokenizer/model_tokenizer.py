"""The tokenizer of a model for prompts, chats, environments' answers and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer_host.json_files import describe_flaw

from seer_core.errors import PromptError, SeerError
from seer_worker.chat.messages import prepare
from seer_worker.chat.replies import reply_text
from seer_worker.tokenizer.images import ImagePlaces
from seer_worker.tokenizer.library import LibraryTokenizer, read
from seer_worker.tokenizer.reading import TokenizerReading
from seer_worker.tokenizer.templates import ChatTemplates

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["ModelTokenizer"]


class ModelTokenizer:
    """The tokenizer of a directory, which is read when it is first used.

    Args:
        model_dir: has its files.
        trust_remote_code: whether it may run code of the directory.
        reader: returns the reading; without one transformers is imported here for it.
    """

    def __init__(
        self,
        model_dir: Path,
        trust_remote_code: bool = False,
        reader: Callable[[], TokenizerReading] | None = None,
    ) -> None:
        self._dir = model_dir
        self._trust_remote_code = trust_remote_code
        self._read = reader or partial(read, model_dir, trust_remote_code)

    @property
    def directory(self) -> Path:
        """The directory of the model's files."""
        return self._dir

    @cached_property
    def reading(self) -> TokenizerReading:
        """The tokenizer as transformers reads it.

        Raises:
            ConfigError: they are damaged, or transformers cannot read them.
        """
        return self._read()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, special tokens as the tokenizer adds them."""
        return self._encode(text, add_special_tokens=True)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text that stands within another, without special tokens."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a chat, with the model's template and the generation prompt.

        ``tools`` of ``template_kwargs`` go to the template for tools, if the model has one of its own.

        Raises:
            PromptError: a message has something else than text, ``template_kwargs`` has a variable that is
                given to every template, or the tokenizer refuses the text.
        """
        if self._backend is None and not self.reading.templates:
            return self._library.encode_chat(prepare(messages, ""), template_kwargs or {})
        return self._encode(self._render(messages, template_kwargs), add_special_tokens=False)

    def encode_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        written: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids that follow the model's message ``written``: messages and the generation prompt.

        A short chat stands for the one before, so the model's own tokens stay as they are.

        Raises:
            PromptError: the template leaves out the content of a message, or writes it according to the
                model's own, or as ``encode_chat``.
        """

        def render(chat: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
            return self._render(chat, template_kwargs, add_generation_prompt=add_generation_prompt)

        tools = (template_kwargs or {}).get("tools")
        prepare(messages, self._templates.source(tools))  # or errors count the messages that stand before
        text = reply_text(messages, render, tools=tools, written=self.decode_all(written))
        ids = self._encode(text, add_special_tokens=False)
        return ids[1:] if ids and ids[:1] == list(written[-1:]) else ids

    def place_images(
        self, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a prompt with as many tokens for each image as it takes, and where these are.

        Raises:
            PromptError: there are not as many places as images, or the model takes no such image.
        """
        if self._places is None:
            raise PromptError(f"the model in {self._dir} takes no images that Seer can place; leave them out")
        return self._places.place(token_ids, sizes)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        return self._decode(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, with special tokens."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        source = self._templates.source((template_kwargs or {}).get("tools"))
        read = prepare(messages, source)
        return self._templates.render(read, template_kwargs, add_generation_prompt=add_generation_prompt)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            if self._backend is None:
                return self._library.encode(text, add_special_tokens)
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except SeerError:
            raise
        except Exception as error:  # the library raises no other kind
            raise PromptError(
                f"the tokenizer in {self._dir} refused the text: {describe_flaw(error)}"
            ) from error

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._backend is None:
            return self._library.decode(token_ids, skip_special_tokens)
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def _backend(self) -> Tokenizer | None:
        """The tokenizer, unless it is written in Python."""
        from tokenizers import Tokenizer

        if self.reading.backend is None:
            return None
        return Tokenizer.from_str(self.reading.backend)

    @cached_property
    def _library(self) -> LibraryTokenizer:
        """The tokenizer, if it is written in Python."""
        return LibraryTokenizer(self._dir, self._trust_remote_code)

    @cached_property
    def _places(self) -> ImagePlaces | None:
        return ImagePlaces.read(self._dir)

    @cached_property
    def _templates(self) -> ChatTemplates:
        return ChatTemplates(self.reading, self._dir)
