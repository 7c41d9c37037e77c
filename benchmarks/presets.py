"""What each preset costs: size and next-token agreement of SmolLM2-135M-Instruct with its source, as a table.

    python benchmarks/presets.py [--json FILE|-]

The source is the Q4_1 GGUF that the demo uses, dequantized to float32 by Transformers; agreement is measured on the demo's passage.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ninfer_torch  # noqa: F401
from ninfer_torch.cli.demo import TEXT, source_logits
from ninfer_torch.cli.fetch import smollm2_gguf
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.quality import compare_logits

MEASURED = ("q4", "q5", "q6", "q8", "fp8", "gguf")


def measure(preset: str, folder: Path) -> dict[str, Any]:
    path = folder / f"{preset}.ninfer"
    report = convert(smollm2_gguf(), path, preset)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        agreement = compare_logits(source_logits(smollm2_gguf(), ids), model(ids).logits)
    bits = report.bits_per_weight
    return {"preset": preset, "file_bytes": path.stat().st_size, "bits_per_weight": bits, **asdict(agreement)}


def table(records: list[dict[str, Any]]) -> str:
    lines = [
        "| Preset | File, MB | Bits per weight | KL to the source, nats | Top-1 agreement |",
        "|---|---:|---:|---:|---:|",
    ]
    for record in records:
        lines.append(
            f"| `{record['preset']}` | {record['file_bytes'] / 1e6:.1f} | {record['bits_per_weight']:.2f} "
            f"| {record['divergence']:.4f} | {record['top1']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        records = [measure(preset, Path(scratch)) for preset in MEASURED]
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
    else:
        print(table(records))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
