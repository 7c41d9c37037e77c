"""What a conversion costs: size, next-token agreement and perplexity of two real models in every preset, as tables.

    python benchmarks/quality.py [--quick] [--tokens N] [--pictures DIR] [--json FILE|-]

The models are SmolLM2-135M-Instruct (a Q4_1 GGUF) and Gemma 3 270M (a Q4_K_M GGUF). What they are compared with is the
GGUF's own weights, decoded to float32. The text is Python's language reference as it travels with the interpreter
(`pydoc_data.topics`): every other topic is for measuring, the rest for `calibrate`. `--quick` leaves out the searches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

from matplotlib.figure import Figure

import ninfer_torch  # noqa: F401  # teaches Transformers the file
from ninfer_torch.cli.fetch import gemma3_gguf, smollm2_gguf
from ninfer_torch.convert.calibrate import calibrate
from ninfer_torch.convert.compare import Comparison, compare, compare_text
from ninfer_torch.convert.importance import write_importance
from ninfer_torch.convert.language import load_model, load_tokenizer, token_windows
from ninfer_torch.convert.pictures import write_pictures
from ninfer_torch.convert.pipeline import convert, open_source
from ninfer_torch.errors import ConversionError

CONTEXT = 512
CALIBRATION_TOKENS = 8192
LINEAR = "*_proj.weight"


@dataclass(frozen=True)
class Case:
    """One conversion: a preset, and what is set after it; `{imatrix}` stands for the calibrated file."""

    label: str
    preset: str
    setting: str | None = None

    @property
    def needs_importance(self) -> bool:
        return self.setting is not None and "{imatrix}" in self.setting


PRESETS = tuple(Case(f"`{name}`", name) for name in ("q4", "q5", "q6", "q8", "fp8"))
SEARCHES = (
    Case("`q4`, search", "q4", f"{LINEAR}=q4_g64_fp16:grouped_search"),
    Case("`q4`, search, imatrix", "q4", f"{LINEAR}=q4_g64_fp16:grouped_search:imatrix={{imatrix}}"),
    Case(
        "`q4`, search, imatrix, negative scales",
        "q4",
        f"{LINEAR}=q4_g64_fp16:grouped_search:imatrix={{imatrix}},negative_scales=true",
    ),
)
TERNARY = Case("`t2_g128_fp16`", "q4", f"{LINEAR}=t2_g128_fp16")
OWN = Case("`gguf` (its own blocks)", "gguf")

MODELS: Mapping[str, tuple[Callable[[], Path], tuple[Case, ...]]] = {
    "SmolLM2-135M-Instruct, Q4_1": (smollm2_gguf, (*PRESETS, *SEARCHES, TERNARY, OWN)),
    "Gemma 3 270M, Q4_K_M": (gemma3_gguf, (*PRESETS, TERNARY, OWN)),
}


@dataclass(frozen=True)
class Record:
    """A line of the table; without figures where the conversion is refused, for the reason in `refused`."""

    model: str
    case: str
    file_bytes: int | None = None
    bits_per_weight: float | None = None
    relative_error: float | None = None
    divergence: float | None = None
    top1: float | None = None
    perplexity: float | None = None
    source_perplexity: float | None = None
    refused: str = ""


def passages() -> tuple[str, str]:
    """The text to measure on and the text to calibrate on; they share no topic."""
    names = sorted(topics)
    measured, calibrated = ("\n\n".join(topics[name] for name in names[start::2]) for start in (0, 1))
    return measured, calibrated


class Bench:
    """One model: its source, decoded, and the texts as tokens."""

    def __init__(self, name: str, gguf: Path, tokens: int, scratch: Path) -> None:
        self.name, self.gguf, self.scratch = name, gguf, scratch
        source = open_source(gguf)
        tokenizer = load_tokenizer(gguf, source)
        self.dense = load_model(gguf, source)
        self.windows, self.calibration = (
            token_windows(tokenizer, text, CONTEXT, limit)
            for text, limit in zip(passages(), (tokens, CALIBRATION_TOKENS), strict=True)
        )

    def importance(self) -> Path:
        """The importance matrix of the model, calibrated once."""
        path = self.scratch / "importance.safetensors"
        if not path.exists():
            write_importance(path, calibrate(self.dense, self.calibration), "pydoc_data.topics")
        return path

    def measure(self, case: Case) -> tuple[Record, Comparison | None]:
        """Convert, load, and compare with the source: weights, then predictions."""
        path = self.scratch / "measured.ninfer"
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".conversion.json").unlink(missing_ok=True)
        setting = case.setting
        if setting is not None and case.needs_importance:
            setting = setting.format(imatrix=self.importance())
        try:
            report = convert(self.gguf, path, case.preset, settings=[setting] if setting else [])
        except ConversionError as error:
            return Record(self.name, case.label, refused=str(error)), None
        comparison = compare(self.gguf, path)
        text = compare_text(self.dense, load_model(path, None), self.windows)
        record = Record(
            self.name,
            case.label,
            path.stat().st_size,
            report.bits_per_weight,
            comparison.relative_error,
            text.divergence,
            text.top1,
            text.perplexity_b,
            text.perplexity_a,
        )
        return record, replace(comparison, text=text)


def table(records: list[Record]) -> str:
    """The records of one model in Markdown."""
    source = next(record.source_perplexity for record in records if record.source_perplexity is not None)
    lines = [
        f"{records[0].model}: perplexity of the source {source:.3f}",
        "",
        "| Conversion | File, MB | Bits per weight | Weight error | KL, nats | Top-1 agreement | Perplexity |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *map(_line, records)])


def _line(record: Record) -> str:
    if record.refused or record.file_bytes is None:
        return f"| {record.case} | refused: {record.refused} ||||||"
    return (
        f"| {record.case} | {record.file_bytes / 1e6:.1f} | {record.bits_per_weight:.2f} | {record.relative_error:.4f} "
        f"| {record.divergence:.4f} | {record.top1:.1%} | {record.perplexity:.3f} |"
    )


def draw(records: list[Record], file: Path) -> None:
    """Divergence over bits per weight, a point per conversion, a colour per model."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(record.model for record in records):
        shown = [record for record in records if record.model == name and (record.divergence or 0) > 1e-6]
        axes.scatter([record.bits_per_weight for record in shown], [record.divergence for record in shown], label=name)
        for index, record in enumerate(shown):
            label = record.case.replace("`", "")
            place = (record.bits_per_weight, record.divergence)
            axes.annotate(label, place, (5, 3 - 11 * (index % 2)), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set(title="What a conversion costs", xlabel="bits per weight", ylabel="KL to the source, nats")
    axes.margins(x=0.2)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the searches, which take minutes")
    parser.add_argument(
        "--tokens", type=int, default=2048, metavar="N", help="tokens to measure on (default: %(default)s)"
    )
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write quality.png and the pictures of preset q4")
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    arguments = parser.parse_args()
    records: list[Record] = []
    for name, (fetch, cases) in MODELS.items():
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(name, fetch(), arguments.tokens, Path(scratch))
            for case in cases:
                if arguments.quick and case in SEARCHES:
                    continue
                record, comparison = bench.measure(case)
                records.append(record)
                if arguments.pictures is not None and comparison is not None and case == PRESETS[0]:
                    write_pictures(comparison, arguments.pictures / name.split(",")[0].lower().replace(" ", "-"))
        if arguments.json != "-":
            print(table([record for record in records if record.model == name]), flush=True)
    if arguments.pictures is not None:
        draw(records, arguments.pictures / "quality.png")
    if arguments.json:
        text = json.dumps([asdict(record) for record in records], indent=1)
        print(text) if arguments.json == "-" else Path(arguments.json).write_text(text)


if __name__ == "__main__":
    main()
