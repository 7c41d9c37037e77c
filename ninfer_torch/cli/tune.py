"""Measure kernel launches on this machine's CUDA card and store the fastest; later runs use them."""

from __future__ import annotations

import argparse

import torch

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.kernels import measuring, tuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="the card (default: %(default)s)")
    parser.add_argument("--families", default="", help="comma-separated families of formats (default: all)")
    parser.add_argument(
        "--dtypes",
        default="bf16",
        help="comma-separated activation dtypes, of " + ", ".join(tuning.DTYPES) + " (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise UnsupportedOperation(f"tune: unknown device {arguments.device!r}: {error}") from error
    card = measuring.card_of(device)
    families = _named("family", arguments.families, tuple(measuring.families()))
    dtypes = _named("dtype", arguments.dtypes, tuple(tuning.DTYPES))
    choices = []
    with torch.cuda.device(device):
        for choice in tuning.tune(card, measuring.CudaTimer(device), families, dtypes):
            choices.append(choice)
            print(describe(choice), flush=True)
    print(f"stored in {tuning.write(card, choices)}")


def _named(kind: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else known
    for name in names:
        if name not in known:
            raise UnsupportedOperation(f"tune: unknown {kind} {name!r}, expected some of {', '.join(known)}")
    return names


def describe(choice: tuning.Choice) -> str:
    """One line: what was chosen for which rows, and its time beside the default launch's."""
    launch = choice.launch
    blocks = f"{launch.kernel} {launch.block_m}x{launch.block_n}x{launch.block_u}, {launch.warps} warps"
    rows = "any rows" if choice.max_rows >= tuning.END else f"to {choice.max_rows} rows"
    times = f"{choice.microseconds:.1f} us, default {choice.default_microseconds:.1f} us"
    return f"{choice.operation} {choice.family} {choice.dtype} {rows}: {blocks}: {times}"
