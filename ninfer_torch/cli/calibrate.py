"""Measure on a text how much each input channel of each weight matters; the file is for `grouped_search`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ninfer_torch.cli.progress import count_bar
from ninfer_torch.convert.calibrate import calibrate
from ninfer_torch.convert.importance import write_importance
from ninfer_torch.convert.language import load_model, load_tokenizer, token_windows
from ninfer_torch.convert.pipeline import open_source
from ninfer_torch.errors import ConversionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a safetensors folder, a .gguf file or a .ninfer file")
    parser.add_argument("text", type=Path, help="the text to run, UTF-8")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the safetensors file to write"
    )
    parser.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens per window (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="use at most N tokens of the text")


def run(arguments: argparse.Namespace) -> None:
    if arguments.context < 2:
        raise ConversionError(f"--context {arguments.context}: expected at least 2 tokens")
    if arguments.output.exists():
        raise ConversionError(f"{arguments.output} exists; choose another name")
    text = arguments.text.read_text(encoding="utf-8")
    is_gguf = arguments.model.is_file() and arguments.model.suffix.lower() == ".gguf"
    source = open_source(arguments.model) if is_gguf else None
    windows = token_windows(load_tokenizer(arguments.model, source), text, arguments.context, arguments.tokens)
    model = load_model(arguments.model, source)
    with count_bar("tokens") as progress:
        vectors = calibrate(model, windows, progress)
    write_importance(arguments.output, vectors, arguments.text.name)
    tokens = sum(window.numel() for window in windows)
    print(f"wrote {arguments.output}: {len(vectors)} weights, {tokens} tokens", file=sys.stderr)
