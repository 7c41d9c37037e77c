"""Every Triton kernel in the interpreter, on CPU tensors, against the reference: runs only in a process with TRITON_INTERPRET=1.

`test_suite.py` starts that process. Outputs are float32 or float16: the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 from the start of the process; test_suite.py runs it", allow_module_level=True
    )
pytest.importorskip("triton")

from golden import golden, load_tensors
from golden_objects import read_objects
from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.formats import FORMATS, GgufFormat
from ninfer_torch.kernels.measuring import CudaTimer
from ninfer_torch.kernels.reference import decode
from ninfer_torch.kernels.triton import operators
from ninfer_torch.kernels.triton.launch import Launch
from ninfer_torch.kernels.triton.operators import (
    Matrix,
    dequantize,
    embedding,
    expert_linear,
    expert_linear_backward,
    linear,
    linear_backward,
)
from ninfer_torch.kernels.tuning import RANGES, candidates
from ninfer_torch.layouts import Geometry, encoded_bytes, gather_rows, planes_of, slice_rows, split_planes
from quantized import FAMILIES, QUANTIZED, check_a16, random_weight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in arbitrary words

REPRESENTATIVES = (*FAMILIES, "gguf_iq2_xs", "gguf_iq4_xs", "gguf_q6_k")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shape_of(format: str) -> tuple[int, int]:
    """A small shape whose rows and columns are no multiples of any block, where the layout permits."""
    record = FORMATS[format]
    if format == "nvfp4":
        return 128, 192
    if isinstance(record, GgufFormat):
        return 21, record.block_values * (1 if record.block_values == 256 else 3)
    return 21, 203


def words(tensor: torch.Tensor) -> torch.Tensor:
    """float32 words with one pattern for all NaNs."""
    return torch.where(tensor.isnan(), torch.tensor(float("nan")), tensor).view(torch.int32)


def arbitrary(format: str, shape: tuple[int, int], divisors: int, seed: int, lead: int = 0) -> tuple[torch.Tensor, ...]:
    """The planes of an object of random bytes, `lead` bytes after an aligned address."""
    count = encoded_bytes(format, shape, divisors)
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    payload = torch.empty(count + lead, dtype=torch.uint8)[lead:]
    payload.copy_(torch.from_numpy(data))
    return split_planes(payload, planes_of(format, shape, divisors))


def activations(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Values


@pytest.mark.parametrize("format", QUANTIZED)
def test_golden_objects_dequantize_bit_for_bit(format: str) -> None:
    expected = load_tensors(golden("ninfer", "formats", f"{format}.safetensors"))
    for key, stored in read_objects(golden("ninfer", "formats", f"{format}.ninfer")).items():
        planes = split_planes(stored.tensor, planes_of(format, stored.shape, stored.divisors))
        values = dequantize(planes, format, Geometry.whole(stored.shape, stored.divisors), torch.float32)
        assert torch.equal(values.view(torch.int32), expected[key].view(torch.int32)), key


@pytest.mark.parametrize("format", QUANTIZED)
def test_any_bytes_dequantize_as_the_reference(format: str) -> None:
    shape, divisors = ((256, 128), 2) if format == "nvfp4" else (shape_of(format), 1)
    geometry = Geometry.whole(shape, divisors)
    planes = arbitrary(format, shape, divisors, seed=3)
    values = dequantize(planes, format, geometry, torch.float32)
    assert torch.equal(words(values), words(decode(format, planes, geometry)))


@pytest.mark.parametrize("format", [name for name in QUANTIZED if len(planes_of(name, (128, 256))) == 1])
def test_blocks_and_records_at_any_address(format: str) -> None:
    shape = (5, shape_of(format)[1])
    geometry = Geometry.whole(shape)
    planes = arbitrary(format, shape, 1, seed=4, lead=1)
    assert planes[0].data_ptr() % 2 == 1
    values = dequantize(planes, format, geometry, torch.float32)
    assert torch.equal(words(values), words(decode(format, planes, geometry)))


@pytest.mark.parametrize("columns", [1, 8, 37, 130, 256])
@pytest.mark.parametrize("format", ["fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16", "q2_g64_fp16", "q8_g32_fp16"])
def test_any_width(format: str, columns: int) -> None:
    planes, geometry = arbitrary(format, (3, columns), 1, seed=5), Geometry.whole((3, columns))
    values = dequantize(planes, format, geometry, torch.float32)
    assert torch.equal(words(values), words(decode(format, planes, geometry)))


@pytest.mark.parametrize("format", REPRESENTATIVES)
def test_row_views_find_their_words(format: str) -> None:
    shape, divisors = ((384, 64), 3) if format == "nvfp4" else (shape_of(format), 1)
    whole = Geometry.whole(shape, divisors)
    planes = arbitrary(format, shape, divisors, seed=6)
    begin, end = (100, 290) if format == "nvfp4" else (4, 15)
    rows = torch.tensor([end - 1, 0, 3, 3])
    for view in (slice_rows(format, planes, whole, begin, end), gather_rows(format, planes, whole, rows)):
        values = dequantize(view[0], format, view[1], torch.float32)
        assert torch.equal(words(values), words(decode(format, *view)))
        halves = dequantize(view[0], format, view[1], torch.float16)
        assert torch.equal(words(halves.float()), words(values.half().float()))
        ids = torch.tensor([[2, 0], [3, 2]], dtype=torch.int32)
        assert torch.equal(words(embedding(ids, view[0], format, view[1], torch.float32)), words(values[ids.long()]))


def test_ids_outside_the_matrix_give_nan() -> None:
    planes, _, geometry, *_ = random_weight("q4_g64_fp16", 5, 130).call
    out = embedding(torch.tensor([4, 5, -1, 0]), planes, "q4_g64_fp16", geometry, torch.float32)
    assert out.isnan().all(1).tolist() == [False, True, True, False]
    assert not out[::3].isnan().any()
    assert embedding(torch.empty(0, 3).long(), planes, "q4_g64_fp16", geometry, torch.float32).shape == (0, 3, 130)


def test_offsets_beyond_two_to_the_31() -> None:
    format, rows, columns = "q8_g32_fp16", 270_000, 8_192
    specs = planes_of(format, (rows, columns))
    planes = [
        torch.empty(spec.shape, dtype=spec.dtype) for spec in specs
    ]  # address space only: pages are never touched
    assert planes[0].numel() > 2**31
    small = random_weight(format, 1, columns)
    for plane, row in zip(planes, small.call[0], strict=True):
        plane[-1:] = row
    out = embedding(torch.tensor([rows - 1]), planes, format, Geometry.whole((rows, columns)), torch.float32)
    assert torch.equal(out, small.dequantize())


# Products


def check_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """A16 for few rows and float32, A16T otherwise (see the table of launches)."""
    y64 = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.shape == y64.shape and y.dtype == x.dtype
    if x.dtype == torch.float32 or x.shape[0] < 16:
        check_a16(y, y64, x.shape[-1])
    else:
        dense = F.linear(x, weight.to(x.dtype), bias)
        assert (y.double() - y64).norm() <= 1.1 * (dense.double() - y64).norm()


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 33])
@pytest.mark.parametrize("format", QUANTIZED)
def test_linear(format: str, rows: int) -> None:
    n, k = shape_of(format)
    weight = random_weight(format, n, k)
    x, bias = activations(rows, k), activations(n, seed=2)
    y = linear(x, *weight.call[:3], bias, "A16Only")
    check_product(y, x, weight.dequantize(), bias)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("format", REPRESENTATIVES)
def test_half_activations_of_any_stride(format: str, rows: int) -> None:
    n, k = shape_of(format)
    weight = random_weight(format, n, k)
    x = activations(k, 2 * rows, dtype=torch.float16).t()[::2]
    assert x.stride() == (2, 2 * rows)
    y = linear(x, *weight.call[:3], None, "A16Only")
    check_product(y, x, weight.dequantize(), None)


@pytest.mark.parametrize("format", REPRESENTATIVES)
def test_products_of_row_views(format: str) -> None:
    n, k = (384, 64) if format == "nvfp4" else shape_of(format)
    weight = random_weight(format, n, k, divisors=3 if format == "nvfp4" else 1)
    view = weight[n // 3 - 2 : n - 1]
    for rows in (1, 17):
        x = activations(rows, k)
        y = linear(x, *view.call[:3], None, "A16Only")
        check_product(y, x, weight.dequantize()[n // 3 - 2 : n - 1], None)


@pytest.mark.parametrize("format", ["q4_g64_fp16", "gguf_q4_k", "nvfp4"])
def test_pairs_of_rounded_products_are_nearly_exact(format: str) -> None:
    n, k = shape_of(format)
    weight = random_weight(format, n, k)
    x = activations(5, k, dtype=torch.float16)
    y64 = x.double() @ weight.dequantize().double().t()
    errors = []
    for paired in (False, True):
        launch = Launch("tiled", 16, 64, 16, warps=4, paired=paired)
        y = torch.empty(5, n)
        operators._product(y, x, Matrix.of("linear", *weight.call[:3]), None, launch)
        errors.append(float((y.double() - y64).norm() / y64.norm()))
    assert errors[1] < 2e-5 < 5 * errors[1] + 1e-4 and errors[0] > 5 * errors[1]


@pytest.mark.parametrize("kernel", ["small_m", "tiled"])
@pytest.mark.parametrize("format", ["q5_g64_fp16", "gguf_q2_k"])
def test_splits_of_k_add_up_in_order(monkeypatch: pytest.MonkeyPatch, format: str, kernel: str) -> None:
    monkeypatch.setattr(operators, "_processors", lambda device: 132)
    n, k = 20, 2048
    weight = random_weight(format, n, k)
    x, bias = activations(3, k), activations(n, seed=2)
    launch = Launch(kernel, 4 if kernel == "small_m" else 16, 16, 16, warps=4, max_splits=3, permuted=kernel == "tiled")
    assert operators.splits_of(launch, 2, Matrix.of("linear", *weight.call[:3]).steps(16), 132) == 3
    first, second = (
        operators._product(torch.empty(3, n), x, Matrix.of("linear", *weight.call[:3]), bias, launch) for _ in range(2)
    )
    assert torch.equal(first, second)
    check_product(first, x, weight.dequantize(), bias)


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("format", REPRESENTATIVES)
def test_gradient_of_the_activations(format: str, rows: int) -> None:
    n, k = shape_of(format)
    weight = random_weight(format, n, k)
    grad = activations(rows, n)
    out = linear_backward(grad, *weight.call[:3])
    check_product(out, grad, weight.dequantize().t().contiguous(), None)


@pytest.mark.parametrize("format", [name for name in QUANTIZED if name not in REPRESENTATIVES])
def test_gradient_of_every_format(format: str) -> None:
    n, k = shape_of(format)
    weight = random_weight(format, n, k)
    grad = activations(2, n, dtype=torch.float16)
    out = linear_backward(grad, *weight.call[:3])
    check_product(out, grad, weight.dequantize().t().contiguous(), None)


EXPERTS = {  # cumulative ends: an empty expert, and tokens of no expert at the end
    "decode": (8, [1, 1, 5, 6]),
    "prefill": (46, [3, 3, 40, 44]),
}


@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("format", REPRESENTATIVES)
def test_experts(format: str, case: str) -> None:
    tokens, ends = EXPERTS[case]
    n, k = (32, 192) if format == "nvfp4" else (9, shape_of(format)[1])
    bank = random_weight(format, 4 * n, k)
    dense = bank.dequantize().reshape(4, n, k)
    offsets = torch.tensor(ends, dtype=torch.int32)
    x, grad = activations(tokens, k), activations(tokens, n, seed=7)
    y = expert_linear(x, *bank.call[:3], offsets, "A16Only")
    back = expert_linear_backward(grad, *bank.call[:3], offsets)
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        check_a16(y[begin:end], x[begin:end].double() @ dense[expert].double().t(), k)
        check_a16(back[begin:end], grad[begin:end].double() @ dense[expert].double(), n)
    assert y.shape == (tokens, n) and not y[ends[-1] :].any()
    assert back.shape == (tokens, k) and not back[ends[-1] :].any()


def test_wrong_widths_and_integer_activations_are_refused() -> None:
    weight = random_weight("q4_g64_fp16", 5, 130)
    with pytest.raises(UnsupportedOperation, match=r"does not end in 130"):
        linear(torch.zeros(2, 128), *weight.call[:3], None, "A16Only")
    with pytest.raises(UnsupportedOperation, match="floating activations"):
        linear(torch.zeros(2, 130, dtype=torch.int32), *weight.call[:3], None, "A16Only")


def test_tensors_on_two_devices_are_refused() -> None:
    weight = random_weight("q4_g64_fp16", 5, 130)
    with pytest.raises(UnsupportedOperation, match="found tensors on cpu and meta, expected one device"):
        linear(torch.zeros(2, 130, device="meta"), *weight.call[:3], None, "A16Only")


def test_float64_takes_the_reference() -> None:
    weight = random_weight("gguf_q4_0", 5, 64)
    x = activations(2, 64).double()
    y = linear(x, *weight.call[:3], None, "A16Only")
    assert torch.equal(y, x @ weight.dequantize().double().t())


# What `ninfer-torch tune` times


@pytest.mark.parametrize("operation", ["linear", "expert_linear"])
def test_every_candidate_that_is_timed_computes_the_product(operation: str) -> None:
    timer, weights = CudaTimer(torch.device("cpu"), n=48, k=512), {}

    def planes(format: str, shape: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        weights[shape] = random_weight(format, *shape, seed=2)
        return tuple(weights[shape].planes.values())

    timer._planes = planes
    for within in RANGES[operation]:
        rows = min(within.rows, 17)
        for launch in candidates(operation, "grouped", torch.float16, within, 120):
            torch.manual_seed(3)
            out = timer.product(operation, "grouped", torch.float16, rows, launch)()
            torch.manual_seed(3)
            ((shape, weight),) = weights.items()
            x = torch.randn(out.shape[0], shape[1], dtype=torch.float16)
            banks = weight.dequantize().double().reshape(-1, 48, 512)
            expected = torch.bmm(x.double().reshape(len(banks), rows, 512), banks.transpose(1, 2)).reshape(out.shape)
            assert (out.double() - expected).norm() <= 2e-3 * expected.norm(), launch
