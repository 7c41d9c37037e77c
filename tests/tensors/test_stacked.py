"""Weights stacked of row blocks of other tensors: each law compares with dense rows in float64."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ninfer_torch.errors import LayoutError, UnsupportedOperation
from ninfer_torch.tensors import (
    NinferTensor,
    PackedTensor,
    StackedRows,
    encode,
    interleave_rows,
    stack_rows,
    transform_input,
)
from ninfer_torch.tensors.placement import Placement, Run
from quantized import FAMILIES, QUANTIZED, check_a16, exact_product, random_weight

K = 256
Rows = list[tuple[torch.Tensor, tuple[int, int] | None]]

BLOCKS: tuple[torch.Tensor, ...] = (
    *(random_weight(name, 128, K, seed=seed) for seed, name in enumerate(FAMILIES)),
    random_weight("q2_g64_fp16", 40, K, seed=10),
    random_weight("t2_g128_fp16", 24, K, seed=11),
    random_weight("nvfp4", 256, K, divisors=2, seed=12)[100:200],
    torch.randn(16, K, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.randn(16, K, generator=torch.Generator().manual_seed(2)),
)


def dense(weight: torch.Tensor) -> torch.Tensor:
    values = weight.dequantize() if isinstance(weight, NinferTensor) else weight.float()
    return values.reshape(-1, values.shape[-1])


def dense_rows(rows: Sequence[tuple[torch.Tensor, tuple[int, int] | None]]) -> torch.Tensor:
    return torch.cat([dense(tensor)[slice(*(given or (None, None)))] for tensor, given in rows])


def interleaved(first: torch.Tensor, second: torch.Tensor, rows: int) -> torch.Tensor:
    """The dense `q_proj` of spec/parameters.md 4.2."""
    heads = [dense(weight).unflatten(0, (-1, rows)) for weight in (first, second)]
    return torch.stack(heads, 1).flatten(0, 2)


def q_proj(heads: int = 4, width: int = 32, columns: int = K) -> tuple[NinferTensor, torch.Tensor]:
    query = random_weight("q4_g64_fp16", heads * width, columns)
    gate = random_weight("q5_g64_fp16", heads * width, columns, seed=1)
    return interleave_rows([(query, width), (gate, width)]), interleaved(query, gate, width)


def qkv() -> tuple[NinferTensor, torch.Tensor]:
    rows: Rows = [(BLOCKS[0], (0, 64)), (BLOCKS[0], (64, 128)), (BLOCKS[4], None)]
    return stack_rows(rows), dense_rows(rows)


def scattered() -> tuple[NinferTensor, torch.Tensor]:
    """Every kind of block, in an order that is neither a concatenation nor rounds."""
    rows: Rows = [(block, (begin, begin + 5)) for begin in (7, 2) for block in BLOCKS]
    return stack_rows(rows), dense_rows(rows)


STACKS = {"q_proj": q_proj, "qkv": qkv, "scattered": scattered}
every_stack = pytest.mark.parametrize("make", STACKS.values(), ids=STACKS)
Make = Callable[[], tuple[NinferTensor, torch.Tensor]]


@st.composite
def row_ranges(draw: st.DrawFn) -> Rows:
    rows: Rows = []
    for block in draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=8)):
        begin = draw(st.integers(0, block.shape[0] - 1))
        rows.append((block, (begin, draw(st.integers(begin + 1, block.shape[0])))))
    return rows


@settings(max_examples=40, deadline=None)
@given(row_ranges(), st.data())
def test_any_placement_of_rows_is_the_dense_stack(rows: Rows, data: st.DataObject) -> None:
    weight, expected = stack_rows(rows).to(torch.float32), dense_rows(rows)
    count = expected.shape[0]
    assert torch.equal(weight.dequantize(), expected)
    x, bias, back = torch.randn(3, K), torch.randn(count), torch.randn(2, count)
    check_a16(F.linear(x, weight, bias), x.double() @ expected.double().T + bias.double(), K)
    check_a16(back @ weight, back.double() @ expected.double(), count)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), max_size=9)), dtype=torch.int64)
    assert torch.equal(F.embedding(ids, weight), expected[ids])
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    assert torch.equal(weight[begin:end].dequantize(), expected[begin:end])
    assert torch.equal(weight[ids].dequantize(), expected[ids])
    middle = weight[begin:end][: (end - begin) // 2]
    assert torch.equal(middle.dequantize(), expected[begin : begin + (end - begin) // 2])
    check_a16(F.linear(x, middle), x.double() @ dense(middle).double().T, K)


@settings(max_examples=60, deadline=None)
@given(row_ranges())
def test_distributing_is_the_inverse_of_assembling(rows: Rows) -> None:
    weight = stack_rows(rows)
    if isinstance(weight, StackedRows):
        values = torch.arange(1.0, weight.shape[0] + 1)
        shares = weight.placement.distribute(values)
        assert [share.numel() for share in shares] == list(weight.placement.heights)
        assert torch.equal(weight.placement.assemble(shares, -1), values)


@pytest.mark.parametrize("format", QUANTIZED)
def test_every_format_stacks_with_another(format: str) -> None:
    first, second = random_weight(format, 128, K), random_weight("q6_g64_fp16", 128, K, seed=1)
    weight = interleave_rows([(first, 32), (second, 32)])
    expected, x = interleaved(first, second, 32), torch.randn(4, K)
    assert torch.equal(weight.dequantize(), expected)
    check_a16(F.linear(x, weight), x.double() @ expected.double().T, K)


@every_stack
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_linear_meets_the_criterion(make: Make, dtype: torch.dtype) -> None:
    weight, expected = make()
    weight = weight.to(dtype)
    bias = torch.randn(weight.shape[0]).to(dtype)
    for shape in [(0, K), (1, K), (K,), (5, K), (2, 3, K)]:
        x = torch.randn(shape).to(dtype)
        y = F.linear(x, weight, bias)
        assert y.dtype == dtype and y.shape == (*shape[:-1], weight.shape[0])
        check_a16(y, x.double() @ expected.double().T + bias.double(), K)


@every_stack
def test_a_block_runs_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = make()
    runs = []
    product = PackedTensor.product

    def counted(self: PackedTensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        runs.append(self.format)
        return product(self, x, bias)

    monkeypatch.setattr(PackedTensor, "product", counted)
    F.linear(torch.randn(2, K), weight)
    assert isinstance(weight, StackedRows)
    assert sorted(runs) == sorted(
        name for block in weight.blocks for name in block.formats if name not in ("bf16", "fp32")
    )
    assert len(weight.blocks) == len({id(block) for block in weight.blocks}) <= len(BLOCKS)


@every_stack
def test_gradients_reach_activations_and_bias(make: Make) -> None:
    weight, expected = make()
    x, bias = torch.randn(3, K, requires_grad=True), torch.randn(weight.shape[0], requires_grad=True)
    upstream = torch.randn(3, weight.shape[0])
    F.linear(x, weight, bias).backward(upstream)
    assert x.grad is not None and bias.grad is not None
    check_a16(x.grad, upstream.double() @ expected.double(), weight.shape[0])
    torch.testing.assert_close(bias.grad, upstream.sum(0))


def test_gradients_of_gradients() -> None:
    first, second = random_weight("q4_g64_fp16", 4, 64), random_weight("q8_g32_fp16", 4, 64)
    weight = interleave_rows([(first, 2), (second, 2)]).to(torch.float64)
    x = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.linear(x, weight), x)
    assert torch.autograd.gradgradcheck(lambda x: F.linear(x, weight) ** 2, x)


@every_stack
def test_compiled_equals_eager_with_any_batch(make: Make) -> None:
    torch._dynamo.reset()
    weight, expected = make()
    layer = nn.Linear(K, weight.shape[0])
    layer.weight = nn.Parameter(weight, requires_grad=False)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    compiled(torch.randn(5, K, requires_grad=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 8):
            x = torch.randn(rows, K, requires_grad=True)
            y = compiled(x)
            torch.testing.assert_close(y, layer(x), rtol=1e-6, atol=1e-5)
            (grad,) = torch.autograd.grad(y.sum(), x)
            check_a16(grad, torch.ones(rows, weight.shape[0]).double() @ expected.double(), weight.shape[0])


@every_stack
def test_compiled_views_and_lookups(make: Make) -> None:
    torch._dynamo.reset()
    weight, expected = make()
    ids = torch.tensor([[0, 9], [33, 40]])

    def use(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, weight[3:70]), F.embedding(ids, weight)

    x = torch.randn(2, K)
    y, rows = torch.compile(use, fullgraph=True)(x, weight)
    check_a16(y, x.double() @ expected[3:70].double().T, K)
    assert torch.equal(rows, expected[ids])


@every_stack
def test_modes_and_autocast(make: Make) -> None:
    weight, _ = make()
    x = torch.randn(3, K, requires_grad=True)
    expected = F.linear(x, weight)
    with torch.inference_mode():
        assert torch.equal(F.linear(x, weight), expected)
        assert torch.equal(x @ weight.T, expected)
        assert torch.equal(weight[3:50].dequantize(), weight.dequantize()[3:50])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, weight)
    assert torch.equal(y, F.linear(x.bfloat16(), weight.to(torch.bfloat16)))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w[5:77],
    "all rows": lambda w: w[:],
    "no rows": lambda w: w[9:9],
    "negative": lambda w: w[-60:-1],
    "view of a view": lambda w: w[10:80][30:61],
    "split": lambda w: w.split([1, 40, w.shape[0] - 41])[1],
    "gather": lambda w: w[torch.tensor([30, 2, 2, 60])],
    "mask": lambda w: w[torch.arange(w.shape[0]) % 7 == 3],
    "gather of a view": lambda w: w[30:70][torch.tensor([0, 39, 5])],
    "view of a gather": lambda w: w[torch.arange(60, 0, -1)][10:30],
    "bank": lambda w: w.view(2, -1, w.shape[-1]),
    "matrix of a bank": lambda w: w.view(2, -1, w.shape[-1])[1],
    "matrices": lambda w: w.view(4, -1, w.shape[-1])[1:3],
    "bank gather": lambda w: w.view(4, -1, w.shape[-1])[torch.tensor([2, 0, 2])],
    "flattened": lambda w: w.view(2, -1, w.shape[-1]).reshape(-1, w.shape[-1]),
    "columns": lambda w: w[:, : w.shape[-1]],
}


@pytest.mark.parametrize("make", [q_proj, qkv, lambda: (s := scattered()) and (s[0][:96], s[1][:96])])
def test_views_commute_with_decoding(make: Make) -> None:
    weight, expected = make()
    x = torch.randn(3, K)
    for name, view in VIEWS.items():
        found = view(weight)
        assert isinstance(found, StackedRows) and torch.equal(found.dequantize(), view(expected)), name
        if found.dim() == 2:
            check_a16(F.linear(x, found), exact_product(x, found), K)


def test_columns_of_whole_groups() -> None:
    weight, expected = q_proj()
    assert torch.equal(weight[:, 64:192].dequantize(), expected[:, 64:192])
    with pytest.raises(LayoutError, match="whole groups"):
        weight[:, 32:64]


def test_a_row_view_copies_nothing_and_forgets_what_it_does_not_need() -> None:
    weight, _ = qkv()
    storages = {plane.untyped_storage().data_ptr() for plane in weight.planes.values()}
    view = weight[70:100]
    assert isinstance(view, StackedRows) and [block.shape[0] for block in view.blocks] == [30]
    assert {plane.untyped_storage().data_ptr() for plane in view.planes.values()} <= storages


@every_stack
def test_what_hosts_do_to_a_parameter(make: Make) -> None:
    weight, expected = make()
    parameter = nn.Parameter(weight, requires_grad=False)
    for again in (
        type(parameter)(parameter.data, requires_grad=False),
        nn.Parameter(parameter, requires_grad=False),
        torch.empty_like(weight).copy_(weight),
        weight.clone(),
        copy.copy(parameter),
        copy.deepcopy(parameter),
        pickle.loads(pickle.dumps(parameter)),
        weight.placed("cpu", torch.float32),
    ):
        assert type(again).__name__ in ("StackedRows", "Parameter") and isinstance(again, StackedRows)
        assert torch.equal(again, weight) and torch.equal(again.dequantize(), expected)
        assert again.shape == weight.shape and not again.requires_grad
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    assert isinstance(pickle.loads(pickle.dumps(parameter)), nn.Parameter)
    assert parameter.data_ptr() == weight.blocks[0].data_ptr() != 0
    assert not weight.is_pinned()
    assert weight.nbytes == sum(block.nbytes for block in weight.blocks)
    assert weight.numel() * weight.element_size() == weight.nbytes
    assert f"shape={tuple(weight.shape)}" in repr(weight) and all(name in repr(weight) for name in weight.formats)


@every_stack
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_back(make: Make, assign: bool) -> None:
    weight, expected = make()
    layer, target = (nn.Linear(K, weight.shape[0], bias=False) for _ in range(2))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    target.weight = copy.deepcopy(layer.weight)
    for plane in target.weight.planes.values():
        plane.zero_()
    assert not torch.equal(target.weight, weight)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    assert torch.equal(target.weight, weight) and torch.equal(target.weight.dequantize(), expected)


@every_stack
def test_casts_and_moves_leave_the_words(make: Make) -> None:
    weight, expected = make()
    layer = nn.Linear(K, weight.shape[0])
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(layer.weight.dequantize(), expected)
    assert {block.dtype for block in layer.weight.blocks} == {torch.bfloat16}
    layer.to("meta")
    assert layer.weight.device.type == "meta" and isinstance(layer.weight, StackedRows)
    with pytest.raises(UnsupportedOperation, match="floating dtype"):
        weight.to(torch.int8)


def test_the_narrowest_policy_holds() -> None:
    free, bound = random_weight("q4_g64_fp16", 8, K).with_policy("AllowA8"), random_weight("q4_g64_fp16", 8, K)
    plain = torch.randn(4, K)
    assert stack_rows([(free, None), (plain, None)]).policy == "AllowA8"
    weight = stack_rows([(free, None), (bound, None), (plain, None)])
    assert weight.policy == "A16Only" and {block.policy for block in weight.blocks} == {"A16Only"}
    wide = weight.with_policy("AllowA4")
    assert {block.policy for block in wide.blocks} == {"AllowA4"} and wide[3:9].policy == "AllowA4"
    assert wide.data_ptr() == weight.data_ptr() and torch.equal(wide, weight)


def test_ranges_that_meet_again_are_views() -> None:
    parent = random_weight("q5_g64_fp16", 64, K)
    rows = [(parent, (begin, begin + 8)) for begin in range(16, 48, 8)]
    weight = stack_rows(rows, (2, 16, K))
    assert isinstance(weight, PackedTensor) and weight.shape == (2, 16, K)
    assert torch.equal(weight, parent[16:48].view(2, 16, K))


def test_repeated_rows() -> None:
    parent, other = random_weight("q5_g64_fp16", 16, K), random_weight("gguf_q8_0", 8, K)
    rows = [(parent, (0, 10)), (other, None), (parent, (4, 16)), (parent, (9, 12))]
    weight, expected = stack_rows(rows), dense_rows(rows)
    x, bias = torch.randn(2, K).bfloat16(), torch.randn(expected.shape[0]).bfloat16()
    check_a16(F.linear(x, weight.to(torch.bfloat16), bias), x.double() @ expected.double().T + bias.double(), K)
    assert torch.equal(F.embedding(torch.arange(expected.shape[0]), weight), expected)


def test_equality_is_of_words_and_order() -> None:
    weight, _ = q_proj()
    first, second = random_weight("q4_g64_fp16", 8, K), random_weight("q5_g64_fp16", 8, K)
    one, two = stack_rows([(first, None), (second, None)]), stack_rows([(second, None), (first, None)])
    assert torch.equal(one, stack_rows([(first, None), (second, None)]))
    assert not torch.equal(one, two) and not torch.equal(one, one.dequantize()) and not torch.equal(one, first)
    assert torch.equal(weight[0:64], weight.clone()[0:64])


REFUSED: dict[str, Callable[[NinferTensor], object]] = {
    "sum": lambda w: w.sum(),
    "add": lambda w: w + 1,
    "step": lambda w: w[::2],
    "flat": lambda w: w.view(-1),
    "row": lambda w: w[0],
    "cat": lambda w: torch.cat([w, w]),
    "copy of another order": lambda w: w.copy_(interleave_rows([(b, 16) for b in w.blocks])),
    "copy of one format": lambda w: w.copy_(random_weight("q4_g64_fp16", *w.shape)),
    "copy of values": lambda w: w.copy_(torch.zeros(w.shape)),
    "gradients": lambda w: w.requires_grad_(True),
    "other activations": lambda w: F.linear(torch.randn(2, K).bfloat16(), w),
    "encode": encode,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_defined_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedOperation):
        REFUSED[name](q_proj()[0])


def test_encoding_tells_how_to_store() -> None:
    weight, _ = q_proj()
    with pytest.raises(UnsupportedOperation, match=r"blocks.*parts.*placement"):
        encode(weight)
    rebuilt = torch.cat(
        [dense(weight.blocks[run.block])[run.begin : run.begin + run.length] for run in weight.placement.runs]
    )
    assert torch.equal(rebuilt, weight.dequantize())


@pytest.mark.parametrize(
    ("rows", "shape", "error"),
    [
        ([], None, "at least one"),
        ([(BLOCKS[0], (0, 129))], None, r"rows \[0, 129\)"),
        ([(BLOCKS[0], (5, 5))], None, r"rows \[5, 5\)"),
        ([(BLOCKS[0], None), (torch.randn(4, 64), None)], None, "256 columns"),
        ([(BLOCKS[0], None), (BLOCKS[1], None)], (3, 85, K), "256 rows"),
        ([(BLOCKS[0], None), (torch.randn(4, K).half(), None)], None, "bf16 or fp32"),
        ([(BLOCKS[0], None), (torch.randn(4, K).int(), None)], None, "bf16 or fp32"),
        ([(BLOCKS[0], None), (torch.randn(4, K).requires_grad_(), None)], None, "requires gradients"),
        ([(BLOCKS[0], None), (BLOCKS[1].to("meta"), None)], None, "several devices"),
    ],
)
def test_mistakes_are_named(rows: Rows, shape: tuple[int, ...] | None, error: str) -> None:
    with pytest.raises((LayoutError, UnsupportedOperation), match=error):
        stack_rows(rows, shape)


@pytest.mark.parametrize("counts", [(32, 16), (0, 32), (48, 48)])
def test_turns_must_end_together(counts: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="same turn"):
        interleave_rows([(BLOCKS[0], counts[0]), (BLOCKS[1], counts[1])])


@pytest.mark.parametrize("ids", [[-1], [0, 256], [1 << 40]])
def test_lookups_outside_the_table_are_refused(ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"\[0, 256\)"):
        F.embedding(torch.tensor(ids), q_proj()[0])


def test_placements_of_rounds_need_no_slices() -> None:
    weight, _ = q_proj(heads=4)
    assert weight.placement.rounds == 4 and len(weight.placement.runs) == 8
    assert qkv()[0].placement.rounds == 1 and scattered()[0].placement.rounds is None
    assert Placement((Run(0, 0, 2), Run(1, 0, 2), Run(0, 2, 2)), (4, 2)).rounds is None
    assert hash(weight.placement) == hash(q_proj(heads=4)[0].placement)


def test_stacks_of_transformed_weights() -> None:
    """Blocks behind transforms of their own multiply their own inputs; behind one, the stack is."""
    query, key = random_weight("gguf_q8_0", 16, K), random_weight("q4_g64_fp16", 16, K)
    columns = torch.randperm(K, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    mixed = stack_rows([(transform_input(query, "input_columns", columns), (4, 16)), (key, None)])
    expected = torch.cat([torch.empty(16, K).index_copy_(1, columns.long(), query.dequantize())[4:], key.dequantize()])
    x = torch.randn(3, K)
    assert torch.equal(mixed.dequantize(), expected) and isinstance(mixed, StackedRows)
    check_a16(F.linear(x, mixed), x.double() @ expected.double().T, K)
    shared = stack_rows([(transform_input(w, "input_columns", columns), None) for w in (query, key)])
    assert not isinstance(shared, StackedRows) and isinstance(shared.weight, StackedRows)
    assert torch.equal(shared.dequantize()[4:16], expected[:12])
    assert torch.equal(pickle.loads(pickle.dumps(mixed)), mixed)
