"""The prompts of each iteration: records of a file, or of a function."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from seer_host.json_files import JsonFormat, read_bytes
from seer_session import Runtime

from seer_core.error_origin import describe_error, is_ctrl_c
from seer_core.errors import PromptError
from seer_rl.references import resolve

__all__ = ["Prompts", "prompts_of"]

Prompts = Callable[[int], Iterable[Mapping[str, Any]]]
"""The records of an iteration: the fields of a prompts file's lines."""


def prompts_of(key: str, source: str, base_dir: Path, groups: int, seed: int) -> Prompts:
    """Return the function from an iteration to its records; ``key`` names the setting in errors.

    A file, ``*.jsonl``, as for ``seer run``, gives the next ``groups`` lines, and begins anew after the last.
    Any other source is a function, called as ``function(iteration, groups, seed)``.

    Raises:
        PromptError: the file cannot be read, holds no records, or holds lines that are none.
        ConfigError: there is no such function.
    """
    if source.endswith(".jsonl"):
        return _of_file(key, base_dir / source, groups)
    function = resolve(key, source, base_dir)

    def records(iteration: int) -> Iterable[Mapping[str, Any]]:
        try:
            found = list(function(iteration, groups, seed))
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            place = str(getattr(function, "__module__", ""))
            raise PromptError(
                f"{key} = {source!r} raised in iteration {iteration}: {describe_error(error, place)}"
            ) from error
        if not found:
            raise PromptError(f"{key} = {source!r} gave none for iteration {iteration}; let it return some")
        return found

    return records


def _of_file(key: str, path: Path, groups: int) -> Prompts:
    form: JsonFormat[dict[str, Any]] = JsonFormat(
        dict[str, Any], "no prompts file", "name JSON lines", PromptError
    )
    raw = read_bytes(path, "name JSON lines", PromptError).removeprefix(BOM_UTF8)
    lines = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        lines.append(form.decode(line, f"{path}:{number}:"))
        try:
            Runtime.check_record(lines[-1])
        except PromptError as error:
            raise PromptError(f"{path}:{number}: {error}; mend the line, or take it out of {key}") from error
    if not lines:
        raise PromptError(f"{path} holds no prompt; name another file in {key}")

    def records(iteration: int) -> Iterable[Mapping[str, Any]]:
        # A prompt may come twice in one iteration, so its place in the run is part of its id.
        places = range(iteration * groups, (iteration + 1) * groups)
        return [lines[place % len(lines)] | {"group_id": f"{place}"} for place in places]

    return records
