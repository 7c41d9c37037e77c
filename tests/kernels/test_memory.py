"""What an operator needs beside its operands and its result: less than 64 MiB, whatever the matrix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROWS, COLUMNS = 16384, 4096
"""256 MiB as float32, so that a dense copy could not hide below the bound."""

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, torch.nn.functional as F
from quantized import random_weight

def resident(field):
    text = Path('/proc/self/status').read_text()
    return int(text.split(field + ':')[1].split()[0]) * 1024

def work(weight, ids):
    x = torch.randn(2, weight.shape[1], requires_grad=True)
    F.linear(x, weight).sum().backward()
    F.linear(x.bfloat16(), weight.to(torch.bfloat16))
    return F.embedding(ids, weight)

torch.set_num_threads(1)
weight = random_weight(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
packed = weight.nbytes
work(random_weight(sys.argv[2], 128, 256), torch.arange(3))  # code, tables and thread pools
before = resident('VmRSS')
Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
result = work(weight, torch.arange(0, len(weight), 64))
print(resident('VmHWM') - before - result.nbytes - packed)  # .to() copies the planes
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from /proc")
@pytest.mark.parametrize("format", ["q5_g64_fp16", "nvfp4", "gguf_q4_k", "gguf_iq2_xxs", "fp8_e4m3fn_row_fp16"])
def test_operators_stay_below_the_bound(format: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), format, str(ROWS), str(COLUMNS)]
    found = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert found < 64 * 2**20
