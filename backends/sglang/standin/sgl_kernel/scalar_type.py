"""Names of number formats, which SGLang's quantisation modules list when they are imported."""

from __future__ import annotations

__all__ = ["ScalarType", "scalar_types"]


class ScalarType(str):
    """A number format; all that is known of it is its name."""

    __slots__ = ()


class _ScalarTypes:
    def __getattr__(self, name: str) -> ScalarType:
        return ScalarType(name)


scalar_types = _ScalarTypes()
