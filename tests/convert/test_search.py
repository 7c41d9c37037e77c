"""grouped_search: the best of 69 scales, chosen as the specification says."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact import assert_same_words
from golden import golden, load_json, load_tensors
from ninfer_torch.convert import search
from ninfer_torch.convert.methods import grouped_absmax, grouped_search
from ninfer_torch.errors import ConversionError

FORMATS = ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")

# (group size, largest code of section 3, smallest and largest code), typed in from spec/conversion.md 3.
NUMBERS = {
    "q4_g64_fp16": (64, 7, -8, 7),
    "q5_g64_fp16": (64, 15, -16, 15),
    "q6_g64_fp16": (64, 31, -32, 31),
    "q8_g32_fp16": (32, 127, -127, 127),
}


# --- golden words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["positive", "negative"])
@pytest.mark.parametrize("weighting", ["plain", "importance"])
@pytest.mark.parametrize("name", FORMATS)
def test_golden_words(name: str, weighting: str, sign: str) -> None:
    data = load_tensors(golden("ninfer", "encoders", "grouped_search.safetensors"))
    case = f"{name}/{weighting}_{sign}"
    assert not data[f"{case}/fragile_groups"].any()
    importance = data[f"{name}/importance"] if weighting == "importance" else None
    codes, scales = grouped_search(
        data[f"{name}/input"], name, importance=importance, negative_scales=sign == "negative"
    )
    assert torch.equal(codes, data[f"{case}/codes"])
    assert torch.equal(scales.view(torch.uint16), data[f"{case}/scales"])


def test_golden_refusals() -> None:
    records = load_json(golden("ninfer", "encoders", "index.json"))["errors"]
    cases = {record["case"] for record in records if record["case"].startswith("grouped_search")}
    importance = {
        "grouped_search negative importance": torch.ones(64).index_fill(0, torch.tensor([5]), -1e-9),
        "grouped_search importance length differs from K": torch.ones(63),
        "grouped_search nonfinite importance": torch.ones(64).index_fill(0, torch.tensor([5]), math.inf),
    }
    assert cases == importance.keys()
    for vector in importance.values():
        with pytest.raises(ConversionError, match="importance"):
            grouped_search(torch.ones(2, 64), "q4_g64_fp16", importance=vector)


# --- the table of the specification ----------------------------------------------------------------------------------

TABLE = (
    ("q4_g64_fp16", False, 0x32DB, 0.736263, 0x3277, 0.645285, (-5, 1, -4, 3, -2, 6, 0, -4), 16),
    ("q4_g64_fp16", True, 0x32DB, 0.736263, 0xB180, 0.568672, (6, -1, 5, -4, 3, -7, 0, 5), -16),
    ("q5_g64_fp16", False, 0x2E66, 0.144968, 0x2E50, 0.132410, (-10, 2, -8, 7, -5, 12, -1, -9), 27),
    ("q5_g64_fp16", True, 0x2E66, 0.144968, 0xAE20, 0.127522, (10, -2, 8, -7, 5, -13, 1, 9), -32),
    ("q6_g64_fp16", False, 0x2A32, 0.038457, 0x2AAF, 0.034852, (-19, 4, -15, 12, -9, 23, -1, -17), 55),
    ("q6_g64_fp16", True, 0x2A32, 0.038457, 0xA9F9, 0.031236, (21, -4, 17, -14, 10, -26, 1, 19), -58),
    ("q8_g32_fp16", False, 0x220C, 0.000922167, 0x220D, 0.000911371, (-82, 17, -67, 55, -41, 103, -4, -74), 175),
    ("q8_g32_fp16", True, 0x220C, 0.000922167, 0x220D, 0.000911371, (-82, 17, -67, 55, -41, 103, -4, -74), 175),
)


def weighted_error(x: torch.Tensor, importance: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> float:
    residual = x.double() - codes.double() * scales.double()
    return float((importance.double() * residual**2).sum())


@pytest.mark.parametrize("name, negative, start, start_error, best, error, first, total", TABLE)
def test_table_of_the_specification(
    name: str, negative: bool, start: int, start_error: float, best: int, error: float, first: tuple, total: int
) -> None:
    k = np.arange(NUMBERS[name][0])
    x = torch.from_numpy((((37 * k) % 64 - 31) / 32 * (1 + 0.1 * (k % 7))).astype(np.float32)).unsqueeze(0)
    importance = torch.from_numpy(1.0 + k % 5)
    codes, scales = grouped_absmax(x, name)
    assert scales.view(torch.uint16).item() == start
    assert weighted_error(x, importance, codes, scales) == pytest.approx(start_error, rel=2e-5)
    codes, scales = grouped_search(x, name, importance=importance, negative_scales=negative)
    assert scales.view(torch.uint16).item() == best
    assert tuple(codes[0, :8].tolist()) == first and int(codes.sum()) == total
    assert weighted_error(x, importance, codes, scales) == pytest.approx(error, rel=2e-5)


def test_small_example_of_the_specification() -> None:
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([0.8, 0.8, 0.4, -0.1])
    for negative, word, first, error in (
        (False, 0x3041, [6, 6, 3, -1], 0.00109757),
        (True, 0xAE66, [-8, -8, -4, 1], 8.6e-8),
    ):
        codes, scales = grouped_search(x, "q4_g64_fp16", negative_scales=negative)
        assert scales.view(torch.uint16).item() == word and codes[0, :4].tolist() == first
        assert weighted_error(x, torch.ones(64), codes, scales) == pytest.approx(error, rel=1e-2)


# --- the search, one group at a time ---------------------------------------------------------------------------------


class ScalarGroup:
    """Section 4 for one group in Python floats, exact sums and numpy's conversions."""

    def __init__(self, x: np.ndarray, importance: np.ndarray, name: str, negative: bool) -> None:
        _, self.qmax, self.low, self.high = NUMBERS[name]
        self.x, self.importance, self.negative = x.astype(np.float32), importance, negative

    def codes(self, scale: float) -> list[int]:
        reciprocal = np.float32(1.0 / scale)
        return [int(min(max(np.rint(np.float32(value * reciprocal)), self.low), self.high)) for value in self.x]

    def error(self, scale: float) -> float:
        terms = zip(self.importance, self.x, self.codes(scale), strict=True)
        return math.fsum(float(w) * (float(value) - scale * code) ** 2 for w, value, code in terms)

    def fitted(self, scale: float) -> float:
        codes = self.codes(scale)
        top = math.fsum(float(w) * float(v) * q for w, v, q in zip(self.importance, self.x, codes, strict=True))
        bottom = math.fsum(float(w) * q * q for w, q in zip(self.importance, codes, strict=True))
        return self.half(top / bottom) if bottom else 0.0

    @staticmethod
    def half(raw: float) -> float:
        with np.errstate(over="ignore"):
            value = float(np.float16(np.float32(raw)))
        if value == 0 and raw != 0:
            return math.copysign(2.0**-24, raw)
        return value if math.isfinite(value) else 0.0

    @staticmethod
    def step(scale: float, by: int) -> float:
        word = int(np.float16(abs(scale)).view(np.uint16))
        if word == 0 or not 1 <= word + by <= 0x7BFF:
            return 0.0
        return math.copysign(float(np.uint16(word + by).view(np.float16)), scale)

    def search(self) -> tuple[float, float, int]:
        """(scale, error, number of evaluations); the scale is 0 for a group of zeros."""
        largest = float(np.abs(self.x).max())
        if largest == 0:
            return 0.0, 0.0, 1
        extreme = float(self.x[int(np.abs(self.x).argmax())])
        start = self.half(float(np.float32(largest / self.qmax)))
        fit = self.fitted(start)
        ratios = [float(f"{0.70 + 0.02 * i:.2f}") for i in range(25)]
        candidates = [self.half(largest / self.qmax * r) for r in ratios]
        candidates += [self.half(extreme / self.low * r) for r in ratios]
        candidates += [self.half(start * r) for r in (0.25, 0.5, 2, 4)]
        candidates += [self.step(start, by) for by in (-2, -1, 1, 2)]
        candidates += [fit, self.half(fit * 0.5), self.half(fit * 2)]
        candidates += [self.step(fit, by) for by in (-2, -1, 1, 2)]
        best = (start, self.error(start))
        for candidate in candidates:
            best = self.better(best, candidate)
        refit = self.fitted(best[0])
        last = [refit, self.step(refit, -1), self.step(refit, 1)]
        for candidate in last:
            best = self.better(best, candidate)
        return *best, 1 + len(candidates) + len(last)

    def better(self, best: tuple[float, float], candidate: float) -> tuple[float, float]:
        if candidate == 0 or (candidate < 0 and not self.negative):
            return best
        error = self.error(candidate)
        return (candidate, error) if error < best[1] else best


