"""Peak memory and time of a conversion: a synthetic checkpoint of about 1 GB, in a process of its own.

    python benchmarks/convert_memory.py [--gigabytes G] [--preset NAME]... [--json FILE|-]

The checkpoint is a Llama of bfloat16 words with a large embedding. `added_bytes` is the peak of the resident set during the conversion
above the resident set of the same process after it has planned the conversion, when Transformers and everything else is loaded;
`bound_bytes` is what it may be: 2 x the largest parent in float32, and 200 MiB. Pages of the mapped checkpoint that are resident count too.
Linux only: figures come from /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from ninfer_torch.models.generic import plan_model

VOCABULARY, WIDTH = 64000, 2048
LAYER_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)
ALLOWANCE = 200 * 2**20


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write a checkpoint of about that size and return its bytes."""
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * WIDTH) / LAYER_BYTES))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    folder.mkdir()
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        planned.names[0]: torch.empty(planned.shape).normal_(0, 0.02, generator=generator).to(torch.bfloat16)
        for planned in plan_model(config).tensors
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS now, VmHWM at most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def measure(source: Path, output: Path, preset: str) -> dict[str, Any]:
    """Convert in this process, which has done nothing before."""
    from ninfer_torch.convert.pipeline import convert, plan

    planned = plan(source, preset)
    largest = max(entry.weights for entry in planned.outline.tensors)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    idle = resident("VmRSS")
    begin = time.perf_counter()
    report = convert(source, output, preset)
    seconds = time.perf_counter() - begin
    return {
        "preset": preset,
        "output_bytes": report.tensor_bytes,
        "seconds": seconds,
        "weights_per_second": report.weights / seconds,
        "added_bytes": resident("VmHWM") - idle,
        "bound_bytes": 2 * 4 * largest + ALLOWANCE,
    }


def table(records: list[dict[str, Any]]) -> str:
    lines = ["| Preset | Output, MB | Time, s | Million weights/s | Peak added, MiB | Bound, MiB | Peak / bound |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for record in records:
        lines.append(
            f"| `{record['preset']}` | {record['output_bytes'] / 1e6:.1f} | {record['seconds']:.1f} "
            f"| {record['weights_per_second'] / 1e6:.1f} | {record['added_bytes'] / 2**20:.0f} "
            f"| {record['bound_bytes'] / 2**20:.0f} | {record['added_bytes'] / record['bound_bytes']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, metavar="G", help="(default: %(default)s)")
    parser.add_argument("--preset", action="append", metavar="NAME", help="repeatable (default: q4, q8 and direct)")
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    parser.add_argument("--measure", nargs=3, metavar=("SOURCE", "OUTPUT", "PRESET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        source, output, preset = arguments.measure
        print(json.dumps(measure(Path(source), Path(output), preset)))
        return
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "model"
        size = write_checkpoint(source, arguments.gigabytes)
        print(f"checkpoint of {size / 1e9:.2f} GB", file=sys.stderr)
        for preset in arguments.preset or ("q4", "q8", "direct"):
            output = Path(scratch) / f"{preset}.ninfer"
            command = [sys.executable, __file__, "--measure", str(source), str(output), preset]
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            records.append(json.loads(finished.stdout.splitlines()[-1]))
            output.unlink()
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
    else:
        print(table(records))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
