"""A comparison in pictures: PNG files, and one HTML page that needs nothing beside it. Drawn by matplotlib."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ninfer_torch.convert.compare import Comparison, WeightError
from ninfer_torch.errors import ConversionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "draw", "require_matplotlib", "write_html", "write_pictures"]

_LARGEST_LEGEND = 14


def require_matplotlib() -> None:
    """Raise ConversionError, saying how to install it, where matplotlib is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConversionError("pictures need matplotlib: pip install 'ninfer-torch[plot]'") from error


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _weights_by_kind(comparison: Comparison) -> dict[str, list[WeightError]]:
    """Weights of layers with an error, by kind, in layer order; those without a layer are left to the table."""
    kinds: dict[str, list[WeightError]] = {}
    for weight in comparison.weights:
        if weight.layer is not None and 0 < weight.relative_error < math.inf:
            kinds.setdefault(weight.kind, []).append(weight)
    return {kind: sorted(weights, key=lambda weight: weight.layer or 0) for kind, weights in kinds.items()}


def error_by_layer(comparison: Comparison) -> Figure:
    """Relative weight error over the layers, one line per kind of weight."""
    figure, axes = _figure(9, 5)
    kinds = _weights_by_kind(comparison)
    for index, (kind, weights) in enumerate(kinds.items()):
        layers = [weight.layer for weight in weights]
        style = ("-", "--", ":", "-.")[index // 10 % 4]
        axes.plot(layers, [weight.relative_error for weight in weights], style, marker=".", label=kind)  # type: ignore[arg-type]
    errors = [weight.relative_error for weights in kinds.values() for weight in weights]
    if errors:
        if max(errors) > 10 * min(errors):
            axes.set_yscale("log")
        axes.legend(
            fontsize="small", ncols=1 + (len(kinds) > _LARGEST_LEGEND), loc="center left", bbox_to_anchor=(1, 0.5)
        )
    axes.set(title="Weight error by layer and kind", xlabel="layer", ylabel="relative error")
    return figure


def size_by_format(comparison: Comparison) -> Figure:
    """Bytes of both models' weights, stacked by format."""
    figure, axes = _figure(9, 2.8)
    names = [f"A: {comparison.a.name}", f"B: {comparison.b.name}"]
    starts = [0.0, 0.0]
    for format in dict.fromkeys([*comparison.a.formats, *comparison.b.formats]):
        sizes = [side.formats.get(format, 0.0) / 1e6 for side in (comparison.a, comparison.b)]
        axes.barh(names, sizes, left=starts, label=format)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(title="Size by format", xlabel="MB")
    return figure


def output_by_layer(comparison: Comparison) -> Figure:
    """Relative error of the layers' outputs on the text."""
    figure, axes = _figure(9, 4)
    layers = comparison.text.layers if comparison.text is not None else ()
    axes.plot(range(len(layers)), [layer.relative_error for layer in layers], marker="o")
    axes.set(title="Error of layer outputs on the text", xlabel="layer", ylabel="relative error")
    axes.set_ylim(bottom=0)
    return figure


PICTURES: Mapping[str, Callable[[Comparison], Any]] = MappingProxyType(
    {"error_by_layer": error_by_layer, "size_by_format": size_by_format, "output_by_layer": output_by_layer}
)
"""Every picture by the name of its file."""

_NEED_TEXT = {"output_by_layer"}


def draw(comparison: Comparison) -> dict[str, bytes]:
    """The pictures as PNG bytes by name; those about a text only where one was run.

    Raises ConversionError where matplotlib is not installed.
    """
    drawn = {}
    for name, picture in PICTURES.items():
        if comparison.text is not None or name not in _NEED_TEXT:
            buffer = io.BytesIO()
            picture(comparison).savefig(buffer, format="png", dpi=120)
            drawn[name] = buffer.getvalue()
    return drawn


def write_pictures(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write every picture into a folder, which is made, and return the files."""
    drawn = draw(comparison)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, data in drawn.items():
        path = folder / f"{name}.png"
        path.write_bytes(data)
        paths.append(path)
    return tuple(paths)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid "
    "#ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
)


def write_html(comparison: Comparison, file: Path) -> None:
    """Write one page with summary, pictures and table; it refers to nothing outside itself."""
    title = html.escape(f"{comparison.a.name} and {comparison.b.name}")
    pictures = "\n".join(
        f'<p><img alt="{name.replace("_", " ")}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></p>'
        for name, data in draw(comparison).items()
    )
    head, *body = comparison.rows()
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in body)
    file.write_text(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n'
        f"<h1>{title}</h1>\n<pre>{html.escape(comparison.summary())}</pre>\n{pictures}\n<table>\n<tr>"
        + "".join(f"<th>{name}</th>" for name in head)
        + f"</tr>\n{rows}\n</table></html>\n",
        encoding="utf-8",
    )
