"""Convert a GGUF file or a Hugging Face safetensors folder to a `.ninfer` file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ninfer_torch.cli.progress import byte_bar
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.presets import PRESETS
from ninfer_torch.errors import ConversionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "; ".join(f"{preset.name}: {preset.summary}" for preset in PRESETS.values())
    parser.add_argument("source", type=Path, help="a .gguf file, or a folder with config.json and safetensors")
    parser.add_argument("output", type=Path, help="the .ninfer file to write; it must not exist")
    parser.add_argument("--preset", choices=PRESETS, default="q4", help=f"{presets} (default: %(default)s)")
    parser.add_argument("--name", help="public model name in the file (default: the source's)")
    parser.add_argument(
        "--no-fallback", action="store_true", help="fail where a GGUF block type cannot be kept as it is"
    )
    parser.add_argument("--max-file-bytes", type=int, metavar="N", help="split into files of at most N bytes")
    parser.add_argument(
        "--artifact-id", metavar="HEX", help="32 hex digits instead of a random id, for repeatable bytes"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what became of every tensor as JSON")
    parser.add_argument("--quiet", action="store_true", help="print the summary only, not every tensor")


def run(arguments: argparse.Namespace) -> None:
    if arguments.report is not None and arguments.report.exists():
        raise ConversionError(f"{arguments.report} exists; choose another name for the report")
    with byte_bar(arguments.output.name) as progress:
        report = convert(
            arguments.source,
            arguments.output,
            arguments.preset,
            name=arguments.name,
            no_fallback=arguments.no_fallback,
            artifact_id=arguments.artifact_id,
            max_file_bytes=arguments.max_file_bytes,
            progress=progress,
        )
    if arguments.report is not None:
        arguments.report.write_text(report.to_json(), encoding="utf-8")
    print(report.summary() if arguments.quiet else report.table())
    print(f"wrote {arguments.output}", file=sys.stderr)
