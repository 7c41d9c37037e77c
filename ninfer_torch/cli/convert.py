"""Convert a GGUF file, a Hugging Face safetensors folder or another `.ninfer` file to a `.ninfer` file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ninfer_torch.artifact.journal import journal_path
from ninfer_torch.cli.progress import byte_bar
from ninfer_torch.convert.official_recipes import OFFICIAL_RECIPES
from ninfer_torch.convert.pipeline import convert, plan
from ninfer_torch.convert.presets import PRESETS
from ninfer_torch.convert.report import report_path
from ninfer_torch.errors import ConversionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "; ".join(f"{preset.name}: {preset.summary}" for preset in PRESETS.values())
    parser.add_argument(
        "source", type=Path, help="a .gguf or .ninfer file, or a folder with config.json and safetensors"
    )
    parser.add_argument("output", type=Path, nargs="?", help="the .ninfer file to write; it must not exist")
    parser.add_argument("--preset", choices=PRESETS, help=f"{presets} (default: q4, or direct under a --recipe)")
    parser.add_argument(
        "--recipe",
        metavar="FILE|NAME",
        help=f"a Python file: configure(model, recipe, sources); or an official recipe: {', '.join(OFFICIAL_RECIPES)}",
    )
    parser.add_argument(
        "--official",
        action="store_true",
        help="write NInfer's own parameter names and parents, as official recipes do (Qwen3.5 models)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="PATTERN=FORMAT[:METHOD[:NAME=VALUE,...]]",
        help="after preset and recipe, e.g. 'text/*/mlp.down_proj.weight=q6_g64_fp16:grouped_search'; repeatable",
    )
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        dest="sources",
        metavar="NAME=PATH",
        help="a source a recipe names; vision=PATH is the mmproj file of a GGUF file's model",
    )
    parser.add_argument("--plan", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the plan or the report as JSON")
    parser.add_argument("--name", help="public model name in the file (default: the source's)")
    parser.add_argument(
        "--no-fallback", action="store_true", help="fail where a GGUF block type cannot be kept as it is"
    )
    parser.add_argument("--max-file-bytes", type=int, metavar="N", help="split into files of at most N bytes")
    parser.add_argument(
        "--artifact-id", metavar="HEX", help="32 hex digits instead of a random id, for repeatable bytes"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep unfinished work when interrupted, and go on with what an interrupted --resume left",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report here too, as JSON")
    parser.add_argument("--quiet", action="store_true", help="print the summary only, not every tensor")


def run(arguments: argparse.Namespace) -> None:
    choices: dict[str, Any] = {
        "preset": arguments.preset,
        "recipe": arguments.recipe,
        "settings": arguments.settings,
        "sources": _named_sources(arguments.sources),
        "name": arguments.name,
        "no_fallback": arguments.no_fallback,
        "official": arguments.official or None,
    }
    if arguments.plan:
        outline = plan(arguments.source, **choices).outline
        print(outline.to_json() if arguments.json else outline.summary() if arguments.quiet else outline.table())
        return
    if arguments.output is None:
        raise ConversionError("no output file is named; only --plan does without")
    if arguments.report is not None and arguments.report.exists():
        raise ConversionError(f"{arguments.report} exists; choose another name for the report")
    with byte_bar(arguments.output.name) as progress, _kept_when_interrupted(arguments):
        report = convert(
            arguments.source,
            arguments.output,
            artifact_id=arguments.artifact_id,
            max_file_bytes=arguments.max_file_bytes,
            resume=arguments.resume,
            progress=progress,
            **choices,
        )
    if arguments.report is not None:
        arguments.report.write_text(report.to_json(), encoding="utf-8")
    print(report.to_json() if arguments.json else report.summary() if arguments.quiet else report.table())
    print(f"wrote {arguments.output} and {report_path(arguments.output).name}", file=sys.stderr)


@contextmanager
def _kept_when_interrupted(arguments: argparse.Namespace) -> Iterator[None]:
    """Say so where an interrupt leaves work to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        if arguments.resume and journal_path(arguments.output).exists():
            raise KeyboardInterrupt("interrupted; the same command goes on from here") from None
        raise


def _named_sources(texts: list[str]) -> dict[str, Path]:
    named = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConversionError(f"--source {text!r}: expected NAME=PATH")
        named[name] = Path(path)
    return named
