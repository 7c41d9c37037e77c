"""Kernels compiled ahead of time, for any card and without one: what a compiler can say of them stands in for measurements.

Facts come from the bundled CUDA tools and are exact for the compiled launch; they say nothing of numerics or time.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ninfer_torch.kernels.triton import operators  # noqa: F401  (enters every decoder in TILES)
from ninfer_torch.kernels.triton.dense import rows_kernel
from ninfer_torch.kernels.triton.launch import OPERATIONS, Launch, reachable
from ninfer_torch.kernels.triton.small_m import small_m_kernel
from ninfer_torch.kernels.triton.tiled import backward_kernel, permute_kernel, tiled_kernel
from ninfer_torch.kernels.triton.tiles import TILES

__all__ = ["DTYPES", "TARGETS", "Facts", "Variant", "compile_variant", "facts_of", "source_hash", "variants"]

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""Architectures by name."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_KERNELS = {
    "rows": rows_kernel,
    "permute": permute_kernel,
    "small_m": small_m_kernel,
    "tiled": tiled_kernel,
    "backward": backward_kernel,
}
_POINTERS = {
    **dict.fromkeys(("plane0", "plane1", "plane2"), "*u8"),
    "ids": "*i64",
    "offsets": "*i32",
    "table": "*i8",
}
_OF_X = ("out", "x", "bias", "grad")
_DIVISIBLE = {"out", "x", "grad", "plane0", "plane1", "plane2", "table", "N", "K", "x_row", "grad_row", "rows", "units"}
_UNIT_STRIDES = ("x_column", "grad_column")


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: an operation of the launch table on a format, in a dtype, for an architecture."""

    format: str
    operation: str
    launch: Launch
    dtype: str
    target: str

    @property
    def decode(self) -> bool:
        """Whether it is a decode kernel: few activation rows, bound by the bytes of the weight."""
        return self.launch.kernel == "small_m"

    @property
    def weights_per_lane(self) -> float:
        """Weights that one lane handles in a pass of the main loop."""
        launch, lanes = self.launch, TILES[self.format].lanes
        return launch.block_n * launch.block_u * lanes / (launch.warps * TARGETS[self.target].warp_size)

    def __str__(self) -> str:
        launch = self.launch
        blocks = f"{launch.block_m}x{launch.block_n}x{launch.block_u}"
        return f"{self.operation} {launch.kernel}{' paired' if launch.paired else ''} {blocks}"


@dataclass(frozen=True)
class Facts:
    """What the compiler made of a variant. Counts are None where no tool tells: outside CUDA, or without a loop."""

    registers: int | None
    stack: int | None
    shared: int
    instructions_per_weight: float | None
    load_bits: tuple[int, ...]


def variants(format: str, dtype: str, target: str) -> Iterator[Variant]:
    """Every launch that the table can choose for a format, dtype and architecture."""
    architecture = TARGETS[target].arch
    number = architecture if isinstance(architecture, int) else 0
    for operation in OPERATIONS:
        for launch in reachable(operation, TILES[format].family, DTYPES[dtype], number):
            yield Variant(format, operation, launch, dtype, target)


def compile_variant(variant: Variant, ones: Sequence[str] = ()) -> Any:
    """Triton's compiled kernel, from its disk cache where the sources have not changed.

    `ones` names integer arguments whose value is 1: at run time Triton makes such arguments compile-time constants.
    """
    launch, decoder = variant.launch, TILES[variant.format]
    kernel = _KERNELS[launch.kernel]
    experts = 64 if variant.operation == "expert_linear" else 0
    known = {
        "TILE": decoder.tile,
        "ALIGN": decoder.alignment if decoder.row_extra != 2 else 2,
        "EVEN": True,
        "HAS_BIAS": launch.kernel == "tiled",
        "GATHER": True,
        "EXPERTS": experts,
        "EXPERTS_PADDED": max(experts, 1),
        "PERMUTED": launch.permuted,
        "PAIRED": launch.paired,
        "WIDE": launch.wide,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_U": launch.block_u,
        **dict.fromkeys((*_UNIT_STRIDES, *ones), 1),
    }
    names = kernel.arg_names
    constants = {name: known[name] for name in names if name in known}
    types = {**_POINTERS, **dict.fromkeys(_OF_X, f"*{variant.dtype}"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, "i32") for name in names}
    arguments = [(i, name) for i, name in enumerate(names) if name not in constants]
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in arguments if name in _DIVISIBLE}
    options = {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "enable_fp_fusion": launch.kernel != "rows",
    }
    source = ASTSource(kernel, signature, constants, divisible)
    return triton.compile(source, target=TARGETS[variant.target], options=options)


_HOST_CODE = ("__init__.py", "operators.py")
"""What no compiled kernel depends on."""


def source_hash() -> str:
    """Digest of the kernel sources and the launch table: a report with another one is stale."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name in _HOST_CODE:
            continue
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _tool(name: str, *arguments: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(program), *arguments], check=True, capture_output=True, text=True).stdout


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);")
_LABEL = re.compile(r"^\s*(\.L\S+):")
_BACK = re.compile(r"\bBRA\b.*`\((\.L\S+)\)")
_LOAD = re.compile(r"\bLDG\S*?\.E(?:\.([US]?\d+))?\b")


def _main_loop(assembly: str) -> list[str] | None:
    """The instructions of the longest backward branch."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[list[str]] = []
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
            back = _BACK.search(instruction[1])
            if back and labels.get(back[1], len(instructions)) < len(instructions) - 2:  # not the idle loop at the end
                loops.append(instructions[labels[back[1]] :])
    return max(loops, key=len) if loops else None


def facts_of(variant: Variant, compiled: Any) -> Facts:
    """Registers, stack, shared memory, and the main loop's lane instructions per weight and widths of global loads."""
    shared = compiled.metadata.shared
    if TARGETS[variant.target].backend != "cuda":
        spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        registers = re.search(r"\.vgpr_count:\s*(\d+)", compiled.asm["amdgcn"])
        return Facts(registers and int(registers[1]), spilled and int(spilled[1]), shared, None, ())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        loop = _main_loop(_tool("nvdisasm", "-c", file.name))
    registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
    loads = {int((width or "32").lstrip("US")) for line in loop or () for width in _LOAD.findall(line)}
    per_weight = None if loop is None else len(loop) / variant.weights_per_lane
    return Facts(registers and int(registers[1]), stack and int(stack[1]), shared, per_weight, tuple(sorted(loads)))
