"""New weights for a running model, checked before any is loaded, and the source that reads a directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from seer_host.weight_copies import (
    ADAPTER_TENSORS,
    NONCE,
    digest_of_contents,
    digest_of_files,
    states_of,
    weight_files,
)

from seer_core.errors import EngineError
from seer_core.ports.weights import BROADCAST, DIRECTORY, SHARED_MEMORY, WeightSource, WeightSpec
from seer_worker.process.adapter import Rejected
from seer_worker.process.loader import ImportedClass
from seer_worker.weights.adapters import Adapter, Merged, make_adapter

__all__ = [
    "WEIGHTS",
    "Directory",
    "TensorHeader",
    "first_weights",
    "headers_of",
    "open_adapter",
    "open_checked",
    "ties",
]

log = structlog.get_logger("seer")

WEIGHTS: ImportedClass[WeightSource] = ImportedClass(
    "weight source",
    WeightSource,
    "correct what update_weights was given",
    {
        BROADCAST: "seer_worker.weights.broadcast:Broadcast",
        DIRECTORY: f"{__name__}:Directory",
        SHARED_MEMORY: "seer_worker.weights.shared_weights:SharedMemory",
    },
)

INDEX = "model.safetensors.index.json"
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What engines convert into one another while they load."""

Opened = TypeVar("Opened")


