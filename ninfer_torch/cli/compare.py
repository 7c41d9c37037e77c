"""Compare two models weight by weight, and on a text if one is given: what did a conversion cost?"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ninfer_torch.cli.progress import count_bar
from ninfer_torch.convert.compare import TextComparison, compare, compare_text
from ninfer_torch.convert.language import load_model, load_tokenizer, token_windows
from ninfer_torch.convert.stored import StoredModel, open_stored
from ninfer_torch.errors import ConversionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, help="the reference: a .ninfer file, a safetensors folder or a .gguf file")
    parser.add_argument("b", type=Path, help="what is compared with it, of any of these kinds")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="run this text through both models: KL, top-1, perplexity, layer errors",
    )
    parser.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens per window (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="use at most N tokens of the text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print the summary only, not every weight")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one self-contained page with table and pictures"
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="write the pictures into this folder")


def run(arguments: argparse.Namespace) -> None:
    if arguments.context < 2:
        raise ConversionError(f"--context {arguments.context}: expected at least 2 tokens")
    if arguments.html is not None or arguments.png is not None:
        from ninfer_torch.convert.pictures import require_matplotlib

        require_matplotlib()
    text = None if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    first, second = open_stored(arguments.a), open_stored(arguments.b)
    with count_bar("weights") as progress:
        comparison = compare(first, second, progress)
    if text is not None:
        found = _run_text(first, second, text, arguments)
        comparison = dataclasses.replace(comparison, text=found)
    if arguments.png is not None or arguments.html is not None:
        from ninfer_torch.convert.pictures import write_html, write_pictures

        if arguments.png is not None:
            write_pictures(comparison, arguments.png)
        if arguments.html is not None:
            write_html(comparison, arguments.html)
    print(comparison.to_json() if arguments.json else comparison.summary() if arguments.quiet else comparison.table())


def _run_text(first: StoredModel, second: StoredModel, text: str, arguments: argparse.Namespace) -> TextComparison:
    try:
        tokenizer = load_tokenizer(first.path, first.source)
    except ConversionError:
        tokenizer = load_tokenizer(second.path, second.source)
    windows = token_windows(tokenizer, text, arguments.context, arguments.tokens)
    a, b = (load_model(side.path, side.source) for side in (first, second))
    with count_bar("tokens") as progress:
        return compare_text(a, b, windows, progress)
