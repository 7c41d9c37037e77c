"""The command `ninfer-torch`: one file per subcommand, each with `add_arguments(parser)` and `run(arguments)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from ninfer_torch.cli import calibrate, compare, convert, demo, generate, inspect, tune, upgrade
from ninfer_torch.errors import NinferError
from ninfer_torch.versions import __version__, show_versions

__all__ = ["main"]

_COMMANDS: dict[str, ModuleType] = {
    "convert": convert,
    "calibrate": calibrate,
    "compare": compare,
    "inspect": inspect,
    "upgrade": upgrade,
    "generate": generate,
    "demo": demo,
    "tune": tune,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ninfer-torch", description="NInfer's .ninfer models in PyTorch.")
    parser.add_argument("--version", action="version", version=f"ninfer-torch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    versions = commands.add_parser("versions", help="Print the versions a bug report needs.")
    versions.set_defaults(run=lambda arguments: show_versions())
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 after an error that is printed in one line, or 130 after Ctrl-C."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except (NinferError, OSError) as error:
        print(f"ninfer-torch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"ninfer-torch: {str(interrupt) or 'interrupted, nothing half-written is left'}", file=sys.stderr)
        return 130
    return 0
