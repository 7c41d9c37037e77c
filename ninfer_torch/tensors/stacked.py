"""`StackedRows`: one weight out of row blocks of other tensors, in any formats and any order.

Transformers fuses matrices that an artifact may hold in several objects and formats: the heads of a query and of its
gate in turn (`q_proj`), query, key and value one after another (`in_proj_qkv`), the gates and ups of all experts
(`gate_up_proj`). A product runs each block's own kernel once and puts the outputs in order. Source of the fusions:
spec/parameters.md 4 and 12.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ninfer_torch.errors import LayoutError, UnsupportedOperation
from ninfer_torch.kernels.ops import POLICIES
from ninfer_torch.tensors.base import NinferTensor, count_rows, mark_parameter
from ninfer_torch.tensors.composed import ComposedTensor, new_composed
from ninfer_torch.tensors.direct import DirectTensor, as_block
from ninfer_torch.tensors.placement import Placement, Run, settle
from ninfer_torch.tensors.transformed import TransformedInput, transform_input

__all__ = ["StackedRows", "interleave_rows", "stack_rows"]


class StackedRows(ComposedTensor):
    """A matrix [N, K], or a bank [..., N, K], whose rows are runs of rows of `blocks`, in the order of `placement`.

    Blocks are NinferTensors of one width, device, compute dtype and policy, cut to the rows that are used; each is an
    attribute too (`block0`, ...). Views of rows are StackedRows over views of the blocks.
    """

    blocks: list[NinferTensor]
    placement: Placement

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.members), (self.placement, self.compute_dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> StackedRows:
        placement, dtype = context
        return _make([inner[_name(block)] for block in range(len(inner))], placement, outer_size, dtype)

    @property
    def composition(self) -> str:
        return f"{len(self.placement.runs)} runs of {len(self.blocks)} blocks"

    @property
    def way_to_store(self) -> str:
        return (
            "encode each of its .blocks as an object and bind the parameter by parts, in the order of .placement "
            "(spec/container.md 6)"
        )

    @property
    def structure(self) -> Hashable:
        return self.placement, tuple(self.shape), tuple(block.structure for block in self.blocks)

    def equal_words(self, other: NinferTensor) -> bool:
        if not isinstance(other, StackedRows) or other.shape != self.shape or other.placement != self.placement:
            return False
        return all(mine.equal_words(theirs) for mine, theirs in zip(self.blocks, other.blocks, strict=True))

    def over(self, inner: Mapping[str, Any], dtype: torch.dtype) -> StackedRows:
        return _make(list(inner.values()), self.placement, self.shape, dtype)

    def take_rows(self, begin: int, end: int, shape: Sequence[int]) -> StackedRows:
        return _assembled(self.blocks, self.placement.cut(begin, end), shape, self.compute_dtype)

    def gather_rows(self, index: torch.Tensor, shape: Sequence[int]) -> StackedRows:
        wanted: list[list[int]] = [[] for _ in self.blocks]
        runs = []
        for block, row in map(self.placement.locate, index.tolist()):
            runs.append(Run(block, len(wanted[block]), 1))
            wanted[block].append(row)
        blocks = [
            block.gather_rows(torch.tensor(rows, dtype=torch.int64, device=index.device), (len(rows), shape[-1]))
            for block, rows in zip(self.blocks, wanted, strict=True)
        ]
        return _assembled(blocks, runs, shape, self.compute_dtype)

    def take_columns(self, begin: int, end: int, shape: Sequence[int]) -> StackedRows:
        heights = self.placement.heights
        blocks = [
            block.take_columns(begin, end, (height, end - begin))
            for block, height in zip(self.blocks, heights, strict=True)
        ]
        return _make(blocks, self.placement, shape, self.compute_dtype)

    def with_shape(self, shape: Sequence[int]) -> StackedRows:
        return _make(self.blocks, self.placement, shape, self.compute_dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.placement.assemble([block.dequantize(dtype) for block in self.blocks], 0).reshape(self.shape)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = [None] * len(self.blocks) if bias is None else self.placement.distribute(bias)
        outputs = [block.product(x, share) for block, share in zip(self.blocks, biases, strict=True)]
        return self.placement.assemble(outputs, -1)

    def product_transposed(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.placement.distribute(x)
        return _sum([block.product_transposed(share) for block, share in zip(self.blocks, shares, strict=True)])

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Every block looks up every id, its own first row for an id of another block, so that shapes stay static."""
        block, row = self._locate(ids)
        found = [
            weight.look_up(torch.where(block == number, row, 0), dtype) for number, weight in enumerate(self.blocks)
        ]
        out = found[0]
        for number in range(1, len(found)):
            out = torch.where((block == number).unsqueeze(-1), found[number], out)
        return out

    def _locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and row in it of output rows `ids`, of the shape of `ids`."""
        starts, runs = self.placement.starts, self.placement.runs
        ends = torch.tensor(starts[1:], device=ids.device)
        shifts = [(run.block, run.begin - start) for run, start in zip(runs, starts[:-1], strict=True)]
        place = torch.where(ids >= 0, torch.bucketize(ids, ends, right=True), len(runs))
        try:
            block, shift = torch.tensor(shifts, device=ids.device).view(-1, 2)[place].unbind(-1)
        except IndexError as error:
            raise IndexError(f"embedding: ids must lie in [0, {self.placement.rows})") from error
        return block, ids + shift

    def expert_product(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        placement = self._expert_placement(offsets.shape[0])
        if placement is None:
            return super().expert_product(x, offsets)
        return placement.assemble([block.expert_product(x, offsets) for block in self._banks(offsets)], -1)

    def expert_product_transposed(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        placement = self._expert_placement(offsets.shape[0])
        if placement is None:
            return super().expert_product_transposed(x, offsets)
        shares = zip(self._banks(offsets), placement.distribute(x), strict=True)
        return _sum([bank.expert_product_transposed(share, offsets) for bank, share in shares])

    def _expert_placement(self, experts: int) -> Placement | None:
        """The placement of one expert's matrix over blocks that are banks themselves; None where experts differ."""
        runs, heights = self.placement.runs, self.placement.heights
        heights = tuple(height // experts for height in heights)
        if len(runs) == 1:
            return Placement((Run(0, 0, heights[0]),), heights)
        rounds = self.placement.rounds
        return Placement(runs[: len(runs) // experts], heights) if rounds and rounds % experts == 0 else None

    def _banks(self, offsets: torch.Tensor) -> list[NinferTensor]:
        experts, columns = offsets.shape[0], self.shape[-1]
        heights = self.placement.heights
        return [
            block.with_shape((experts, height // experts, columns))
            for block, height in zip(self.blocks, heights, strict=True)
        ]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        runs = tuple(tuple(run) for run in self.placement.runs)
        return rebuild_stacked, (self.blocks, runs, tuple(self.shape), self.compute_dtype, hasattr(self, "_is_param"))


def stack_rows(
    rows: Sequence[tuple[torch.Tensor, tuple[int, int] | None]], shape: Sequence[int] | None = None
) -> NinferTensor:
    """One weight [N, K] out of row ranges of other tensors, in the order given; nothing is copied.

    Each entry is a quantized tensor, or a frozen bf16 or fp32 one, [..., n, K], with the range (begin, end) of its
    rows, counted over its leading axes, or None for all of them. A tensor may come as often as needed: it is one
    block, and its kernel runs once, over all rows from the first used to the last. `shape` gives the result leading axes. The result computes in the dtype of the
    first quantized tensor, and under the narrowest policy of all (spec/container.md 7: products of one activation
    share a policy). Tensors that are all behind one transform are stacked behind it. A single range gives a view of
    its tensor. Raises LayoutError for a range outside its tensor, another width or a `shape` of another size, and
    UnsupportedOperation for a tensor that cannot be a block and for several devices.
    """
    tensors = list({id(tensor): tensor for tensor, _ in rows}.values())
    if not tensors:
        raise LayoutError("stack_rows: expected at least one range of rows, found none")
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    columns = tensors[0].shape[-1]
    runs = [_checked_run(numbers[id(tensor)], tensor, given, columns) for tensor, given in rows]
    total = sum(run.length for run in runs)
    size = (total, columns) if shape is None else tuple(shape)
    if len(size) < 2 or size[-1] != columns or count_rows(size) != total:
        raise LayoutError(f"stack_rows: shape {list(size)} does not hold {total} rows of {columns} columns")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise UnsupportedOperation(
            f"stack_rows: blocks on several devices ({', '.join(sorted(devices))}); move them first"
        )
    transformed = _one_transform(tensors)
    if transformed is not None:
        stored = [(tensor.weight, given) for tensor, given in rows if isinstance(tensor, TransformedInput)]
        return transform_input(stack_rows(stored, size), transformed.role, transformed.vector)
    dtype = next((t.compute_dtype for t in tensors if isinstance(t, NinferTensor)), tensors[0].dtype)
    stacked = _assembled(_alike([as_block(tensor, dtype) for tensor in tensors]), runs, size, dtype)
    return stacked if len(stacked.placement.runs) > 1 else stacked.blocks[0].with_shape(size)


def interleave_rows(blocks: Sequence[tuple[torch.Tensor, int]], shape: Sequence[int] | None = None) -> NinferTensor:
    """One weight that takes so many rows of each tensor in turn until all are used up; see `stack_rows`.

    `interleave_rows([(query, D), (gate, D)])` is Qwen3.5's `q_proj`;
    `interleave_rows([(gates, IE), (ups, IE)], (E, 2 * IE, K))` is a bank of experts. Raises LayoutError for tensors
    that are not used up at the same turn.
    """
    turns = {divmod(count_rows(tensor.shape), max(count, 1)) for tensor, count in blocks}
    rounds, rest = next(iter(turns), (0, 0))
    if len(turns) != 1 or rest or any(count < 1 for _, count in blocks):
        found = ", ".join(f"{count} of {count_rows(tensor.shape)}" for tensor, count in blocks)
        raise LayoutError(f"interleave_rows: the tensors do not end at the same turn, found rows {found}")
    return stack_rows(
        [(tensor, (turn * count, (turn + 1) * count)) for turn in range(rounds) for tensor, count in blocks], shape
    )


def _checked_run(block: int, tensor: torch.Tensor, rows: tuple[int, int] | None, columns: int) -> Run:
    if tensor.dim() < 2 or tensor.shape[-1] != columns:
        raise LayoutError(f"stack_rows: a block of shape {list(tensor.shape)} has no rows of {columns} columns")
    height = count_rows(tensor.shape)
    begin, end = (0, height) if rows is None else rows
    if not 0 <= begin < end <= height:
        raise LayoutError(f"stack_rows: rows [{begin}, {end}) are none of a block of {height} rows")
    return Run(block, begin, end - begin)


def _alike(blocks: Sequence[NinferTensor]) -> list[NinferTensor]:
    """The blocks under one policy, the narrowest of the quantized ones."""
    bound = [block.policy for block in blocks if not isinstance(block, DirectTensor)]
    policy = min(bound, key=POLICIES.index, default=POLICIES[0])
    return [block if block.policy == policy else block.with_policy(policy) for block in blocks]


def _one_transform(tensors: Sequence[torch.Tensor]) -> TransformedInput | None:
    """One of `tensors` where all are behind one transform by one vector in memory, which then serves them all."""
    first = tensors[0]
    if not isinstance(first, TransformedInput):
        return None
    address = first.vector.data_ptr()
    alike = all(
        isinstance(t, TransformedInput) and t.role == first.role and t.vector.data_ptr() == address for t in tensors
    )
    return first if alike and address else None


def _name(block: int) -> str:
    return f"block{block}"


def _assembled(
    blocks: Sequence[NinferTensor], runs: Iterable[Run], shape: Sequence[int], dtype: torch.dtype
) -> StackedRows:
    """The stack of `runs` over the parts of `blocks` that they need."""
    columns = shape[-1]
    spans, placement = settle(runs)
    used = [blocks[span.block].take_rows(span.begin, span.end, (span.end - span.begin, columns)) for span in spans]
    if not used:  # no rows at all: an empty block keeps the width, format and device
        used, placement = [blocks[0].take_rows(0, 0, (0, columns))], Placement((Run(0, 0, 0),), (0,))
    return _make(used, placement, shape, dtype)


def _make(
    blocks: Sequence[NinferTensor], placement: Placement, shape: Sequence[int], dtype: torch.dtype
) -> StackedRows:
    inner = {_name(number): block for number, block in enumerate(blocks)}
    tensor: StackedRows = new_composed(StackedRows, inner, blocks[0].policy, shape, dtype)
    tensor.blocks, tensor.placement = list(blocks), placement
    return tensor


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def rebuild_stacked(
    blocks: Sequence[NinferTensor],
    runs: Iterable[tuple[int, int, int]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
) -> NinferTensor:
    """The inverse of pickling, and on torch's list of functions that `weights_only=True` may call."""
    heights = tuple(count_rows(block.shape) for block in blocks)
    placement = Placement(tuple(Run(*run) for run in runs), heights)
    return mark_parameter(_make(blocks, placement, shape, dtype), is_parameter)


torch.serialization.add_safe_globals([rebuild_stacked])
