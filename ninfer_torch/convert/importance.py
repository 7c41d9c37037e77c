"""How much each input channel of a weight matters: its mean squared activation (spec/conversion.md 7).

Two files hold it. llama.cpp's `llama-imatrix` writes a GGUF whose tensors carry the names of a GGUF model; ours is a
safetensors file keyed by logical parameter names. Both are read into an `Importance`, keyed by logical names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ninfer_torch.convert.gguf_file import GgufFile, GgufTensor
from ninfer_torch.convert.gguf_tables import ARCHITECTURES
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import logical_name

__all__ = ["Importance", "mean_importance", "read_importance", "read_llama_imatrix", "untile_heads", "write_importance"]

_SUMS, _COUNTS, _PLAIN_SUMS = ".in_sum2", ".counts", ".in_sum"
_LAYER = re.compile(r"blk\.(\d+)\.")
_LAYER_MARK = "{i}"

_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_q": ("attention/query", "attention/gate"),
        "attn_k": ("attention/key",),
        "attn_v": ("attention/value",),
        "attn_output": ("attention/output",),
        "attn_qkv": ("gdn/query", "gdn/key", "gdn/value"),
        "attn_gate": ("gdn/z",),
        "ssm_out": ("gdn/output",),
        "ffn_gate": ("mlp/gate",),
        "ffn_up": ("mlp/up",),
        "ffn_down": ("mlp/down",),
    }
)
"""Roles under `text/layers/{i}/` that each GGUF weight of a layer answers for (spec/conversion.md 7)."""

_TILED = "ssm_out"
"""The GGUF weight whose input channels lie in llama.cpp's order of value heads."""


@dataclass(frozen=True)
class Importance(Mapping[str, Tensor]):
    """Vectors float32 [K] by logical parameter name.

    `source` is the name of the file, or what that file says it was made from; `unused` are its entries that no logical
    name is known for.
    """

    vectors: Mapping[str, Tensor]
    source: str = ""
    unused: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)