class TensorHeader(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Directory:
    """The safetensors of a directory that an engine would load: those of its index, or else all.

    An adapter's are read into memory at once, and must have the digest that the settings name: trainers
    write the next one over them.  With ``states`` the files must have these sizes and times.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._directory = Path(settings["directory"])
        self._holds_adapter = settings.get("adapter_config") is not None
        self._digest = settings.get("digest", "")
        self._states = settings.get("states")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensor after tensor, file by file; those of whole weights are mapped, not copied.

        Raises:
            EngineError: a file cannot be read, two files hold a tensor of one name, or an adapter is another
                than that of the update.
        """
        found: dict[str, Path] = {}
        try:
            if self._holds_adapter:
                yield from self._adapter().items()
                return
            self._expect_states()
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
            self._expect_states()
        except (OSError, SafetensorError, ValueError) as error:
            raise EngineError(f"its safetensors cannot be read: {error}") from error

    def _expect_states(self) -> None:
        if self._states is not None and states_of(self._directory) != self._states:
            raise EngineError(
                f"the weights in {str(self._directory)!r} have changed since the engine started on them;"
                " an adapter would be merged with others: update by whole weights first"
            )

    def _adapter(self) -> dict[str, torch.Tensor]:
        contents = {path.name: path.read_bytes() for path in weight_files(self._directory)}
        if self._digest and (found := digest_of_contents(contents)) != self._digest:
            raise EngineError(
                f"the adapter in {str(self._directory)!r} has changed since the update began: its digest is"
                f" {found}, and was {self._digest}; update once it is written"
            )
        tensors = contents.get(ADAPTER_TENSORS)
        return {} if tensors is None else load_tensors(tensors)


def first_weights(directory: str) -> WeightSpec:
    """Return what names the weights on which an engine is about to start; it reads no other ones later."""
    return WeightSpec(DIRECTORY, {"directory": directory, "states": states_of(directory)})


def headers_of(directory: str) -> dict[str, TensorHeader]:
    """Return what the tensors of a model's directory are; none if it holds no safetensors."""
    return _headers(Directory({"directory": directory}))


def open_checked(
    spec: WeightSpec,
    wanted: Mapping[str, TensorHeader],
    ties: Sequence[Sequence[str]],
    dtype: torch.dtype,
    base: WeightSpec | None = None,
) -> WeightSource:
    """Make a source and check its names, shapes and values, in one pass over its tensors.

    Args:
        spec: names the source.
        wanted: the tensors of the directory from which the model was started; none of them: names and shapes
            are the engine's to judge.
        ties: names that stand for one tensor in the model.  One of them is enough; several must be equal.
        dtype: what the model computes in, which must be able to hold every value.
        base: the whole weights to which an adapter belongs that brings none; the source yields both as one.

    Raises:
        Rejected: it cannot be made or read, or a tensor will not do, the first of which is named.
    """

    def open_whole(spec: WeightSpec) -> WeightSource:
        source = WEIGHTS.make(spec.path, spec.settings)
        if spec.adapter_config is not None:
            whole = spec.base or base
            if whole is None:
                raise EngineError("this engine takes no adapters; update it by whole weights")
            adapter = _read_adapter(spec, source, wanted, dtype)
            _expect_unchanged(whole)
            source = Merged(WEIGHTS.make(whole.path, whole.settings), adapter)
        values = _Values(ties, dtype)
        new = _found(spec, source, values.check)
        if wanted:
            _check_names(new, wanted, ties)
        values.expect_sound()
        return source

    return _opened(spec, open_whole)


def _expect_unchanged(whole: WeightSpec) -> None:
    """Raise EngineError if whole weights that are loaded once more, and are no copy, are others by now."""
    digest, place = whole.settings.get("digest"), Path(whole.directory or "")
    if whole.directory is None or not digest or (place / NONCE).exists():
        return
    if (found := digest_of_files(weight_files(place))) != digest:
        raise EngineError(
            f"the weights in {str(place)!r} have changed since they were loaded; an adapter would be"
            f" merged with others: their digest is {found}, and was {digest}; update by whole weights first"
        )


def open_adapter(spec: WeightSpec, wanted: Mapping[str, TensorHeader], dtype: torch.dtype) -> Adapter:
    """Read and check an adapter as ``open_checked`` does whole weights; a Rejected says what is wrong."""

    def read(spec: WeightSpec) -> Adapter:
        return _read_adapter(spec, WEIGHTS.make(spec.path, spec.settings), wanted, dtype)

    return _opened(spec, read)


def _read_adapter(
    spec: WeightSpec, source: WeightSource, wanted: Mapping[str, TensorHeader], dtype: torch.dtype
) -> Adapter:
    values = _Values((), dtype)
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        values.check(name, tensor)
        found[name] = tensor

    _found(spec, source, keep)
    config = spec.adapter_config
    assert config is not None
    adapter = make_adapter(config, found, {name: header.shape for name, header in wanted.items()})
    values.expect_sound()
    return adapter


def _found(
    spec: WeightSpec, source: WeightSource, check: Callable[[str, torch.Tensor], None]
) -> dict[str, TensorHeader]:
    new = _headers(source, check)
    if not new:
        what = "tensors" if spec.directory is None else "safetensors"
        raise EngineError(f"no {what} in {str(spec)!r}")
    return new


def _opened(spec: WeightSpec, opener: Callable[[WeightSpec], Opened]) -> Opened:
    """Return what ``opener`` returns; every failure is a Rejected."""
    try:
        return opener(spec)
    except EngineError as error:
        raise Rejected(str(error)) from error
    except Exception as error:
        log.exception("weight_source_failed", path=spec.path)
        raise Rejected(f"weight source {spec.path!r} failed: {type(error).__name__}: {error}") from error


def ties(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_names(
    new: Mapping[str, TensorHeader], wanted: Mapping[str, TensorHeader], ties: Sequence[Sequence[str]]
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
    files = sorted(directory.glob("*.safetensors"))
    if index.exists():
        _require_file(index)
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / name for name in names]
        except (LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"its {INDEX} has no weight_map of names and files") from error
        if elsewhere := [name for name in names if Path(name).name != name]:
            raise EngineError(f"its {INDEX} names {elsewhere[0]!r}, which is no file of this directory")
    for path in files:
        _require_file(path)
    return files


def _require_file(path: Path) -> None:
    """Refuse what is no plain file: to open a pipe is to wait for its other end."""
    if not path.is_file():
        raise EngineError(f"its {path.name} is no file")


def _headers(
    source: WeightSource, check: Callable[[str, torch.Tensor], None] = lambda *_: None
) -> dict[str, TensorHeader]:
    found: dict[str, TensorHeader] = {}
    for name, tensor in source.tensors():
        if name in found:
            raise EngineError(f"tensor {name!r} is there twice")
        found[name] = TensorHeader(tuple(tensor.shape), tensor.dtype)
        check(name, tensor)
    return found


class _Values:
    """Checks values; the first flaw is kept for later, for errors in names and shapes come first."""

    def __init__(self, ties: Sequence[Sequence[str]], dtype: torch.dtype) -> None:
        self._ties, self._dtype = ties, dtype
        self._tied: dict[str, torch.Tensor | None] = {name: None for tie in ties for name in tie}
        self._flaw = ""

    def check(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._tied:
            self._tied[name] = tensor
        if self._flaw or not tensor.is_floating_point() or not tensor.numel():
            return
        most = torch.finfo(self._dtype).max
        plain = tensor.dtype in PLAIN
        low, high = (tensor if plain else tensor.to(torch.float32)).aminmax()
        if not (low.isfinite() and high.isfinite()):  # either is NaN if there is one
            self._flaw = f"tensor {name!r} has values that are no finite numbers"
        elif plain and (float(high) > most or float(low) < -most):
            self._flaw = f"tensor {name!r} has values beyond {most:g}, too large for {self._dtype}"

    def expect_sound(self) -> None:
        """Raise EngineError with the first flaw, or where tied tensors differ."""
        if self._flaw:
            raise EngineError(self._flaw)
        for tie in self._ties:
            twins = [(name, tensor) for name in tie if (tensor := self._tied[name]) is not None]
            for name, tensor in twins[1:]:
                if not torch.equal(twins[0][1], tensor):
                    raise EngineError(
                        f"tensor {name!r} differs from {twins[0][0]!r}, but the engine was started on a model"
                        " in which they are one; leave it out, or start the engine on an untied model"
                    )
