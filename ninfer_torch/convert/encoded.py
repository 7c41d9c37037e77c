"""import_encoded: words that somebody else made, moved into a layout's planes; nothing is requantized.

One importer per pair (encoding of the source, format), in one table. An importer refuses words outside the format's
language, naming tensor, row and group. Source: spec/conversion.md 6, spec/layouts.md 8.2 and 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from ninfer_torch.convert.source import EncodedRows
from ninfer_torch.errors import ConversionError, FormatError, LayoutError
from ninfer_torch.formats import FORMATS, Format, GgufFormat, GroupedFormat, RowFloatFormat, get_format
from ninfer_torch.kernels.checks import check_words
from ninfer_torch.kernels.packing import pack_codes, unpack_lanes
from ninfer_torch.layouts import TILE_ROWS, Geometry, align_up, planes_of, swizzle_scales
from ninfer_torch.tensors import wrap_planes

__all__ = ["IMPORTED_TARGETS", "IMPORTERS", "import_encoded", "import_rows", "stack_rows", "ternary_codes"]

Planes = tuple[Tensor, ...]

_T2_GROUP, _Q2_PADDING = 128, 0x55
_BINARY16_EXPONENT, _NEGATIVE_ZERO = 0x7C00, -0x8000
_LARGEST_BLOCK_SCALE = 0x7E
_E4M3FN_NAN = 0x7F


def import_encoded(source: Tensor | EncodedRows | Sequence[EncodedRows], format: str | Format) -> Tensor:
    """A complete matrix from encoded rows, word for word (spec/conversion.md 6).

    `source` is one matrix, or several that are stacked in order (`stack_rows`), as `EncodedRows`; a plain uint8 tensor
    [N, row bytes] stands for the blocks of the `gguf_*` format that is asked for. Raises ConversionError for a pair of
    encoding and format outside `IMPORTERS`, for words of a wrong dtype or extent, for a shape that the layout refuses,
    and for words that are illegal in the format.
    """
    record = get_format(format)
    if isinstance(source, Tensor):
        source = EncodedRows(record.name, (source,))
    rows = source if isinstance(source, EncodedRows) else stack_rows(source)
    planes = import_rows(rows, record)
    divisors = 1 if rows.divisors is None else rows.divisors.numel()
    return wrap_planes(record.name, _shape(rows, record), planes, divisors=divisors)


def import_rows(rows: EncodedRows, format: str | Format) -> Planes:
    """The planes of complete rows; nvfp4 rows come in whole tiles of 128, with one divisor per run of equal rows.

    Raises ConversionError as `import_encoded`.
    """
    record = get_format(format)
    importer = IMPORTERS.get((rows.encoding, record.name))
    if importer is None:
        sources = [encoding for encoding, target in IMPORTERS if target == record.name]
        expected = f"it takes {', '.join(sources)}" if sources else f"it writes {', '.join(IMPORTED_TARGETS)}"
        found = "" if rows.encoding == record.name else f" from {rows.encoding}"
        raise ConversionError(f"import_encoded does not write {record.name}{found}; {expected}")
    return importer(rows, record)


def stack_rows(sources: Sequence[EncodedRows]) -> EncodedRows:
    """Several complete matrices of one encoding and width as one, in order (spec/conversion.md 6.1).

    Equal divisor words become one. Unequal ones are kept, one per source, which the layout allows for sources of equal
    row counts in whole tiles of 128 rows. Raises ConversionError where the sources cannot be stacked.
    """
    if not sources:
        raise ConversionError("import_encoded takes at least one source, found none")
    first = sources[0]
    for other in sources[1:]:
        if other.encoding != first.encoding or _widths(other) != _widths(first):
            raise ConversionError(
                f"{_named(other)} holds {other.encoding} rows of {_widths(other)} words, and is stacked on "
                f"{_named(first)} of {first.encoding} rows of {_widths(first)} words; expected equal ones"
            )
    words = tuple(torch.cat(parts) for parts in zip(*(source.words for source in sources), strict=True))
    name = ", ".join(source.name for source in sources if source.name)
    return EncodedRows(first.encoding, words, _stacked_divisors(sources), name, first.first_row, first.columns)


def _stacked_divisors(sources: Sequence[EncodedRows]) -> Tensor | None:
    stated = [source.divisors for source in sources if source.divisors is not None]
    if not stated:
        return None
    if len(stated) != len(sources):
        raise ConversionError(f"{len(sources) - len(stated)} of {len(sources)} stacked sources have no divisor")
    words = torch.cat(stated)
    if words.view(torch.int32).unique().numel() == 1:
        return words[:1]
    counts = [source.rows for source in sources]
    if len(words) != len(sources) or len(set(counts)) != 1 or counts[0] % TILE_ROWS:
        raise ConversionError(
            f"stacked sources have divisors {words.tolist()} and {counts} rows; expected one divisor for all, or one per "
            f"source of equal row counts that are multiples of {TILE_ROWS}"
        )
    return words


def _named(rows: EncodedRows) -> str:
    return repr(rows.name) if rows.name else "a source"


def _widths(rows: EncodedRows) -> list[int]:
    stated = [] if rows.columns is None else [rows.columns]
    return [word.shape[1] for word in rows.words if word.dim() == 2] + stated


def _shape(rows: EncodedRows, record: Format) -> tuple[int, int]:
    if rows.columns is not None:
        return rows.rows, rows.columns
    width = rows.words[0].shape[1]
    block_values, block_bytes = _BLOCKS.get(rows.encoding, (2, 1) if record.name == "nvfp4" else (1, 1))
    return rows.rows, width // block_bytes * block_values


_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **{name: (f.block_values, f.block_bytes) for name, f in FORMATS.items() if isinstance(f, GgufFormat)},
        "pq2_0": (128, 34),
        "ptq1_0": (128, 28),
    }
)
"""(values, bytes) of a block, by encoding."""


def _blocks(rows: EncodedRows, record: Format) -> Tensor:
    """The one tensor of block rows. Raises ConversionError unless it holds whole blocks."""
    (blocks,) = rows.words
    block_bytes = _BLOCKS[rows.encoding][1]
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or not blocks.shape[1] or blocks.shape[1] % block_bytes:
        raise ConversionError(
            f"{record.name} takes rows of whole {block_bytes}-byte blocks as uint8 [N, row bytes], found "
            f"{blocks.dtype} {list(blocks.shape)} from {rows.place(0)}"
        )
    return blocks


def _refuse(rows: EncodedRows, broken: Tensor, words: Tensor, what: str) -> None:
    """Raise ConversionError for the first word that `broken` [N, groups, ...] marks; `words` has the same shape."""
    if bool(broken.any()):
        row, group, *rest = (index := tuple(broken.nonzero()[0].tolist()))
        lane = f", lane {rest[0]}" if rest else ""
        bits = 8 * words.element_size()
        word = int(words[index]) % (1 << bits)
        raise ConversionError(f"{rows.place(row)}, group {group}{lane}: 0x{word:0{bits // 4}x} {what}")


# GGUF blocks


def _same_blocks(rows: EncodedRows, record: Format) -> Planes:
    return (_blocks(rows, record),)


def _scale_and_codes(rows: EncodedRows, record: Format) -> tuple[Tensor, Tensor]:
    """Binary16 scale words int16 [N, groups] and code bytes [N, groups, B] of blocks that begin with their scale."""
    blocks = _blocks(rows, record).unflatten(1, (-1, _BLOCKS[rows.encoding][1]))
    scales = _scale_words(blocks[..., :2])
    _refuse_infinite(rows, scales)
    return scales, blocks[..., 2:]


def _scale_words(pairs: Tensor) -> Tensor:
    """Byte pairs [N, groups, 2], which may lie at odd addresses, as int16 words [N, groups]."""
    return pairs.clone(memory_format=torch.contiguous_format).view(torch.int16).squeeze(-1)


def _refuse_infinite(rows: EncodedRows, scales: Tensor) -> None:
    _refuse(rows, (scales & _BINARY16_EXPONENT) == _BINARY16_EXPONENT, scales, "is no finite binary16 scale")


def _refuse_false_zeros(rows: EncodedRows, scales: Tensor, codes: Tensor, nonzero: Tensor) -> None:
    """A zero scale is +0 and stands above zero codes in q8 and t2 (spec/layouts.md 3.5)."""
    _refuse(rows, scales == _NEGATIVE_ZERO, scales, "is a scale of negative zero")
    _refuse(rows, nonzero & (scales == 0).unsqueeze(2), codes, "is a code other than 0 under a zero scale")


def _padded(tensor: Tensor, record: GroupedFormat, value: int = 0) -> Tensor:
    """Groups [N, n, ...] with padding groups of `value` up to whole 128 columns (spec/layouts.md 3.4)."""
    count = align_up(tensor.shape[1] * record.group, 128) // record.group - tensor.shape[1]
    if not count:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_full((tensor.shape[0], count, *tensor.shape[2:]), value)], dim=1)


def _q2_from_q2_0(rows: EncodedRows, record: GroupedFormat) -> Planes:
    scales, codes = _scale_and_codes(rows, record)
    return _padded(codes, record, _Q2_PADDING), _padded(scales, record).view(torch.float16)


def _q8_from_q8_0(rows: EncodedRows, record: GroupedFormat) -> Planes:
    scales, codes = _scale_and_codes(rows, record)
    _refuse(rows, codes == 0x80, codes, f"is code -128, which {record.name} does not have")
    _refuse_false_zeros(rows, scales, codes, codes != 0)
    return _padded(codes, record), _padded(scales, record).view(torch.float16)


@cache
def _ternary_words(device: torch.device) -> Tensor:
    """For each byte of four offset codes the byte of the same four codes as t2 words: 0, 1, 2 become 3, 0, 1."""
    with torch.inference_mode(False):
        lanes = unpack_lanes(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1), 2)
        words = (lanes + 3) & 3
        return words[:, 0] | words[:, 1] << 2 | words[:, 2] << 4 | words[:, 3] << 6


def _t2_from_pq2_0(rows: EncodedRows, record: GroupedFormat) -> Planes:
    scales, codes = _scale_and_codes(rows, record)
    if bool((codes & codes >> 1 & 0x55).any()):
        lanes = unpack_lanes(codes, 2)
        _refuse(rows, lanes == 3, lanes, "is code 3, which is not ternary")
    words = _ternary_words(codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    _refuse_false_zeros(rows, scales, words, words != 0)
    return words, scales.view(torch.float16)


def _t2_from_ptq1_0(rows: EncodedRows, record: GroupedFormat) -> Planes:
    blocks = _blocks(rows, record).unflatten(1, (-1, _BLOCKS[rows.encoding][1]))
    scales = _scale_words(blocks[..., 26:])
    _refuse_infinite(rows, scales)
    codes = ternary_codes(blocks)
    _refuse_false_zeros(rows, scales, codes, codes != 0)
    return pack_codes(record, codes, scales.view(torch.float16))


_TRITS = ((0, 16, 5), (16, 24, 5), (24, 26, 4))
"""(first byte, end, digits per byte) of the runs of base-3 bytes in a ptq1_0 block (spec/layouts.md 8.2)."""


def ternary_codes(blocks: Tensor) -> Tensor:
    """Codes -1, 0, 1 of ptq1_0 blocks: uint8 [..., 28] -> int8 [..., 128].

    A byte holds its digits as a fraction of 256: times 3 the whole part is the next digit, the rest goes on.
    """
    digits = []
    for begin, end, count in _TRITS:
        fractions = blocks[..., begin:end]
        for _ in range(count):
            digits.append(fractions.to(torch.int16) * 3 >> 8)
            fractions = fractions * 3
    return torch.cat(digits, dim=-1).to(torch.int8) - 1


# Checkpoints


def _nvfp4(rows: EncodedRows, record: Format) -> Planes:
    codes, scales = rows.words
    if rows.divisors is None:
        raise ConversionError(f"{rows.place(0)}: nvfp4 rows come without a divisor")
    try:
        specs = planes_of(record, _shape(rows, record), rows.divisors.numel())
    except LayoutError as error:
        raise ConversionError(f"{rows.place(0)}: {error}") from error
    expected = (codes.shape[0], codes.shape[1] // 8)
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or tuple(scales.shape) != expected:
        raise ConversionError(
            f"{rows.place(0)}: nvfp4 codes are {codes.dtype} {list(codes.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)}, expected uint8 codes [N, K/2] and uint8 scales {list(expected)}"
        )
    _refuse(rows, scales > _LARGEST_BLOCK_SCALE, scales, "is no block scale: expected E4M3FN, finite, sign clear")
    _check_divisors(rows, rows.divisors)
    return codes.contiguous().view(specs[0].shape), swizzle_scales(scales), rows.divisors


def _check_divisors(rows: EncodedRows, divisors: Tensor) -> None:
    broken = ~(divisors.isfinite() & (divisors > 0))
    if bool(broken.any()):
        index = int(broken.nonzero()[0])
        raise ConversionError(
            f"{rows.place(0)}: nvfp4 divisor {index} is {divisors[index].item()}, expected finite and above 0"
        )


def _row_float(rows: EncodedRows, record: Format) -> Planes:
    codes, scales = rows.words
    if codes.dtype != torch.uint8 or scales.dtype != torch.bfloat16 or tuple(scales.shape) != codes.shape[:1]:
        raise ConversionError(
            f"{rows.place(0)}: fp8 codes are {codes.dtype} {list(codes.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)}, expected uint8 [N, K] and bfloat16 [N]"
        )
    # A row is one group here; scales are judged by their words, which tells -0 and NaN from the rest.
    words = scales.view(torch.int16).unsqueeze(1)
    _refuse(rows, words < 0, words, "is a scale with its sign set; expected +0 or more")
    _refuse(rows, words >= 0x7F80, words, "is no finite bfloat16 scale")
    magnitudes = codes.unsqueeze(1) & 0x7F
    _refuse(rows, magnitudes == _E4M3FN_NAN, codes.unsqueeze(1), "is the code of NaN")
    if bool((words == 0).any()):
        _refuse(rows, (magnitudes != 0) & (words == 0).unsqueeze(2), codes.unsqueeze(1), "is a code under a zero scale")
    return codes, scales


# Other artifacts


def _same_planes(rows: EncodedRows, record: Format) -> Planes:
    if rows.columns is None:
        raise ConversionError(f"{rows.place(0)}: {record.name} planes come without the number of columns")
    specs = planes_of(record, (rows.rows, rows.columns))
    found = [(word.dtype, tuple(word.shape)) for word in rows.words]
    expected = [(spec.dtype, spec.shape) for spec in specs]
    if found != expected:
        raise ConversionError(f"{rows.place(0)}: planes {found}, expected {expected} for {record.name}")
    end = rows.first_row + rows.rows
    geometry = Geometry(rows.rows, rows.columns, rows.first_row, end)
    try:
        check_words(record, rows.words, geometry, f"tensor {rows.name!r}" if rows.name else "source")
    except FormatError as error:
        raise ConversionError(str(error)) from error
    return tuple(word.contiguous() for word in rows.words)


IMPORTERS: Mapping[tuple[str, str], Callable[..., Planes]] = MappingProxyType(
    {
        **{
            (name, name): _same_planes
            for name, record in FORMATS.items()
            if isinstance(record, GroupedFormat | RowFloatFormat)
        },
        **{(name, name): _same_blocks for name, record in FORMATS.items() if isinstance(record, GgufFormat)},
        ("gguf_q2_0", "q2_g64_fp16"): _q2_from_q2_0,
        ("gguf_q8_0", "q8_g32_fp16"): _q8_from_q8_0,
        ("pq2_0", "t2_g128_fp16"): _t2_from_pq2_0,
        ("ptq1_0", "t2_g128_fp16"): _t2_from_ptq1_0,
        ("nvfp4", "nvfp4"): _nvfp4,
        ("fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_bf16"): _row_float,
    }
)
"""The importer of each pair (encoding of the source rows, format). A further import is one entry more."""

IMPORTED_TARGETS = tuple(dict.fromkeys(target for _, target in IMPORTERS))
"""The formats that import_encoded writes."""