def read_importance(path: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Importance:
    """The importance in a safetensors file or a llama.cpp imatrix GGUF, by logical parameter name.

    `config` is the model's text config, needed for a model whose GGUF reorders input channels: then
    `linear_num_key_heads` and `linear_num_value_heads` say how. Raises ConversionError for a file of another kind and
    for entries that are not vectors of finite numbers of at least 0, naming file and entry.
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ConversionError(f"{path.name}: cannot be opened ({error.strerror or error})") from error
    return _from_gguf(path, config) if magic == b"GGUF" else _from_safetensors(path)


def write_importance(path: str | os.PathLike[str], vectors: Mapping[str, Tensor], source: str) -> None:
    """Write a safetensors file that `read_importance` reads; `source` is a name for people, not a path.

    The file appears whole or not at all. Raises ConversionError for a vector that is illegal.
    """
    path = Path(path)
    checked = {name: _checked(vector, f"importance of {name!r}").contiguous() for name, vector in vectors.items()}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(checked, partial, {"source": os.path.basename(source)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def mean_importance(importance: Mapping[str, Tensor], names: Iterable[str], columns: int) -> Tensor | None:
    """The importance float32 [K = `columns`] of one parent with the logical parameters `names`.

    The vectors found are averaged; None, meaning equal weights, where there is none. Raises ConversionError for a vector
    of another length.
    """
    found = {name: importance[name] for name in names if name in importance}
    for name, vector in found.items():
        if vector.shape != (columns,):
            raise ConversionError(f"importance of {name!r} has {vector.numel()} entries, its weight {columns} columns")
    return torch.stack(list(found.values())).to(torch.float64).mean(0).to(torch.float32) if found else None


def read_llama_imatrix(path: str | os.PathLike[str]) -> Importance:
    """The vectors of a llama.cpp imatrix GGUF under its own names: `n.in_sum2` / max(`n.counts`, 1) for each weight n.

    Sums of the activations themselves (`n.in_sum`), which newer files have too, are left aside.
    Raises ConversionError for a GGUF that is no imatrix, a sum without its count or the reverse, and a weight with one
    count per expert, for which no importance is defined.
    """
    file = GgufFile(path)
    weights = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
    if not weights:
        kind = file.metadata.get("general.type", "unknown")
        raise ConversionError(
            f"{file.name}: no tensor's name ends in {_SUMS!r} (general.type {kind!r}); expected an imatrix"
        )
    expected = {name + suffix for name in weights for suffix in (_SUMS, _COUNTS)}
    found = {name for name in file.tensors if not name.endswith(_PLAIN_SUMS)}
    if odd := sorted(expected.symmetric_difference(found)):
        state = "missing" if odd[0] in expected else "not part of an imatrix"
        raise ConversionError(f"{file.name}: tensor {odd[0]!r} is {state}")
    return Importance({name: _mean_square(file, name) for name in weights}, file.name)


def untile_heads(vector: Tensor, key_heads: int, value_heads: int) -> Tensor:
    """A vector over value-head channels from llama.cpp's order of heads to the model's own (spec/parameters.md 11).

    llama.cpp stores the value heads of all key heads interleaved: its head r * `key_heads` + k is head
    k * (`value_heads` / `key_heads`) + r here.
    """
    if key_heads < 1 or value_heads % key_heads or vector.numel() % value_heads:
        raise ConversionError(
            f"{vector.numel()} channels cannot be cut into {value_heads} value heads of {key_heads} key heads"
        )
    return vector.view(value_heads // key_heads, key_heads, -1).transpose(0, 1).reshape(-1)


def _checked(vector: Tensor, what: str) -> Tensor:
    if vector.dim() != 1 or not vector.numel() or not vector.is_floating_point():
        raise ConversionError(f"{what} is {vector.dtype} {list(vector.shape)}, expected a floating vector [K]")
    narrow = vector.detach().to(torch.float32)
    broken = ~(narrow.isfinite() & (narrow >= 0))
    if bool(broken.any()):
        column = int(broken.nonzero()[0])
        raise ConversionError(f"{what} is {narrow[column].item()} in column {column}, expected finite and at least 0")
    return narrow


def _from_safetensors(path: Path) -> Importance:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as stream:
            source = (stream.metadata() or {}).get("source", path.name)
            vectors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ConversionError(
            f"{path.name}: neither an imatrix GGUF nor a safetensors file ({error}); an imatrix in llama.cpp's older .dat "
            "form becomes a GGUF by llama-imatrix --in-file OLD.dat --output-format gguf -o NEW.gguf"
        ) from error
    checked = {name: _checked(vector, f"{path.name}: importance of {name!r}") for name, vector in vectors.items()}
    return Importance(checked, source)


def _from_gguf(path: Path, config: Mapping[str, Any] | None) -> Importance:
    stored = read_llama_imatrix(path)
    vectors: dict[str, Tensor] = {}
    unused = []
    for name, vector in stored.items():
        targets = _logical_names(name)
        if not targets:
            unused.append(name)
        elif _LAYER.sub("", name).removesuffix(".weight") == _TILED:
            vector = _untiled(f"{stored.source}: {name!r}", vector, config)
        vectors.update(dict.fromkeys(targets, vector))
    if not vectors:
        raise ConversionError(f"{stored.source}: none of its weights is known, such as {unused[0]!r}")
    return Importance(vectors, stored.source, tuple(unused))


def _untiled(what: str, vector: Tensor, config: Mapping[str, Any] | None) -> Tensor:
    key_heads, value_heads = ((config or {}).get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if not isinstance(key_heads, int) or not isinstance(value_heads, int):
        raise ConversionError(
            f"{what} counts channels in llama.cpp's order of value heads; expected a config with linear_num_key_heads "
            "and linear_num_value_heads"
        )
    return untile_heads(vector, key_heads, value_heads)


def _mean_square(file: GgufFile, name: str) -> Tensor:
    counts, sums = (_words(file, file.tensors[name + suffix]) for suffix in (_COUNTS, _SUMS))
    if counts.numel() != 1:
        raise ConversionError(
            f"{file.name}: {name!r} has {counts.numel()} counts, one per expert; importance of single experts is not "
            "defined, expected one count"
        )
    return _checked(sums / counts.clamp(min=1.0), f"{file.name}: importance of {name!r}")


def _words(file: GgufFile, tensor: GgufTensor) -> Tensor:
    if tensor.type.encoding != "fp32":
        raise ConversionError(f"{file.name}: tensor {tensor.name!r} is of type {tensor.type.name}, expected f32")
    return torch.frombuffer(bytearray(file.rows(tensor).tobytes()), dtype=torch.float32)


@cache
def _templates() -> Mapping[str, tuple[str, ...]]:
    """Logical name templates of every GGUF weight name template, over all architectures that are known.

    A name means the same wherever two architectures share it, and a model asks only for names that it has.
    """
    found: dict[str, list[str]] = {}
    for architecture in ARCHITECTURES.values():
        for rule in architecture.rules:
            found.setdefault(rule.gguf, []).append(logical_name(rule.parameter))
    for weight, roles in _ROLES.items():
        found.setdefault(f"blk.{_LAYER_MARK}.{weight}.weight", []).extend(
            f"text/layers/{_LAYER_MARK}/{role}" for role in roles
        )
    return {name: tuple(dict.fromkeys(targets)) for name, targets in found.items()}


def _logical_names(name: str) -> tuple[str, ...]:
    layer = _LAYER.match(name)
    template = _LAYER.sub(f"blk.{_LAYER_MARK}.", name, count=1)
    number = layer.group(1) if layer else ""
    return tuple(target.replace(_LAYER_MARK, number) for target in _templates().get(template, ()))
