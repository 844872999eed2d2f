"""Weights for a running model, looked at before anything of them is loaded; a directory of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from safetensors import SafetensorError, safe_open

from seer_core.errors import EngineError
from seer_core.weights import WeightSource, WeightSpec
from seer_host.instance import Refusal
from seer_host.loader import Kind

__all__ = ["WEIGHTS", "Directory", "Header", "headers_of", "open_checked", "ties"]

log = structlog.get_logger("seer")

WEIGHTS: Kind[WeightSource] = Kind("weight source", WeightSource, "correct what update_weights was given")

INDEX = "model.safetensors.index.json"
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What engines convert into one another while they load."""


class Header(NamedTuple):
    """What a tensor is, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Directory:
    """The safetensors of a directory that an engine would load: those of its index, or else all."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._directory = Path(settings["directory"])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensor after tensor, file by file; they are mapped, not copied.

        Raises:
            EngineError: a file cannot be read, or two files hold a tensor of one name.
        """
        found: dict[str, Path] = {}
        try:
            for path in _files(self._directory):
                with safe_open(path, "pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118, it is no mapping
                        if name in found:
                            raise EngineError(
                                f"tensor {name!r} is in both {found[name].name} and {path.name};"
                                f" remove one, or write {INDEX}"
                            )
                        found[name] = path
                        yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise EngineError(f"its safetensors cannot be read: {error}") from error


def headers_of(directory: str) -> dict[str, Header]:
    """Return what the tensors of a model's directory are; none if it holds no safetensors."""
    return _headers(Directory({"directory": directory}))


def open_checked(
    spec: WeightSpec, wanted: Mapping[str, Header], ties: Sequence[Sequence[str]], dtype: torch.dtype
) -> WeightSource:
    """Make a source, hold its tensors against the model's own, and look at every value.

    Args:
        spec: names the source.
        wanted: the tensors of the directory from which the model was started; none of them: names and shapes
            are the engine's to judge.
        ties: names that stand for one tensor in the model.  One of them is enough; several must be equal.
        dtype: what the model computes in, which must be able to hold every value.

    Raises:
        Refusal: it cannot be made or read, or a tensor will not do, the first of which is named.
    """
    try:
        source = WEIGHTS.make(spec.path, spec.settings)
        new = _headers(source)
        if not new:
            what = "tensors" if spec.directory is None else "safetensors"
            raise EngineError(f"no {what} in {str(spec)!r}")
        if wanted:
            _check_names(new, wanted, ties)
        _check_values(source, ties, dtype)
    except EngineError as error:
        raise Refusal(str(error)) from error
    except Exception as error:
        log.exception("weight_source_failed", path=spec.path)
        raise Refusal(f"weight source {spec.path!r} failed: {type(error).__name__}: {error}") from error
    return source


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
            raise EngineError(f"tensor {name!r} holds {_plain(header.dtype)}, the model's {_plain(dtype)}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            return [directory / name for name in sorted(names)]
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"its {INDEX} has no weight_map of names and files") from error
    return sorted(directory.glob("*.safetensors"))


def _headers(source: WeightSource) -> dict[str, Header]:
    found: dict[str, Header] = {}
    for name, tensor in source.tensors():
        if name in found:
            raise EngineError(f"tensor {name!r} is there twice")
        found[name] = Header(tuple(tensor.shape), tensor.dtype)
    return found


def _check_values(source: WeightSource, ties: Sequence[Sequence[str]], dtype: torch.dtype) -> None:
    tied = {name for tie in ties for name in tie}
    found: dict[str, torch.Tensor] = {}
    most = torch.finfo(dtype).max
    for name, tensor in source.tensors():
        if name in tied:
            found[name] = tensor
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        plain = tensor.dtype in PLAIN
        low, high = (tensor if plain else tensor.to(torch.float32)).aminmax()
        if not (low.isfinite() and high.isfinite()):  # either is NaN if there is one
            raise EngineError(f"tensor {name!r} has values that are no finite numbers")
        if plain and (float(high) > most or float(low) < -most):
            raise EngineError(f"tensor {name!r} has values beyond {most:g}, too large for {dtype}")
    for tie in ties:
        twins = [name for name in tie if name in found]
        for twin in twins[1:]:
            if not torch.equal(found[twins[0]], found[twin]):
                raise EngineError(
                    f"tensor {twin!r} differs from {twins[0]!r}, but the engine was started on a model in"
                    " which they are one; leave it out, or start the engine on an untied model"
                )