def random_row(seed: int, columns: int, exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(1, columns, generator=generator) * 2.0**exponent
    row = row * (torch.rand(1, columns, generator=generator) > 0.2)
    return row * (1 + 7 * (torch.rand(1, columns, generator=generator) > 0.97))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.integers(0, 2**31),
    st.integers(1, 90),
    st.integers(-30, 6),
    st.booleans(),
    st.booleans(),
)
def test_search_equals_the_scalar_search(
    name: str, seed: int, columns: int, exponent: int, weighted: bool, negative: bool
) -> None:
    row = random_row(seed, columns, exponent)
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(seed)) ** 4 if weighted else None
    codes, scales = grouped_search(row, name, importance=importance, negative_scales=negative)
    group = NUMBERS[name][0]
    for index in range(scales.shape[1]):
        span = slice(index * group, min((index + 1) * group, columns))
        x = row[0, span].numpy()
        weights = importance[span].numpy() if weighted else np.ones(len(x), np.float32)
        oracle = ScalarGroup(x, weights, name, negative)
        scale, error, evaluations = oracle.search()
        found = scales[0, index].item()
        assert evaluations in (1, 69)
        if found != scale:  # only a tie in all but the last bits may be broken otherwise
            assert oracle.error(found) == pytest.approx(error, rel=1e-12)
        assert codes[0, span].tolist() == (oracle.codes(found) if found else [0] * len(x))


