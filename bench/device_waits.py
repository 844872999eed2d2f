"""Where the host waits for a device, counted on a machine that has none.

``DeviceWaits`` runs PyTorch's operations on tensors that say that they are on a device, and whose numbers lie
in main memory.  It counts what would make the host wait on a GPU: a number or a tensor that is read, a copy
from memory that is not pinned, and a shape that depends on numbers.  It needs torch, and nothing of Seer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

__all__ = ["DeviceWaits", "OnDevice", "off_device", "on_device"]

DEVICE = torch.device("meta")
"""The one device besides the CPU that every build of PyTorch has."""
READ = ("_local_scalar_dense", "equal", "is_nonzero")
SHAPED = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave")
NOT_PINNED = "copy from memory that is not pinned"
COPY_BACK = "copy to the host"


class OnDevice(torch.Tensor):
    """A tensor on a device that is not there."""

    held: torch.Tensor
    """Its numbers, in main memory."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        """Put a tensor there."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """Return its numbers, for which the host waits."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Do the same as within ``DeviceWaits``, uncounted."""
        with DeviceWaits():
            return function(*arguments, **(named or {}))


class DeviceWaits(TorchDispatchMode):
    """Counts the waits of what is called within."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        """How often the host waited, by what for."""
        self.operations = 0
        """How many operations there were on the device."""
        self._left = ExitStack()
        self._infers = False

    @property
    def total(self) -> int:
        """How often the host waited."""
        return self.found.total()

    def __enter__(self) -> DeviceWaits:
        """Count from now on; ``torch.tensor`` makes what it makes where no operation can be seen."""
        before, self._infers = torch.tensor, torch.is_inference_mode_enabled()

        def make(values: Any, *arguments: Any, device: Any = None, **named: Any) -> torch.Tensor:
            made = before(values, *arguments, **named)
            return made if device is None else made.to(device)

        # vLLM's worker for CPUs has put a copy in the place of ``pin_memory``.
        for holder, name, mine in (
            (torch, "tensor", make),
            (torch.Tensor, "pin_memory", torch._C.TensorBase.pin_memory),
        ):
            self._left.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, mine)
        # In this mode operations come here before they are taken apart, so a copy would not be seen.
        self._left.enter_context(torch.inference_mode(False))
        self._left.enter_context(torch.no_grad())
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        super().__exit__(*error)
        self._left.close()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation in main memory."""
        named = dict(named or {})
        if (found := self._in_parts(function, arguments, named)) is not NotImplemented:
            return found
        name = function._overloadpacket.__name__
        if name == "is_pinned":
            return getattr(arguments[0], "pinned", False)
        if name == "_pin_memory":
            pinned = arguments[0].clone()
            pinned.pinned = True
            return pinned
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
        there = tree_any(lambda each: isinstance(each, OnDevice), (arguments, named))
        wanted = named.get("device")
        goes = named.pop("device") if wanted is not None and torch.device(wanted) == DEVICE else None
        self._count(name, arguments, named, tensors, there=there, goes=goes is not None)
        arguments, named = off_device((tuple(arguments), named))
        with torch.inference_mode(self._infers):
            found = function(*arguments, **named)
        if name == "_to_copy" and not there and goes is None:
            return found
        if name in ("_to_copy",) and goes is None and wanted is not None:
            return found
        stays = there and name not in READ
        if not stays and goes is None:
            return found
        self.operations += 1
        return tree_map_only(torch.Tensor, _as_on_device, found)

    def _in_parts(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what the parts of an operation return, NotImplemented if it has none.

        Operations on tensors that were made in inference mode come here before they are taken apart.
        """
        super().__enter__()
        try:
            return function.decompose(*arguments, **named)
        finally:
            super().__exit__(None, None, None)

    def _count(
        self,
        name: str,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        *,
        there: bool,
        goes: bool,
    ) -> None:
        if name == "_to_copy" and there and not goes and named.get("device") is not None:
            self.found[COPY_BACK] += not named.get("non_blocking", False)
        elif name == "_to_copy" and goes and not there:
            waits = not (named.get("non_blocking", False) and getattr(tensors[0], "pinned", False))
            self.found[NOT_PINNED] += waits
        elif name == "copy_" and there:
            into, source = arguments[:2]
            at_once = named.get("non_blocking", arguments[2] if len(arguments) > 2 else False)
            if isinstance(into, OnDevice) and not isinstance(source, OnDevice):
                self.found[NOT_PINNED] += not (at_once and getattr(source, "pinned", False))
            elif not isinstance(into, OnDevice):
                self.found[COPY_BACK] += not at_once
        elif name in READ and there:
            self.found[f"{name} of a tensor"] += 1
        elif name in SHAPED and there:
            self.found[f"shape of {name}"] += 1
        elif name in ("index", "index_put", "index_put_") and there:
            places = [each for each in arguments[1] if each is not None]
            self.found["index by a mask"] += any(
                each.dtype in (torch.bool, torch.uint8) and isinstance(each, OnDevice) for each in places
            )
            self.found[NOT_PINNED] += sum(not isinstance(each, OnDevice) for each in places)


def on_device(values: Any) -> Any:
    """Return a structure with its tensors on the device."""
    return tree_map_only(torch.Tensor, _as_on_device, values)


def off_device(values: Any) -> Any:
    """Return a structure with its tensors in main memory."""
    return tree_map_only(OnDevice, lambda each: each.held, values)


def _as_on_device(tensor: torch.Tensor) -> OnDevice:
    return tensor if isinstance(tensor, OnDevice) else OnDevice(tensor)
