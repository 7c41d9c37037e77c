"""Rewrite a `.ninfer` file of container version 1 or 2 as version 3; the weights stay byte for byte."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ninfer_torch.artifact import open_artifact, upgrade
from ninfer_torch.cli.progress import byte_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, help="the .ninfer file of version 1 or 2; it stays as it is")
    parser.add_argument("new", type=Path, help="the .ninfer file to write; it must not exist")
    parser.add_argument("--max-file-bytes", type=int, metavar="N", help="split into files of at most N bytes")
    parser.add_argument(
        "--artifact-id", metavar="HEX", help="32 hex digits instead of a random id, for repeatable bytes"
    )


def run(arguments: argparse.Namespace) -> None:
    with open_artifact(arguments.old) as artifact:
        total = artifact.files[0].payload_bytes
    done = 0
    with byte_bar(arguments.new.name) as show:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            show(done, total)

        unbound = upgrade(
            arguments.old,
            arguments.new,
            artifact_id=arguments.artifact_id,
            max_file_bytes=arguments.max_file_bytes,
            progress=progress,
        )
    if unbound is not None:
        print(f"ninfer-torch: {arguments.new} has objects but no parameters: {unbound}", file=sys.stderr)
    print(f"wrote {arguments.new}", file=sys.stderr)
