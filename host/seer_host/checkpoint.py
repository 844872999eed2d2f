"""What a directory of safetensors holds, looked at before anything of it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from seer_core.errors import EngineError

__all__ = ["Header", "check", "read_headers", "ties"]

INDEX = "model.safetensors.index.json"
PLAIN = ("F64", "F32", "F16", "BF16")
"""What engines convert into one another while they load."""


class Header(NamedTuple):
    """Where a tensor lies, and what it is."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(directory: Path) -> dict[str, Header]:
    """Return the tensors of the files an engine would load: those of the index, or else of all.

    Raises:
        EngineError: a file cannot be read, or two files hold a tensor of one name.
    """
    try:
        found: dict[str, Header] = {}
        for path in _files(directory):
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, it is no mapping
                    if name in found:
                        raise EngineError(
                            f"tensor {name!r} is in both {found[name].path.name} and {path.name};"
                            f" remove one, or write {INDEX}"
                        )
                    part = tensors.get_slice(name)
                    found[name] = Header(path, tuple(part.get_shape()), part.get_dtype())
    except (OSError, SafetensorError, ValueError) as error:
        raise EngineError(f"its safetensors cannot be read: {error}") from error
    return found


def check(
    new: Mapping[str, Header],
    wanted: Mapping[str, Header],
    ties: Sequence[Sequence[str]],
    dtype: torch.dtype,
) -> None:
    """Hold a checkpoint's tensors against the model's own, and look at every value.

    Args:
        new: the checkpoint's.
        wanted: those of the directory from which the model was started; none of them: names and shapes
            are the engine's to judge.
        ties: names that stand for one tensor in the model.  One of them is enough; several must be equal.
        dtype: what the model computes in, which must be able to hold every value.

    Raises:
        EngineError: naming the first tensor that does not do.
    """
    if wanted:
        _check_names(new, wanted, ties)
    for tie in ties:
        twins = [name for name in tie if name in new]
        for twin in twins[1:]:
            if not torch.equal(_read(new, twins[0]), _read(new, twin)):
                raise EngineError(
                    f"tensor {twin!r} differs from {twins[0]!r}, but the engine was started on a model in"
                    " which they are one; leave it out, or start the engine on an untied model"
                )
    most = torch.finfo(dtype).max
    for name, tensor in _tensors(new):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        plain = new[name].dtype in PLAIN
        low, high = (tensor if plain else tensor.to(torch.float32)).aminmax()
        if not (low.isfinite() and high.isfinite()):  # either is NaN if there is one
            raise EngineError(f"tensor {name!r} has values that are no finite numbers")
        if plain and (float(high) > most or float(low) < -most):
            raise EngineError(f"tensor {name!r} has values beyond {most:g}, too large for {dtype}")


def ties(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_names(
    new: Mapping[str, Header], wanted: Mapping[str, Header], ties: Sequence[Sequence[str]]
) -> None:
    shapes = dict(wanted)
    for tie in ties:
        known = next((wanted[name] for name in tie if name in wanted), None)
        if known is not None:
            shapes |= dict.fromkeys(tie, known)
    missing = [
        name
        for name in wanted
        if name not in new and not any(name in tie and any(twin in new for twin in tie) for tie in ties)
    ]
    foreign = [name for name in new if name not in shapes]
    for names, fact in ((missing, "is missing"), (foreign, "is none of the model's")):
        if names:
            more = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
            raise EngineError(
                f"tensor {names[0]!r} {fact}{more}; save all tensors of the model, and no other"
            )
    for name, header in new.items():
        shape, dtype = shapes[name].shape, shapes[name].dtype
        if header.shape != shape:
            raise EngineError(f"tensor {name!r} has the shape {[*header.shape]}, the model's has {[*shape]}")
        if header.dtype != dtype and not (header.dtype in PLAIN and dtype in PLAIN):
            raise EngineError(f"tensor {name!r} holds {header.dtype}, the model's {dtype}")


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            return [directory / name for name in sorted(names)]
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"its {INDEX} has no weight_map of names and files") from error
    return sorted(directory.glob("*.safetensors"))


def _read(headers: Mapping[str, Header], name: str) -> torch.Tensor:
    with safe_open(headers[name].path, "pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor


def _tensors(headers: Mapping[str, Header]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read tensor after tensor, file by file; they are mapped, not copied."""
    for path in dict.fromkeys(header.path for header in headers.values()):
        with safe_open(path, "pt") as tensors:
            for name, header in headers.items():
                if header.path == path:
                    yield name, tensors.get_tensor(name)
