"""The typed errors of the library. Every public failure is a `NinferError`."""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "ConversionError",
    "FormatError",
    "LayoutError",
    "NinferError",
    "UnsupportedOperation",
]


class NinferError(Exception):
    """Base of every error this library raises on purpose."""


class FormatError(NinferError, ValueError):
    """An unknown numeric format, or words outside a format's language."""


class LayoutError(NinferError, ValueError):
    """A shape, byte count or (format, layout) pair that a storage layout refuses."""


class ArtifactError(NinferError, ValueError):
    """A broken, incomplete or inconsistent `.ninfer` file set.

    `kind` is one of framing, json, schema, reference, range, encoding, file, value: the class of rule that was broken
    (spec/container.md 10).
    """

    def __init__(self, message: str, kind: str = "schema") -> None:
        super().__init__(message)
        self.kind = kind


class ConversionError(NinferError, ValueError):
    """A source or a value that cannot be turned into the requested words."""


class UnsupportedOperation(NinferError, NotImplementedError):
    """An operation that a quantized tensor does not define; the message names the way out."""
