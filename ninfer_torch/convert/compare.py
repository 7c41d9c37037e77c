"""Two models side by side: the error of every weight, of every layer's output, of every prediction.

Weights are streamed: whatever the models' size, a few rows of both are in memory. A text runs through both models, window
by window, with both in memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ninfer_torch.convert.quality import ErrorSums, PredictionSums
from ninfer_torch.convert.stored import StoredModel, StoredWeight, open_stored
from ninfer_torch.errors import ConversionError, NinferError

__all__ = ["Comparison", "LayerError", "Side", "TextComparison", "WeightError", "compare", "compare_text"]

_CHUNK_VALUES = 1 << 20
_LAYER = re.compile(r"^(?P<before>.*?)[./](?P<layer>\d+)[./](?P<kind>.*)$")

Progress = Callable[[int, int], None]
"""(done, in all): weights while weights are compared, tokens while a text is."""


@dataclass(frozen=True)
class WeightError:
    """The error of one weight of B against A; all `names` mean this weight on both sides.

    `relative_error` is the norm of B - A over the norm of A, `maximum` the largest magnitude in B - A.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    formats_a: tuple[str, ...]
    formats_b: tuple[str, ...]
    bytes_a: float | None
    bytes_b: float | None
    relative_error: float
    cosine: float
    maximum: float

    @property
    def layer(self) -> int | None:
        """Number of the layer: the first number in the name."""
        match = _LAYER.match(self.names[0])
        return int(match["layer"]) if match else None

    @property
    def kind(self) -> str:
        """The name without the layer before it, and without `.weight`: what layers have in common."""
        match = _LAYER.match(self.names[0])
        return (match["kind"] if match else self.names[0].partition("/")[2] or self.names[0]).removesuffix(".weight")


@dataclass(frozen=True)
class LayerError:
    """Relative error of the output of one layer of B, and of everything before it, on the text."""

    name: str
    relative_error: float


@dataclass(frozen=True)
class TextComparison:
    """Predictions of both models on one text: mean KL(A || B) in nats, share of positions with the same first token,
    perplexity of each.
    """

    positions: int
    divergence: float
    top1: float
    perplexity_a: float
    perplexity_b: float
    layers: tuple[LayerError, ...]


@dataclass(frozen=True)
class Side:
    """One of the two models: its name, bytes of its weights, and those by format."""

    name: str
    bytes: float
    formats: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """Everything found. `relative_error` is that of all weights as one vector; `only_in_a` and `only_in_b` are weights
    without a counterpart.
    """

    a: Side
    b: Side
    weights: tuple[WeightError, ...]
    relative_error: float
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    text: TextComparison | None = None

    def to_json(self) -> str:
        """The comparison as indented JSON; an infinite error is the text "Infinity"."""

        def finite(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: finite(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [finite(item) for item in value]
            return "Infinity" if isinstance(value, float) and math.isinf(value) else value

        members = dataclasses.asdict(self)
        for row, weight in zip(members["weights"], self.weights, strict=True):
            row |= {"layer": weight.layer, "kind": weight.kind}
        return json.dumps(finite(members), indent=1, ensure_ascii=False, allow_nan=False)

    def summary(self) -> str:
        """A few lines: sizes, the error of all weights together, and what the text showed."""
        lines = [f"{label}: {side.name}, {_megabytes(side)}" for label, side in (("A", self.a), ("B", self.b))]
        lines.append(f"{len(self.weights)} weights compared, relative error {self.relative_error:.6g} over all")
        for label, names in (("A", self.only_in_a), ("B", self.only_in_b)):
            if names:
                lines.append(f"only in {label}: {', '.join(names)}")
        if self.text is not None:
            agreement = f"KL(A || B) {self.text.divergence:.6g} nats, top-1 agreement {self.text.top1:.2%}"
            lines.append(f"{agreement} over {self.text.positions} positions")
            lines.append(f"perplexity {self.text.perplexity_a:.4f} -> {self.text.perplexity_b:.4f}")
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, ...]]:
        """The table of weights as cells, its head first."""
        head = ("weight", "shape", "A", "B", "relative error", "cosine", "maximum")
        return [head, *map(_row, self.weights)]

    def table(self) -> str:
        """Every weight, and every layer where a text was run, under the summary."""
        blocks = [self.summary(), columns(self.rows())]
        if self.text is not None:
            rows = [(layer.name, f"{layer.relative_error:.6g}") for layer in self.text.layers]
            blocks.append(columns([("layer output", "relative error"), *rows]))
        return "\n\n".join(blocks)


def _megabytes(side: Side) -> str:
    shares = ", ".join(f"{name} {count / side.bytes:.1%}" for name, count in side.formats.items())
    return f"{side.bytes / 1e6:,.2f} MB ({shares})"


