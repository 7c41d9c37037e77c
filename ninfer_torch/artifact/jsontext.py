"""Strict JSON text: reading that refuses every ambiguity, writing that gives back the numbers as they were spelled.

Source of the rules: spec/container.md 4 and 11. No torch here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, NoReturn, final

from ninfer_torch.errors import ArtifactError

__all__ = ["MAX_DEPTH", "MAX_INTEGER_DIGITS", "SpelledFloat", "dump_json", "parse_json"]

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects that is read or written; a directory needs about ten levels."""

MAX_INTEGER_DIGITS = 4300
"""Longest integer that is read: the limit Python itself sets by default."""

_INTEGER_END = 10**MAX_INTEGER_DIGITS
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPEN_AND_CLOSE = bytes.maketrans(b"[]{}", b"()()")
_SURROGATE = re.compile("[\ud800-\udfff]")


@final
class SpelledFloat(float):
    """A number whose source text differs from Python's `repr`, such as `1e-6` or `-0`; `text` is that spelling."""

    text: str

    def __new__(cls, text: str) -> SpelledFloat:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __reduce__(self) -> tuple[type[SpelledFloat], tuple[str]]:
        return SpelledFloat, (self.text,)


def parse_json(data: bytes, where: str) -> Any:
    """The value of one JSON text in UTF-8; `where` (a file name) opens every message.

    Refused with ArtifactError of kind `json`: a byte-order mark, invalid UTF-8, repeated member names, NaN and
    infinities, numbers beyond binary64, integers of more than MAX_INTEGER_DIGITS digits, nesting beyond MAX_DEPTH,
    anything after the value.
    """

    def fail(reason: str) -> NoReturn:
        raise ArtifactError(f"{where}: JSON directory: {reason}", kind="json")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            names = [name for name, _ in pairs]
            fail(
                f"member {next(name for name in names if names.count(name) > 1)!r} appears more than once in one object"
            )
        return record

    def integer(text: str) -> int | SpelledFloat:
        if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
            fail(f"found an integer of {len(text)} characters, expected at most {MAX_INTEGER_DIGITS} digits")
        try:
            return SpelledFloat(text) if text == "-0" else int(text)
        except ValueError as error:  # the interpreter's own limit may be lower
            fail(str(error))

    def real(text: str) -> float:
        value = float(text)
        if math.isinf(value):
            fail(f"number {text[:40]} overflows binary64")
        return value if repr(value) == text else SpelledFloat(text)

    def constant(text: str) -> NoReturn:
        fail(f"found the token {text}, expected finite numbers only")

    if data.startswith(b"\xef\xbb\xbf"):
        fail("begins with a byte-order mark, expected plain UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"not UTF-8 at byte {error.start} of the text: {error.reason}")
    _check_depth(data, fail)
    try:
        return json.loads(text, object_pairs_hook=members, parse_int=integer, parse_float=real, parse_constant=constant)
    except json.JSONDecodeError as error:
        fail(f"not one JSON value: {error.msg} at character {error.pos}")
    except RecursionError:
        fail("nested too deeply for this interpreter")


def _check_depth(data: bytes, fail: Any) -> None:
    # Each pass peels the innermost pairs everywhere at once, so MAX_DEPTH passes over ever shorter bytes decide.
    brackets = _STRING.sub(b"", data).translate(_OPEN_AND_CLOSE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"()", b"")
    # Unbalanced text goes on to the parser, which names the spot, unless its open brackets alone would nest too deeply.
    if b"()" in brackets or brackets.count(b"(") > MAX_DEPTH:
        fail(f"nested more than {MAX_DEPTH} levels deep")


def dump_json(value: Any, where: str = "directory") -> bytes:
    """Compact JSON text in UTF-8 of str, bool, None, int, finite float, mappings with str keys, lists and tuples.

    A SpelledFloat is written as it was spelled. Raises ArtifactError of kind `json` for anything else, naming its
    place.
    """
    pieces: list[str] = []
    _write(value, pieces.append, where, 0)
    text = "".join(pieces)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8")


def _write(value: Any, put: Any, where: str, depth: int) -> None:
    if isinstance(value, str):
        put(encode_basestring(value))
    elif value is None or isinstance(value, bool):
        put({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, int):
        put(_integer_text(int(value), where))
    elif isinstance(value, SpelledFloat):
        put(value.text)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ArtifactError(f"{where}: found {value!r}, expected a finite number", kind="json")
        put(float.__repr__(value))
    elif depth == MAX_DEPTH:
        raise ArtifactError(f"{where}: nested more than {MAX_DEPTH} levels deep", kind="json")
    elif isinstance(value, Mapping):
        _write_members(value, put, where, depth + 1)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            put("," if position else "[")
            _write(item, put, f"{where}[{position}]", depth + 1)
        put("]" if value else "[]")
    else:
        raise ArtifactError(f"{where}: found {type(value).__name__}, expected a JSON value", kind="json")


def _write_members(record: Mapping[str, Any], put: Any, where: str, depth: int) -> None:
    for position, (name, item) in enumerate(record.items()):
        if not isinstance(name, str):
            raise ArtifactError(f"{where}: found member name {name!r}, expected a string", kind="json")
        put("," if position else "{")
        put(encode_basestring(name))
        put(":")
        _write(item, put, f"{where}.{name}", depth)
    put("}" if record else "{}")


def _integer_text(value: int, where: str) -> str:
    if abs(value) >= _INTEGER_END:
        raise ArtifactError(f"{where}: found an integer of more than {MAX_INTEGER_DIGITS} digits", kind="json")
    return str(value)
