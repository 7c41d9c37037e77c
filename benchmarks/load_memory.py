"""Memory and time of loading a model and generating with it: a `.ninfer` file beside dense safetensors of the same weights.

    python benchmarks/load_memory.py [--model FILE.ninfer] [--tokens N] [--json FILE|-]

Each contestant runs in a process of its own that has first imported everything and generated with a tiny model, so that libraries
and thread pools count for nobody. Without --model, SmolLM2-135M-Instruct is fetched and converted with preset q8. Linux only: figures come
from /proc.

Figures of a contestant: `file_bytes`; `load_seconds`; `added_bytes`, the peak of the resident set during load and generation above that before;
`mapped_resident_bytes`, the pages of the weight file that are resident after the model is built and before it is used.
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

PROMPT = "The sea is"


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS now, VmHWM at most since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def mapped_resident(folder: Path) -> int:
    """Resident bytes of this process's mappings of files under `folder`."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            counted = len(head) == 6 and Path(head[5]).is_relative_to(folder)
        elif counted and head[0] == "Rss:":
            total += int(head[1]) * 1024
    return total


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights: an artifact with its parts, or the safetensors of a folder."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else sorted(path.parent.glob(path.name + "*"))


def generate(path: Path, tokens: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    _continue(model, tokenizer, tokens, torch)


def _continue(model: Any, tokenizer: Any, tokens: int, torch: Any) -> None:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


def measure(warm: Path, path: Path, tokens: int) -> dict[str, Any]:
    """Run in a process of its own: warm up with one model, then load another and generate."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import ninfer_torch  # noqa: F401

    generate(warm, 4)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    begin = time.perf_counter()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    loaded = time.perf_counter() - begin
    mapped = mapped_resident(path if path.is_dir() else path.parent)
    _continue(model, tokenizer, tokens, torch)
    return {
        "file_bytes": sum(file.stat().st_size for file in weight_files(path)),
        "load_seconds": loaded,
        "added_bytes": resident("VmHWM") - before,
        "mapped_resident_bytes": mapped,
    }


def tiny_models(folder: Path) -> dict[str, Path]:
    """A tiny random model as safetensors and as an artifact, to warm up with."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from ninfer_torch.convert.pipeline import convert

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    AutoTokenizer.from_pretrained(folder / "model.ninfer").save_pretrained(folder / "tiny")
    convert(folder / "tiny", folder / "tiny.ninfer", "q8")
    return {"ninfer": folder / "tiny.ninfer", "safetensors": folder / "tiny"}


def contestants(folder: Path, model: Path | None) -> dict[str, Path]:
    """The artifact, linked or converted into `folder`, and its weights as dense bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ninfer_torch.cli.fetch import smollm2_gguf
    from ninfer_torch.convert.pipeline import convert

    artifact = folder / "model.ninfer"
    if model is None:
        convert(smollm2_gguf(), artifact, "q8")
    else:
        artifact.symlink_to(model.resolve())
    quantized = AutoModelForCausalLM.from_pretrained(artifact)
    dense = type(quantized)(quantized.config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            weight = quantized.get_parameter(name)
            parameter.copy_(weight.dequantize() if hasattr(weight, "planes") else weight)
    dense.config.quantization_config = None
    del dense.config.quantization_config
    dense.save_pretrained(folder / "dense")
    AutoTokenizer.from_pretrained(artifact).save_pretrained(folder / "dense")
    return {"ninfer": artifact, "safetensors": folder / "dense"}


def run(model: Path | None, tokens: int) -> list[dict[str, Any]]:
    import ninfer_torch  # noqa: F401

    records = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        paths = contestants(folder, model)
        warm = tiny_models(folder)
        for name, path in paths.items():
            command = [sys.executable, __file__, "--measure", str(warm[name]), str(path), "--tokens", str(tokens)]
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            records.append({"contestant": name, **json.loads(finished.stdout.splitlines()[-1])})
    return records


def table(records: list[dict[str, Any]]) -> str:
    lines = [f"{'':<14}{'file MB':>10}{'load s':>10}{'added MB':>10}{'mapped pages MB':>18}{'added / file':>14}"]
    for record in records:
        size, added = record["file_bytes"], record["added_bytes"]
        lines.append(
            f"{record['contestant']:<14}{size / 1e6:>10.1f}{record['load_seconds']:>10.2f}{added / 1e6:>10.1f}"
            f"{record['mapped_resident_bytes'] / 1e6:>18.2f}{added / size:>14.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a .ninfer file (default: SmolLM2 converted to q8)")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    parser.add_argument("--measure", nargs=2, type=Path, metavar=("WARM", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, arguments.tokens)))
        return
    records = run(arguments.model, arguments.tokens)
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
    else:
        print(table(records))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
