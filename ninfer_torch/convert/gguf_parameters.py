"""The tensors of a GGUF file as the parameters of its table: rows in the model's order, blocks untouched, shifts undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ninfer_torch.convert.gguf_file import GgufFile, GgufTensor
from ninfer_torch.convert.gguf_rules import Architecture, TensorRule, interleaved_rows, tiled_heads
from ninfer_torch.convert.gguf_values import BLOCK_ENCODINGS, copied, decode_rows, read_values
from ninfer_torch.convert.source import InputFold, SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.rotation import hadamard

if TYPE_CHECKING:
    from ninfer_torch.convert.gguf_rotation import Rotation

__all__ = ["LayerNumbers", "listed", "read_parameters", "refuse_undecodable"]

LayerNumbers = Mapping[str, Sequence[int]]
"""The numbers of the layers of each kind, under "" those of all."""

RowOrder = Callable[[int, int], torch.Tensor]
"""(begin, end) -> where the parameter's rows [begin, end) lie in the file's tensor: int64 [end - begin]."""


def read_parameters(
    file: GgufFile,
    table: Architecture,
    layers: LayerNumbers,
    left: set[str],
    what: str,
    rules: Sequence[TensorRule] | None = None,
    rotation: Rotation | None = None,
) -> dict[str, SourceTensor]:
    """The parameters of a table's `rules` (default: all but the draft layer's), by state-dict name.

    `left` are the names of tensors that nothing has taken yet; those that are taken leave it. `what` names the model in
    messages, `rotation` the tensors that are stored for rotated inputs. Raises ConversionError, listing them, for tensors that are missing, and for shapes that do not fit.
    """
    reader = _Reader(file, table, rotation)
    tensors: dict[str, SourceTensor] = {}
    missing: list[str] = []
    for rule in table.rules if rules is None else rules:
        for number in layers[rule.layers] if rule.per_layer else (0,):
            origins, parameter = [name.format(i=number) for name in rule.tensors], rule.parameter.format(i=number)
            if rule.fused and rule.fused.format(i=number) in left:
                origins = [rule.fused.format(i=number)]
            lacking = [origin for origin in origins if origin not in left]
            if not lacking:
                left.difference_update(origins)
                tensors[parameter] = reader.parameter(rule, origins, parameter)
            elif not rule.optional:
                missing += lacking
    if missing:
        raise ConversionError(f"{file.name}: tensors of {what} are missing: {listed(missing)}")
    return tensors


class _Reader:
    """Makes parameters out of the tensors of one file."""

    def __init__(self, file: GgufFile, table: Architecture, rotation: Rotation | None) -> None:
        self._file = file
        self._table = table
        self._rotation = rotation

    def parameter(self, rule: TensorRule, origins: list[str], parameter: str) -> SourceTensor:
        tensors = [self._one(rule, self._file.tensors[origin], parameter) for origin in origins]
        if len(tensors) == 1:
            return tensors[0]
        first, second = tensors
        if rule.axis is not None:
            return self._stacked(rule.axis, first, second)
        if len(first.shape) != 3 or second.shape != first.shape:
            raise ConversionError(
                f"{self._file.name}: tensors {first.origin!r} {list(first.shape)} and {second.origin!r} "
                f"{list(second.shape)} make up {parameter!r}, expected two of one shape [experts, rows, columns]"
            )
        return _join_rows(parameter, first, second)

    def _one(self, rule: TensorRule, tensor: GgufTensor, parameter: str) -> SourceTensor:
        rotation = self._rotation
        grouped = rotation is not None and rotation.grouped_columns
        tiled = rule.tiled == "columns" and not grouped and self._heads() != 1
        if rotation is None or tensor.name not in rotation.names:
            return self._tiled_columns(tensor, parameter) if tiled else self._ordered(rule, tensor, parameter)
        if tiled or rule.shift or rule.axis is not None or rule.joined:
            raise ConversionError(
                f"{self._file.name}: tensor {tensor.name!r} is stored for rotated inputs, which is not defined for a "
                f"{'matrix of tiled columns' if tiled else 'parameter of its kind'}"
            )
        return _rotated(self._ordered(rule, tensor, parameter), rotation.signs[tensor.shape[-1]])

    def _ordered(self, rule: TensorRule, tensor: GgufTensor, parameter: str) -> SourceTensor:
        axis = None if rule.joined else rule.axis
        rows = _Rows(self._file, tensor, self._order(rule, tensor), rule, axis)
        changed = bool(rule.shift) or rule.log_decay or axis is not None
        blocked = tensor.type.encoding in BLOCK_ENCODINGS
        packed = blocked and len(tensor.shape) > 1 and not changed
        decoded = rule.shift or rule.log_decay or (blocked and not packed)
        shape = tensor.shape if axis is None else (*tensor.shape[:axis], 1, *tensor.shape[axis:])
        encoding = "fp32" if decoded else tensor.type.encoding
        return SourceTensor(parameter, shape, encoding, rows.values, rows.blocks if packed else None, tensor.name)

    def _order(self, rule: TensorRule, tensor: GgufTensor) -> RowOrder | None:
        """Where the rows lie; None for a tensor in its own order."""
        if rule.rotary_heads:
            heads = self._rotary_heads(rule, tensor)
            return lambda begin, end: interleaved_rows(begin, end, tensor.shape[0], heads)
        if rule.tiled in ("rows", "values") and self._heads() != 1:
            keys, values = self._count("ssm.group_count"), self._count("ssm.time_step_rank")
            first = 2 * keys * self._count("ssm.state_size") if rule.tiled == "values" else 0
            self._named(tensor, lambda: tiled_heads(0, 0, tensor.shape[0], keys, values, first))
            return lambda begin, end: tiled_heads(begin, end, tensor.shape[0], keys, values, first)
        return None

    def _heads(self) -> int:
        """Value heads for each key head: with one, nothing is tiled."""
        values, keys = self._count("ssm.time_step_rank"), self._count("ssm.group_count")
        if values % keys:
            raise ConversionError(
                f"{self._file.name}: metadata states {values} value heads (ssm.time_step_rank) for {keys} key heads "
                "(ssm.group_count), expected a multiple"
            )
        return values // keys

    def _tiled_columns(self, tensor: GgufTensor, parameter: str) -> SourceTensor:
        """A matrix whose columns are tiled: values in the model's order, blocks in the file's."""
        columns = tensor.shape[-1]
        keys, values = self._count("ssm.group_count"), self._count("ssm.time_step_rank")
        order = self._named(tensor, lambda: tiled_heads(0, columns, columns, keys, values))
        rows = _Rows(self._file, tensor, None, TensorRule(tensor.name, parameter), None)
        blocked = tensor.type.encoding in BLOCK_ENCODINGS and len(tensor.shape) > 1
        return SourceTensor(
            parameter,
            tensor.shape,
            tensor.type.encoding,
            lambda begin, end: rows.values(begin, end).index_select(-1, order),
            rows.blocks if blocked else None,
            tensor.name,
            fold=InputFold("input_columns", torch.argsort(order).to(torch.int32)) if blocked else None,
        )

    def _named(self, tensor: GgufTensor, order: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return order()
        except ConversionError as error:
            raise ConversionError(f"{self._file.name}: tensor {tensor.name!r} {list(tensor.shape)}: {error}") from error

    def _stacked(self, axis: int, first: SourceTensor, second: SourceTensor) -> SourceTensor:
        """Two tensors of one shape side by side along a new axis."""
        if first.shape != second.shape:
            raise ConversionError(
                f"{self._file.name}: tensors {first.origin!r} {list(first.shape)} and {second.origin!r} "
                f"{list(second.shape)} make up {first.name!r}, expected two of one shape"
            )

        def values(begin: int, end: int) -> torch.Tensor:
            parts = [tensor.values(begin, end) for tensor in (first, second)]
            return torch.stack(parts if alike else [part.to(torch.float32) for part in parts], dim=axis)

        alike = first.encoding == second.encoding
        shape = (*first.shape[:axis], 2, *first.shape[axis:])
        origin = f"{first.origin}, {second.origin}"
        return SourceTensor(first.name, shape, first.encoding if alike else "fp32", values, origin=origin)

    def _rotary_heads(self, rule: TensorRule, tensor: GgufTensor) -> int:
        stated = f"{self._table.name}.{rule.rotary_heads}" in self._file.metadata
        heads = self._count(rule.rotary_heads if stated else "attention.head_count")
        if len(tensor.shape) != 2 or tensor.shape[0] % (2 * heads):
            raise ConversionError(
                f"{self._file.name}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected a matrix of "
                f"{heads} heads of an even number of rows each"
            )
        return heads

    def _count(self, suffix: str) -> int:
        return int(self._file.metadata[f"{self._table.name}.{suffix}"])  # type: ignore[arg-type]  # checked before


class _Rows:
    """The reader of one parameter's rows: gathers them from the file and undoes what the converter did to the values."""

    def __init__(
        self, file: GgufFile, tensor: GgufTensor, order: RowOrder | None, rule: TensorRule, axis: int | None
    ) -> None:
        self._file = file
        self._tensor = tensor
        self._order = order
        self._rule = rule
        self._axis = axis

    def blocks(self, begin: int, end: int) -> torch.Tensor:
        rows = self._file.rows(self._tensor)
        kind, columns = self._tensor.type, self._tensor.shape[-1]
        gathered = rows[begin:end] if self._order is None else rows[self._order(begin, end).numpy()]
        return copied(gathered).view(-1, columns // kind.block_values * kind.block_bytes)

    def values(self, begin: int, end: int) -> torch.Tensor:
        if self._axis == 0:  # all of the tensor is one row, the only one
            return self._changed(read_values(self._file, self._tensor, 0, self._tensor.shape[0])).unsqueeze(0)[
                begin:end
            ]
        values = self._changed(self._ordered(begin, end))
        return values if self._axis is None else values.unsqueeze(self._axis)

    def _ordered(self, begin: int, end: int) -> torch.Tensor:
        tensor = self._tensor
        if self._order is None:
            return read_values(self._file, tensor, begin, end)
        order = self._order(begin, end)
        if len(tensor.shape) == 1:
            return read_values(self._file, tensor, 0, tensor.shape[0])[order]
        return decode_rows(tensor.type, self._file.rows(tensor)[order.numpy()], tensor.name, begin)

    def _changed(self, values: torch.Tensor) -> torch.Tensor:
        if self._rule.log_decay:
            if not bool((values < 0).all()):
                raise ConversionError(
                    f"{self._file.name}: tensor {self._tensor.name!r} holds {values.max().item()}, expected -exp(A_log), "
                    "which is negative"
                )
            return values.to(torch.float64).neg().log().to(torch.float32)
        return values.to(torch.float32) - self._rule.shift if self._rule.shift else values


def _rotated(tensor: SourceTensor, signs: torch.Tensor) -> SourceTensor:
    """A matrix that is stored for inputs H (s * x): its words with the signs s, or the values of the plain one."""
    wide = signs.to(torch.float32)

    def values(begin: int, end: int) -> torch.Tensor:
        return hadamard(tensor.values(begin, end).to(torch.float32)) * wide

    fold = InputFold("hadamard_signs", signs) if tensor.read_blocks is not None else None
    encoding = "fp32" if fold is None else tensor.encoding
    return replace(tensor, encoding=encoding, read_values=values, fold=fold)


def _join_rows(parameter: str, first: SourceTensor, second: SourceTensor) -> SourceTensor:
    """Two tensors [E, N, K] as one [E, N + N', K]; blocks stay blocks where both are of one type."""
    alike = first.encoding == second.encoding
    packed = alike and first.read_blocks is not None and second.read_blocks is not None
    shape = (first.shape[0], first.shape[1] + second.shape[1], first.shape[2])

    def values(begin: int, end: int) -> torch.Tensor:
        parts = [tensor.values(begin, end) for tensor in (first, second)]
        return torch.cat(parts if alike else [part.to(torch.float32) for part in parts], dim=1)

    def blocks(begin: int, end: int) -> torch.Tensor:
        parts = [tensor.blocks(begin, end).unflatten(0, (end - begin, -1)) for tensor in (first, second)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    blocked = any(tensor.read_blocks is not None for tensor in (first, second))
    unlike = f"mixed {first.encoding}+{second.encoding}" if blocked else "fp32"
    return SourceTensor(
        parameter,
        shape,
        first.encoding if alike else unlike,
        values,
        blocks if packed else None,
        f"{first.origin}, {second.origin}",
        members=() if packed else tuple(_interleaved(first, second)),
    )


def _interleaved(first: SourceTensor, second: SourceTensor) -> Iterator[SourceTensor]:
    """The matrices of two banks, expert by expert."""
    for expert in range(first.shape[0]):
        yield from (_matrix(bank, expert) for bank in (first, second))


def _matrix(bank: SourceTensor, expert: int) -> SourceTensor:
    """One matrix of a bank [E, N, K] as a tensor of its own; blocks are read for all of its rows at once."""
    _, rows, columns = bank.shape

    def values(begin: int, end: int) -> torch.Tensor:
        return bank.values(expert, expert + 1)[0, begin:end]

    def blocks(begin: int, end: int) -> torch.Tensor:
        return bank.blocks(expert, expert + 1)[begin:end]

    packed = bank.read_blocks is not None
    name = f"{bank.origin}[{expert}]"
    return SourceTensor(name, (rows, columns), bank.encoding, values, blocks if packed else None, name)


def refuse_undecodable(file: GgufFile, aside: set[str]) -> None:
    """Raise ConversionError for tensors, but those `aside`, of types that nothing here decodes, with what to do."""
    others = {name: tensor.type for name, tensor in file.tensors.items() if name not in aside}
    refused = [(name, kind) for name, kind in others.items() if not kind.encoding]
    if refused:
        lines = [f"\n  {name!r}: type {kind.number} ({kind.name}), {kind.advice}" for name, kind in refused]
        raise ConversionError(f"{file.name}: tensors of ggml types that cannot be decoded here:{''.join(lines)}")


def listed(names: list[str], limit: int = 12) -> str:
    """Names in a message: at most `limit` of them, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
