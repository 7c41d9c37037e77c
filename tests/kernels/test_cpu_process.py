"""What native kernels owe the process around them: no byte read or written outside, forks, the environment's switches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

native = pytest.importorskip("ninfer_torch.kernels.cpu.native", reason="the native kernels are not built")

TESTS = Path(__file__).parents[1]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


GUARDED = """
import ctypes, mmap
import torch
from ninfer_torch.kernels.cpu import native
from ninfer_torch.kernels.precision import set_activation_precision
from quantized import QUANTIZED, random_weight
from ninfer_torch.formats import get_format

set_activation_precision("policy")
libc, keep = ctypes.CDLL(None, use_errno=True), []

def guarded(tensor):
    "A copy that ends where unreadable memory begins, and begins where unreadable memory ends as far as alignment permits."
    page, size = mmap.PAGESIZE, tensor.nbytes
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (start, start + page + room):
        if libc.mprotect(ctypes.c_void_p(at), page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    keep.append(memory)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=page + room - size)
    copy = copy.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)

def shape(record):
    if record.family == "block_float":
        return 128, 64
    if record.family == "gguf":
        return 3, record.block_values
    return 3, 77

for isa in native.instruction_sets():
    native.use(isa)
    for name in QUANTIZED:
        rows, columns = shape(get_format(name))
        weight = random_weight(name, rows, columns)
        planes, _, geometry, *_ = weight.call
        inside = [guarded(plane) for plane in planes]
        assert torch.equal(native.dequantize(inside, name, geometry, torch.float32), weight.dequantize())
        ids = guarded(torch.tensor([rows - 1, 0]))
        native.embedding(ids, inside, name, geometry, torch.float16)
        for m in (1, 2, 5, 17):
            for dtype in (torch.float32, torch.bfloat16):
                x, bias = guarded(torch.randn(m, columns).to(dtype)), guarded(torch.randn(rows).to(dtype))
                for policy in ("A16Only", "AllowA8"):
                    native.linear(x, inside, name, geometry, bias, policy)
print("inside")
"""


def test_no_kernel_reads_outside_its_tensors() -> None:
    found = run(GUARDED)
    assert found.stdout.strip() == "inside", found.stderr[-2000:]


FORKED = """
import os, sys
import torch
from ninfer_torch.kernels.cpu import native
from ninfer_torch.kernels.precision import set_activation_precision
from quantized import random_weight

torch.set_num_threads(2)
set_activation_precision("policy")
planes, format, geometry, *_ = random_weight("q4_g64_fp16", 2048, 512).call
x = torch.randn(3, 512)
expected = native.linear(x, planes, format, geometry, None, "AllowA8")
child = os.fork()
if child == 0:
    same = torch.equal(native.linear(x, planes, format, geometry, None, "AllowA8"), expected)
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), torch.equal(native.linear(x, planes, format, geometry, None, "AllowA8"), expected))
"""


def test_a_forked_child_computes_the_same() -> None:
    found = run(FORKED)
    assert found.stdout.split() == ["0", "True"], found.stderr[-2000:]


NAME = "from ninfer_torch.kernels.cpu import native; print(native.INSTRUCTION_SETS[native._isa])"


@pytest.mark.parametrize("name", native.instruction_sets())
def test_the_environment_forces_an_instruction_set(name: str) -> None:
    assert run(NAME, NINFER_TORCH_CPU=name).stdout.strip() == name


def test_an_instruction_set_that_cannot_run_is_an_error_not_a_fallback() -> None:
    found = run(NAME, NINFER_TORCH_CPU="sve9")
    assert found.returncode != 0 and "cannot run 'sve9'" in found.stderr


OPERATORS = """
from ninfer_torch.kernels import fallback
from ninfer_torch.kernels.cpu import IMPLEMENTATIONS
print(IMPLEMENTATIONS["linear"] is fallback.linear)
"""


@pytest.mark.parametrize(("name", "reference"), [("reference", "True"), ("scalar", "False")])
def test_the_reference_can_be_forced(name: str, reference: str) -> None:
    assert run(OPERATORS, NINFER_TORCH_CPU=name).stdout.strip() == reference


ABSENT = """
import sys, warnings
sys.modules["ninfer_torch.kernels.cpu._native"] = None
import torch
from quantized import exact_product, random_weight, check_a16
weight = random_weight("gguf_q4_k", 8, 256)
x = torch.randn(2, 256)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        check_a16(torch.nn.functional.linear(x, weight), exact_product(x, weight), 256)
print(len(caught), "reference implementation" in str(caught[0].message))
"""


def test_without_the_extension_the_reference_computes_and_warns_once() -> None:
    found = run(ABSENT)
    assert found.stdout.split() == ["1", "True"], found.stderr[-2000:]
