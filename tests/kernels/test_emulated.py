"""NEON kernels on a machine without ARM: cross-compiled without Python, run in an emulator, held to the criteria of the others.

Needs `aarch64-linux-gnu-g++` and `qemu-aarch64` (Debian: g++-aarch64-linux-gnu, qemu-user); `.ci/neon` installs and runs them.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from cpu_cases import any_words, bits, check_a8, shapes
from ninfer_torch.kernels import fallback
from ninfer_torch.kernels.grids import grid
from ninfer_torch.layouts import Geometry, slice_rows
from quantized import QUANTIZED, check_a16, exact_product, random_weight

native = pytest.importorskip("ninfer_torch.kernels.cpu.native", reason="the native kernels are not built")

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = Path(native.__file__).parent / "src"
PARTS = ("driver", "matrix_amx", *(f"isa_{name}" for name in native.INSTRUCTION_SETS))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATIONS = ("dequantize", "linear", "embedding")

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason=f"needs {COMPILER} and {EMULATOR}"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels and `emulated.cpp`, linked statically."""
    folder = tmp_path_factory.mktemp("emulated")
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", f"-I{SOURCES}", "-Wall", "-Werror"]
    files = [*(SOURCES / f"{part}.cpp" for part in PARTS), Path(__file__).with_name("emulated.cpp")]
    compilers = [
        subprocess.Popen([COMPILER, *flags, "-c", str(file), "-o", str(folder / f"{file.stem}.o")]) for file in files
    ]
    assert [compiler.wait() for compiler in compilers] == [0] * len(files)
    objects = [str(folder / f"{file.stem}.o") for file in files]
    subprocess.run([COMPILER, "-static", *objects, "-o", str(folder / "kernels")], check=True)
    return folder / "kernels"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Requests:
    """What the program is to compute, and what is to be checked about each result."""

    def __init__(self, instruction_set: str) -> None:
        self.isa = native.INSTRUCTION_SETS.index(instruction_set)
        self.data = b"".join(self.sized(raw(grid(name))) for name in native._GRIDS)
        self.checks: list[tuple[torch.dtype, tuple[int, ...], Callable[[torch.Tensor], None]]] = []

    @staticmethod
    def sized(data: bytes) -> bytes:
        return struct.pack("<q", len(data)) + data

    def add(
        self,
        operation: str,
        planes: Sequence[torch.Tensor],
        format: str,
        geometry: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        check: Callable[[torch.Tensor], None],
        operand: torch.Tensor | None = None,
        int8: bool = False,
    ) -> None:
        size = torch.empty(shape, dtype=dtype).nbytes
        count = 0 if operand is None else len(operand)
        names = (OPERATIONS.index(operation), self.isa, native._FORMAT[format], native._DTYPE[dtype], int8, 1)
        self.data += struct.pack("<13q", *names, *geometry, count, size)
        for plane in [*planes, *[torch.empty(0, dtype=torch.uint8)] * (3 - len(planes))]:
            self.data += self.sized(raw(plane))
        self.data += self.sized(b"" if operand is None else raw(operand))
        self.checks.append((dtype, shape, check))

    def run(self, program: Path, folder: Path) -> None:
        (folder / "requests").write_bytes(self.data)
        command = [EMULATOR, "-cpu", "max", str(program), str(folder / "requests"), str(folder / "results")]
        subprocess.run(command, check=True, timeout=300)
        results, at = (folder / "results").read_bytes(), 0
        for dtype, shape, check in self.checks:
            size = torch.empty(shape, dtype=dtype).nbytes
            check(torch.frombuffer(bytearray(results[at : at + size]), dtype=dtype).view(shape))
            at += size
        assert at == len(results)


@pytest.mark.parametrize("instruction_set", ["neon", "dotprod"])
@pytest.mark.parametrize("format", QUANTIZED)
def test_kernels_meet_the_criteria(format: str, instruction_set: str, program: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    requests = Requests(instruction_set)

    def equal_bits(expected: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def check(found: torch.Tensor) -> None:
            assert torch.equal(bits(found), bits(expected))

        return check

    for seed, shape in enumerate(shapes(format)):
        planes, geometry = any_words(format, shape, seed), Geometry.whole(shape)
        ids = torch.randint(0, shape[0], (5,))
        for dtype in DTYPES:
            values = fallback.dequantize(planes, format, geometry, dtype)
            requests.add("dequantize", planes, format, geometry, shape, dtype, equal_bits(values))
            requests.add("embedding", planes, format, geometry, (5, shape[1]), dtype, equal_bits(values[ids]), ids)
        weight = random_weight(format, *shape, seed=seed)
        planes, _, geometry, *_ = weight.call
        dense = weight.dequantize()
        for rows in (1, 2, 5, 9):
            for dtype in DTYPES:
                x = torch.randn(rows, shape[1]).to(dtype)
                options = (planes, format, geometry, (rows, shape[0]), dtype)
                exact = exact_product(x, weight)
                requests.add("linear", *options, lambda y, exact=exact, k=shape[1]: check_a16(y, exact, k), x)
                requests.add("linear", *options, lambda y, x=x, w=dense: check_a8(y, x, w, format), x, int8=True)
    whole = random_weight(format, 384, 256, divisors=3 if format == "nvfp4" else 1)
    part, place = slice_rows(format, whole.call[0], whole.call[2], 127, 301)
    x, view = torch.randn(3, 256), whole[127:301]
    requests.add("dequantize", part, format, place, (174, 256), torch.float32, equal_bits(view.dequantize()))
    requests.add(
        "linear", part, format, place, (3, 174), torch.float32, lambda y: check_a16(y, exact_product(x, view), 256), x
    )
    requests.run(program, tmp_path)