# --- laws ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 2**31), st.integers(2, 7), st.integers(1, 200), st.integers(1, 6))
def test_rows_do_not_depend_on_their_company(name: str, seed: int, rows: int, columns: int, cut: int) -> None:
    weight = torch.cat([random_row(seed + row, columns, row - 3) for row in range(rows)])
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(seed))
    codes, scales = grouped_search(weight, name, importance=importance, negative_scales=True)
    cut = min(cut, rows)
    parts = [weight[:cut], weight[cut:]]
    found = [grouped_search(part, name, importance=importance, negative_scales=True) for part in parts if len(part)]
    assert torch.equal(torch.cat([part[0] for part in found]), codes)
    assert_same_words(torch.cat([part[1] for part in found]), scales)


@pytest.mark.parametrize("name", FORMATS)
def test_words_do_not_depend_on_chunks_or_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.cat([random_row(row, 333, row % 5) for row in range(21)])
    importance = torch.rand(333, generator=torch.Generator().manual_seed(1))
    codes, scales = grouped_search(weight, name, importance=importance)
    threads = torch.get_num_threads()
    try:
        for chunk, count in ((1, 1), (1000, 2), (1 << 22, 4)):
            monkeypatch.setattr(search, "_CHUNK_VALUES", chunk)
            torch.set_num_threads(count)
            again = grouped_search(weight, name, importance=importance)
            assert torch.equal(again[0], codes)
            assert_same_words(again[1], scales)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cuda
@pytest.mark.parametrize("name", FORMATS)
def test_words_do_not_depend_on_the_device(name: str) -> None:
    weight = torch.cat([random_row(row, 333, 5 * (row % 5) - 20) for row in range(40)])
    importance = torch.rand(333, generator=torch.Generator().manual_seed(1))
    for method in (grouped_absmax, partial(grouped_search, importance=importance, negative_scales=True)):
        codes, scales = method(weight, name)
        found = method(weight.cuda(), name)
        assert torch.equal(found[0].cpu(), codes)
        assert_same_words(found[1].cpu(), scales)


@pytest.mark.parametrize("name", FORMATS)
def test_source_types_and_strides_do_not_matter(name: str) -> None:
    wide = torch.cat([random_row(row, 100, 0) for row in range(6)])
    for source in (wide.bfloat16(), wide.half(), wide.double(), wide.T.contiguous().T, torch.nn.Parameter(wide)):
        expected = grouped_search(source.detach().float().contiguous(), name, negative_scales=True)
        found = grouped_search(source, name, negative_scales=True)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 2**31), st.integers(1, 140), st.integers(-28, 6))