def _row(weight: WeightError) -> tuple[str, ...]:
    return (
        " = ".join(weight.names),
        "x".join(map(str, weight.shape)),
        "+".join(weight.formats_a),
        "+".join(weight.formats_b),
        f"{weight.relative_error:.6g}",
        f"{weight.cosine:.8f}",
        f"{weight.maximum:.4g}",
    )


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def compare(
    a: StoredModel | str | os.PathLike[str],
    b: StoredModel | str | os.PathLike[str],
    progress: Progress | None = None,
) -> Comparison:
    """The weights of B against those of A, name by name, in constant memory.

    Each is a `.ninfer` file, a safetensors folder or a GGUF file. Raises ConversionError where the two have no weight in
    common, and for a weight whose two shapes cannot be the same matrix.
    """
    first, second = (side if isinstance(side, StoredModel) else open_stored(side) for side in (a, b))
    first, second = _under_common_names(first, second)
    pairs = _pairs(first, second)
    total = sum(source.rows * source.columns for source, _, _ in pairs)
    done = 0
    overall, found = ErrorSums(), []
    for source, other, names in pairs:
        sums = ErrorSums()
        for begin, end in _chunks(source):
            sums.add(source.read(begin, end), other.read(begin, end))
            done += (end - begin) * source.columns
            if progress is not None:
                progress(done, total)
        overall.error_squares += sums.error_squares
        overall.source_squares += sums.source_squares
        found.append(_weight_error(tuple(names), source, other, sums))
    return Comparison(
        _side(first),
        _side(second),
        tuple(found),
        overall.relative_error,
        tuple(name for name in first.weights if name not in second.weights),
        tuple(name for name in second.weights if name not in first.weights),
    )


def _under_common_names(a: StoredModel, b: StoredModel) -> tuple[StoredModel, StoredModel]:
    """An artifact of a registered architecture has names of its own; beside a checkpoint it takes the checkpoint's."""
    if not a.weights.keys().isdisjoint(b.weights) or (a.source is None) == (b.source is None):
        return a, b
    try:
        first, second = (open_stored(side.path, translated=True) if side.source is None else side for side in (a, b))
    except NinferError as error:
        raise ConversionError(f"{a.name} and {b.name} have no weight name in common: {error}") from error
    return first, second


def _pairs(a: StoredModel, b: StoredModel) -> list[tuple[StoredWeight, StoredWeight, list[str]]]:
    """The distinct pairs of weights, each with the names under which both sides have it."""
    pairs: dict[tuple[Hashable, Hashable], tuple[StoredWeight, StoredWeight, list[str]]] = {}
    for name, source in a.weights.items():
        if name not in b.weights:
            continue
        other = b.weights[name]
        if (source.rows, source.columns) != (other.rows, other.columns):
            raise ConversionError(
                f"{name!r} is a matrix {[source.rows, source.columns]} in {a.name} and "
                f"{[other.rows, other.columns]} in {b.name}"
            )
        pairs.setdefault((source.identity, other.identity), (source, other, []))[2].append(name)
    if not pairs:
        few = [", ".join(list(side.weights)[:3]) for side in (a, b)]
        raise ConversionError(f"{a.name} and {b.name} have no weight name in common: {few[0]}, ...; {few[1]}, ...")
    return list(pairs.values())


def _chunks(weight: StoredWeight) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_VALUES // weight.columns)
    for begin in range(0, weight.rows, step):
        yield begin, min(begin + step, weight.rows)


def _weight_error(names: tuple[str, ...], source: StoredWeight, other: StoredWeight, sums: ErrorSums) -> WeightError:
    return WeightError(
        names,
        (source.rows, source.columns),
        source.formats,
        other.formats,
        source.bytes,
        other.bytes,
        sums.relative_error,
        sums.cosine,
        sums.maximum,
    )


def _side(model: StoredModel) -> Side:
    formats = model.bytes_by_format()
    return Side(model.name, sum(formats.values()), formats)


def compare_text(a: Any, b: Any, windows: Sequence[torch.Tensor], progress: Progress | None = None) -> TextComparison:
    """Two Transformers models on the same token windows [1, n]: predictions, and the output of every layer.

    Raises ConversionError where the models have different vocabularies or layers.
    """
    predictions = PredictionSums()
    errors: dict[str, ErrorSums] = {}
    total, done = sum(window.numel() for window in windows), 0
    with torch.inference_mode():
        for window in windows:
            expected_layers, expected = _run(a, window)
            found_layers, found = _run(b, window)
            if expected.shape != found.shape or expected_layers.keys() != found_layers.keys():
                raise ConversionError(
                    f"the models differ: A has {len(expected_layers)} layers and {expected.shape[-1]} tokens, "
                    f"B {len(found_layers)} and {found.shape[-1]}"
                )
            predictions.add(expected, found, window[0])
            for name, output in expected_layers.items():
                errors.setdefault(name, ErrorSums()).add(output, found_layers[name])
            done += window.numel()
            if progress is not None:
                progress(done, total)
    agreement, (first, second) = predictions.agreement, predictions.perplexities
    layers = tuple(LayerError(name, sums.relative_error) for name, sums in errors.items())
    return TextComparison(agreement.positions, agreement.divergence, agreement.top1, first, second, layers)


def _run(model: Any, window: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The output of every layer by name, and the logits [n, vocabulary]."""
    outputs: dict[str, torch.Tensor] = {}
    with _layer_outputs(model, outputs):
        logits = model(window.to(model.device), use_cache=False).logits
    return outputs, logits[0].cpu()


@contextmanager
def _layer_outputs(model: Any, outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep what every layer gives while it runs; a layer is a member of one of the outermost lists of modules."""
    handles = []
    for name, module in model.named_modules():
        if sum(word.isdecimal() for word in name.split(".")) == 1 and name.rpartition(".")[2].isdecimal():
            handles.append(module.register_forward_hook(_keeper(name, outputs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(name: str, outputs: dict[str, torch.Tensor]) -> Callable[[Any, Any, Any], None]:
    def keep(module: Any, arguments: Any, output: Any) -> None:
        outputs[name] = (output[0] if isinstance(output, tuple) else output).detach().cpu()

    return keep
