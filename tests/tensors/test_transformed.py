"""Weights stored for transformed inputs, against plain weights made with written-out matrices in float64."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from golden import golden, load_json, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.errors import FormatError, LayoutError, UnsupportedOperation
from ninfer_torch.kernels.rotation import hadamard
from ninfer_torch.tensors import (
    NinferTensor,
    StackedRows,
    TransformedInput,
    encode,
    interleave_rows,
    stack_rows,
    transform_input,
)
from quantized import QUANTIZED, check_a16, random_weight

N, K = 128, 2048


@functools.cache
def sylvester() -> torch.Tensor:
    """The normalised 1024 x 1024 matrix, written out by its definition."""
    index = torch.arange(1024)
    both, parity = index.view(-1, 1) & index, torch.zeros(1024, 1024, dtype=torch.int64)
    for bit in range(10):
        parity ^= both >> bit & 1
    return (1 - 2 * parity).double() / 32


def random_signs(columns: int, seed: int = 0) -> torch.Tensor:
    draw = torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(seed))
    return (2 * draw - 1).bfloat16()


def random_columns(columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def plain_rows(stored: torch.Tensor, role: str, vector: torch.Tensor) -> torch.Tensor:
    """The plain weight of stored values [..., K], in float64 (spec/container.md 7)."""
    stored = stored.double()
    if role == "hadamard_signs":
        mixed = stored.unflatten(-1, (-1, 1024)) @ sylvester()
        return mixed.flatten(-2) * vector.double()
    plain = torch.empty_like(stored)
    for column, source in enumerate(vector.tolist()):
        plain[..., source] = stored[..., column]
    return plain


VECTORS: dict[str, Callable[[int], torch.Tensor]] = {"hadamard_signs": random_signs, "input_columns": random_columns}
every_role = pytest.mark.parametrize("role", VECTORS)


def transformed(role: str, format: str = "t2_g128_fp16", rows: int = N) -> tuple[TransformedInput, torch.Tensor]:
    """A weight behind a transform, and its plain values in float64."""
    stored, vector = random_weight(format, rows, K), VECTORS[role](K)
    return transform_input(stored, role, vector), plain_rows(stored.dequantize(), role, vector)


def stacked(role: str) -> tuple[TransformedInput, torch.Tensor]:
    """A stack of two formats behind one transform."""
    blocks = [random_weight("t2_g128_fp16", 64, K), random_weight("gguf_q4_k", 64, K)]
    weight = interleave_rows([(block, 16) for block in blocks])
    vector = VECTORS[role](K)
    values = torch.stack([block.dequantize().view(4, 16, K) for block in blocks], 1).reshape(N, K)
    return transform_input(weight, role, vector), plain_rows(values, role, vector)


def check_close(found: torch.Tensor, plain: torch.Tensor) -> None:
    """Within 1e-6 of each row's norm."""
    error = (found.double() - plain).flatten(0, -2).norm(dim=-1)
    assert bool((error <= 1e-6 * plain.flatten(0, -2).norm(dim=-1)).all())


def test_the_transform_is_the_written_out_matrix_and_its_own_inverse() -> None:
    values = torch.randn(3, 2, 2048, dtype=torch.float64)
    expected = (values.unflatten(-1, (-1, 1024)) @ sylvester()).flatten(-2)
    torch.testing.assert_close(hadamard(values), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard(hadamard(values)), values, rtol=1e-12, atol=1e-12)
    whole = torch.randint(-8, 9, (4, 1024)).float()
    assert torch.equal(hadamard(whole).double(), whole.double() @ sylvester())
    assert torch.equal(hadamard(whole.T.contiguous().T), hadamard(whole))


def test_the_transform_is_an_operator_like_torch_s_own() -> None:
    values = torch.randn(3, 2048, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.ninfer.hadamard.default, (values,))
    assert torch.autograd.gradcheck(hadamard, values[:1], fast_mode=True)


def test_the_transform_refuses_what_it_would_cut_or_round() -> None:
    with pytest.raises(LayoutError, match="1024"):
        hadamard(torch.randn(2, 1000))
    with pytest.raises(UnsupportedOperation, match="bfloat16"):
        hadamard(torch.randn(2, 1024).bfloat16())
    assert hadamard(torch.empty(0, 1024)).shape == (0, 1024)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1023), st.integers(0, 1023))
def test_a_unit_vector_gives_a_row_of_the_matrix(row: int, column: int) -> None:
    unit = torch.zeros(1024)
    unit[row] = 1
    assert hadamard(unit)[column] == (-1) ** (row & column).bit_count() / 32