def test_no_group_is_worse_than_under_absmax(name: str, seed: int, columns: int, exponent: int) -> None:
    """Measured by the weighted error, up to the rounding of its sum."""
    weight = torch.cat([random_row(seed, columns, exponent), random_row(seed + 1, columns, exponent + 1)])
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(seed))
    group = NUMBERS[name][0]

    def errors(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        decoded = codes.double() * scales.double().repeat_interleave(group, 1)[:, :columns]
        squares = importance.double() * (weight.double() - decoded) ** 2
        return torch.nn.functional.pad(squares, (0, -columns % group)).unflatten(1, (-1, group)).sum(2)

    absmax = errors(*grouped_absmax(weight, name))
    for negative in (False, True):
        found = errors(*grouped_search(weight, name, importance=importance, negative_scales=negative))
        assert (found <= absmax * (1 + 1e-12)).all()


def test_zeros_keep_their_words_beside_ordinary_groups() -> None:
    weight = torch.zeros(3, 200)
    weight[1, 130] = -2.5
    weight[2, :64] = 1e-9
    for name in FORMATS:
        codes, scales = grouped_search(weight, name, negative_scales=True)
        expected_codes, expected_scales = grouped_absmax(weight, name)
        zero = expected_scales == 0
        assert_same_words(scales[zero], expected_scales[zero])
        assert not codes[0].any() and torch.isfinite(scales).all()
        assert torch.equal(codes[2], expected_codes[2]) and (codes[1] != 0).sum() == 1


def test_importance_of_zero_counts_for_nothing() -> None:
    """Where all columns of a group weigh nothing, all candidates are equal and the absmax words stay (case T1)."""
    weight = torch.cat([random_row(row, 192, 0) for row in range(4)])
    importance = torch.rand(192, generator=torch.Generator().manual_seed(3)) + 0.1
    importance[64:128] = 0
    for name in FORMATS:
        group = NUMBERS[name][0]
        codes, scales = grouped_search(weight, name, importance=importance)
        absmax_codes, absmax_scales = grouped_absmax(weight, name)
        dead = slice(64 // group, 128 // group)
        assert_same_words(scales[:, dead], absmax_scales[:, dead])
        assert torch.equal(codes[:, 64:128], absmax_codes[:, 64:128])
        assert not torch.equal(scales[:, : dead.start], absmax_scales[:, : dead.start])
        nothing = grouped_search(weight, name, importance=torch.zeros(192))
        assert torch.equal(nothing[0], absmax_codes)
        assert_same_words(nothing[1], absmax_scales)


def test_importance_scales_out() -> None:
    weight = torch.cat([random_row(row, 130, 0) for row in range(3)])
    importance = torch.rand(130, generator=torch.Generator().manual_seed(4))
    for factor in (2.0**-40, 8.0):
        for name in FORMATS:
            expected = grouped_search(weight, name, importance=importance)
            found = grouped_search(weight, name, importance=importance * factor)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_errors_say_where() -> None:
    weight = torch.ones(5, 130)
    weight[3, 129] = math.nan
    with pytest.raises(ConversionError, match="row 103, column 129: nan"):
        grouped_search(weight, "q5_g64_fp16", first_row=100)
    weight[3, 129] = 65520 * 15
    with pytest.raises(ConversionError, match="row 3, group 2: .* overflows the binary16 scale of q5_g64_fp16"):
        grouped_search(weight, "q5_g64_fp16")
    with pytest.raises(ConversionError, match=r"grouped_search takes a floating matrix \[N, K\], found torch.int32"):
        grouped_search(weight.int(), "q5_g64_fp16")
    with pytest.raises(ConversionError, match="importance of column 7 is -1.0"):
        grouped_search(torch.ones(1, 8), "q4_g64_fp16", importance=torch.tensor([1.0] * 7 + [-1.0]))
    with pytest.raises(ConversionError, match=r"importance is torch.float32 \[2048\], expected .* \[4096\]"):
        grouped_search(torch.ones(1, 4096), "q4_g64_fp16", importance=torch.ones(2048))