@pytest.mark.parametrize("format", QUANTIZED)
@every_role
def test_every_format_multiplies_as_its_plain_weight(role: str, format: str) -> None:
    weight, plain = transformed(role, format)
    check_close(weight.dequantize(), plain)
    x, bias = torch.randn(3, K), torch.randn(N)
    check_a16(F.linear(x, weight, bias), x.double() @ plain.T + bias.double(), K)
    ids = torch.tensor([[5, 0], [N - 1, 5]])
    assert torch.equal(F.embedding(ids, weight), weight.dequantize()[ids])


def test_a_gather_is_exact() -> None:
    weight, plain = transformed("input_columns", "gguf_q6_k")
    assert torch.equal(weight.dequantize().double(), plain)


@pytest.mark.parametrize("make", [transformed, stacked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@every_role
def test_linear_meets_the_criterion(role: str, dtype: torch.dtype, make: Callable[..., tuple]) -> None:
    weight, plain = make(role)
    weight = weight.to(dtype)
    bias = torch.randn(N).to(dtype)
    for shape in [(0, K), (1, K), (K,), (15, K), (2, 3, K)]:
        x = torch.randn(shape).to(dtype)
        y = F.linear(x, weight, bias)
        assert y.dtype == dtype and y.shape == (*shape[:-1], N)
        check_a16(y, x.double() @ plain.T + bias.double(), K)
    rows = F.embedding(torch.tensor([3, 9]), weight)
    assert rows.dtype == dtype and torch.equal(rows, weight.dequantize(dtype)[[3, 9]])


@every_role
def test_gradients_reach_the_activations(role: str) -> None:
    weight, plain = stacked(role)
    x, upstream = torch.randn(3, K, requires_grad=True), torch.randn(3, N)
    F.linear(x, weight).backward(upstream)
    assert x.grad is not None
    check_a16(x.grad, upstream.double() @ plain, N)
    check_a16(upstream @ weight, upstream.double() @ plain, N)
    check_a16(x.detach() @ weight.T, x.detach().double() @ plain.T, K)


@every_role
def test_gradients_of_gradients(role: str) -> None:
    stored = random_weight("t2_g128_fp16", 3, 1024)
    weight = transform_input(stored, role, VECTORS[role](1024)).to(torch.float64)
    x = torch.randn(1, 1024, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.linear(x, weight), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: F.linear(x, weight) ** 2, x, fast_mode=True)


@every_role
def test_compiled_equals_eager_with_any_batch(role: str) -> None:
    torch._dynamo.reset()
    weight, plain = stacked(role)
    layer, table = nn.Linear(K, N), nn.Embedding(N, K)
    layer.weight = table.weight = nn.Parameter(weight, requires_grad=False)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    compiled(torch.randn(5, K, requires_grad=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 8):
            x = torch.randn(rows, K, requires_grad=True)
            y = compiled(x)
            check_a16(y, x.double() @ plain.T + layer.bias.double(), K)
            (grad,) = torch.autograd.grad(y.sum(), x)
            check_a16(grad, torch.ones(rows, N).double() @ plain, N)
    ids = torch.tensor([3, 77])
    torch.testing.assert_close(torch.compile(table, fullgraph=True)(ids), table(ids), rtol=1e-6, atol=1e-6)


@every_role
def test_modes_and_autocast(role: str) -> None:
    weight, _ = stacked(role)
    x = torch.randn(3, K, requires_grad=True)
    expected = F.linear(x, weight)
    with torch.inference_mode():
        assert torch.equal(F.linear(x, weight), expected)
        assert torch.equal(weight[3:50].dequantize(), weight.dequantize()[3:50])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, weight)
    assert torch.equal(y, F.linear(x.bfloat16(), weight.to(torch.bfloat16)))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w[5:77],
    "no rows": lambda w: w[9:9],
    "view of a view": lambda w: w[10:80][30:61],
    "split": lambda w: w.split([1, 40, 87])[1],
    "gather": lambda w: w[torch.tensor([30, 2, 2, 60])],
    "bank": lambda w: w.view(2, -1, w.shape[-1]),
    "matrix of a bank": lambda w: w.view(2, -1, w.shape[-1])[1],
    "whole columns": lambda w: w[:, : w.shape[-1]],
}


@pytest.mark.parametrize("make", [transformed, stacked])
@every_role
def test_views_commute_with_decoding(role: str, make: Callable[..., tuple]) -> None:
    weight, plain = make(role)
    for name, view in VIEWS.items():
        found = view(weight)
        assert isinstance(found, TransformedInput), name
        check_close(found.dequantize(), view(plain))
        assert torch.equal(found.vector, weight.vector), name


@pytest.mark.parametrize("make", [transformed, stacked])
@every_role
def test_columns_are_never_cut(role: str, make: Callable[..., tuple]) -> None:
    weight, _ = make(role)
    with pytest.raises(UnsupportedOperation, match=rf"behind {role}.*dequantize"):
        weight[:, :1024]


@pytest.mark.parametrize("make", [transformed, stacked])
@every_role
def test_what_hosts_do_to_a_parameter(role: str, make: Callable[..., tuple]) -> None:
    weight, _ = make(role)
    parameter = nn.Parameter(weight, requires_grad=False)
    for again in (
        type(parameter)(parameter.data, requires_grad=False),
        torch.empty_like(weight).copy_(weight),
        weight.clone(),
        copy.copy(parameter),
        copy.deepcopy(parameter),
        pickle.loads(pickle.dumps(parameter)),
        weight.placed("cpu", torch.float32),
    ):
        assert isinstance(again, TransformedInput) and again.role == role and torch.equal(again, weight)
        assert torch.equal(again.dequantize(), weight.dequantize()) and again.shape == weight.shape
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    assert parameter.data_ptr() == weight.weight.data_ptr() != 0
    assert weight.nbytes == weight.weight.nbytes + weight.vector.nbytes
    assert role in repr(weight) and all(name in repr(weight) for name in weight.formats)
    policy = weight.with_policy("AllowA8")
    assert policy.policy == policy.weight.policy == policy[3:5].policy == "AllowA8"
    layer = nn.Linear(K, N, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bfloat16()
    assert layer.weight.dtype == layer.weight.weight.dtype == torch.bfloat16
    assert layer.weight.vector.dtype == weight.vector.dtype and torch.equal(layer.weight, weight)
    layer.to("meta")
    assert layer.weight.device.type == layer.weight.vector.device.type == "meta"


@every_role
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_back(role: str, assign: bool) -> None:
    weight, _ = stacked(role)
    layer, target = (nn.Linear(K, N, bias=False) for _ in range(2))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    target.weight = copy.deepcopy(layer.weight)
    for plane in target.weight.planes.values():
        plane.zero_()
    assert not torch.equal(target.weight, weight)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    assert torch.equal(target.weight, weight)


@every_role
def test_a_pickled_vector_leaves_its_file_behind(role: str) -> None:
    everything = torch.cat([VECTORS[role](K), torch.zeros(1 << 20, dtype=VECTORS[role](K).dtype)])
    weight = transform_input(random_weight("t2_g128_fp16", 2, K), role, everything[:K])
    assert len(pickle.dumps(weight)) < 1 << 17


@every_role
def test_equality_is_of_words_and_transform(role: str) -> None:
    weight, _ = transformed(role)
    assert torch.equal(weight, transformed(role)[0]) and not torch.equal(weight, weight.weight)
    other = transform_input(weight.weight, role, VECTORS[role](K).flip(0))
    assert not torch.equal(weight, other)
    with pytest.raises(UnsupportedOperation, match="geometry"):
        weight.copy_(transformed({"hadamard_signs": "input_columns"}.get(role, "hadamard_signs"))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_direct_matrix_rotates_too(dtype: torch.dtype) -> None:
    values, signs = torch.randn(8, K).to(dtype), random_signs(K)
    weight = transform_input(values, "hadamard_signs", signs)
    plain, x = plain_rows(values, "hadamard_signs", signs), torch.randn(3, K).to(dtype)
    assert weight.dtype == dtype
    check_close(weight.dequantize(), plain)
    check_a16(F.linear(x, weight), x.double() @ plain.T, K)


@every_role
def test_banks_multiply_by_expert(role: str) -> None:
    experts, rows, ends = 4, 32, [3, 3, 5, 9]
    stored, vector = [random_weight(name, 64, K) for name in ("t2_g128_fp16", "q4_g64_fp16")], VECTORS[role](K)
    bank = interleave_rows([(block, 16) for block in stored], (experts, rows, K))
    weight = transform_input(bank, role, vector)
    plain = plain_rows(bank.dequantize(), role, vector)
    x, offsets = torch.randn(10, K, requires_grad=True), torch.tensor(ends, dtype=torch.int32)
    expected = torch.zeros(10, rows, dtype=torch.float64)
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        expected[begin:end] = x.detach()[begin:end].double() @ plain[expert].T
    y = weight.expert_product(x, offsets)
    check_a16(y, expected, K)
    check_a16(torch._grouped_mm(x, weight.mT, offs=offsets), expected, K)
    (grad,) = torch.autograd.grad(y.sum(), x)
    check_a16(grad[5:9], torch.ones(4, rows).double() @ plain[3], rows)
    check_close(weight[2].dequantize(), plain[2])


def test_stacks_behind_one_transform_transform_once() -> None:
    signs, matrices = random_signs(K), [random_weight(name, 16, K) for name in ("t2_g128_fp16", "q4_g64_fp16")]
    weight = stack_rows([(transform_input(matrix, "hadamard_signs", signs), None) for matrix in matrices])
    assert isinstance(weight, TransformedInput) and isinstance(weight.weight, StackedRows)
    other = transform_input(matrices[1], "hadamard_signs", random_signs(K, seed=1))
    mixed = stack_rows([(transform_input(matrices[0], "hadamard_signs", signs), None), (other, None)])
    assert isinstance(mixed, StackedRows)
    for found, last in ((weight, signs), (mixed, random_signs(K, seed=1))):
        plain = torch.cat(
            [plain_rows(m.dequantize(), "hadamard_signs", s) for m, s in zip(matrices, (signs, last), strict=True)]
        )
        x = torch.randn(2, K).bfloat16()
        check_close(found.dequantize(), plain)
        check_a16(F.linear(x, found.to(torch.bfloat16)), x.double() @ plain.T, K)


WEIGHT = random_weight("t2_g128_fp16", 4, 1024)
SIGNS, COLUMNS = random_signs(1024), random_columns(1024)


@pytest.mark.parametrize(
    ("weight", "role", "vector", "error"),
    [
        (WEIGHT, "rotation", SIGNS, "hadamard_signs, input_columns"),
        (WEIGHT, "hadamard_signs", SIGNS[:512], "one value per column"),
        (WEIGHT, "hadamard_signs", SIGNS.view(1, 1024), "one value per column"),
        (WEIGHT, "hadamard_signs", SIGNS.int(), "floating signs"),
        (random_weight("t2_g128_fp16", 4, 512), "hadamard_signs", SIGNS[:512], "multiple of 1024"),
        (WEIGHT, "hadamard_signs", torch.cat([SIGNS[:9], 2 * SIGNS[9:]]), "at 9"),
        (WEIGHT, "hadamard_signs", torch.cat([SIGNS[:1023], torch.tensor([float("nan")])]), "nan at 1023"),
        (WEIGHT, "input_columns", COLUMNS.float(), "int32 or int64"),
        (WEIGHT, "input_columns", COLUMNS.clamp(max=1022), "each of 0..1023 once"),
        (WEIGHT, "input_columns", COLUMNS - 1, "each of 0..1023 once"),
        (transform_input(WEIGHT, "input_columns", COLUMNS), "hadamard_signs", SIGNS, "no order"),
        (WEIGHT, "hadamard_signs", SIGNS.to("meta"), "move one"),
        (torch.randn(4, 1024).half(), "hadamard_signs", SIGNS, "bf16 or fp32"),
    ],
)
def test_mistakes_are_named(weight: torch.Tensor, role: str, vector: torch.Tensor, error: str) -> None:
    with pytest.raises((FormatError, LayoutError, UnsupportedOperation), match=error):
        transform_input(weight, role, vector)


@every_role
def test_encoding_tells_how_to_store(role: str) -> None:
    with pytest.raises(UnsupportedOperation, match=rf"weight.*vector.*{role}"):
        encode(transformed(role)[0])


def test_plain_weights_are_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = stacked("hadamard_signs")
    whole = weight.dequantize()
    monkeypatch.setattr("ninfer_torch.tensors.transformed._CHUNK", 5000)
    assert torch.equal(weight.dequantize(), whole)


GOLDEN_MODELS = [("qwen3_5_rotated", "rotated"), ("qwen3_5_gguf_columns", "gguf_columns")]


@pytest.mark.parametrize(("model", "name"), GOLDEN_MODELS)
def test_golden_plain_weights(model: str, name: str) -> None:
    folder = golden("ninfer", "models", model)
    index = load_json(folder / "index.json")["recipes"][name]
    rows, hashes = load_tensors(folder / "expected.safetensors"), index["effective_sha256_float32"]
    auxiliaries = dict(index["uses_with_auxiliaries"])
    if "text/token_embedding" in hashes:  # it has no use and takes the signs of the head
        auxiliaries["text/token_embedding"] = auxiliaries["text/output_head"]
    assert auxiliaries.keys() == hashes.keys() and len(hashes) > 1
    with open_artifact(folder / f"{name}.ninfer") as artifact:
        for parameter, vectors in auxiliaries.items():
            ((role, vector),) = vectors.items()
            stored = artifact.parameter(parameter).with_policy("A16Only")
            weight = transform_input(stored, role, artifact.tensor(vector))
            plain = weight.dequantize()
            assert hashlib.sha256(plain.numpy().tobytes()).hexdigest() == hashes[parameter], parameter
            assert torch.equal(plain[:2], rows[f"{name}/effective_rows/{parameter}"])
            assert torch.equal(F.embedding(torch.tensor([1, 0]), weight), plain[[1, 0]])
            assert isinstance(stored, NinferTensor) and not torch.equal(stored.dequantize(), plain)
            x = torch.randn(3, plain.shape[1])
            check_a16(F.linear(x, weight), x.double() @ plain.double().T, plain.shape[1])
