"""The one part of the build that pyproject.toml cannot say: native CPU kernels, built where there is a C++ compiler.

The extension uses the limited API of Python 3.10 and no torch headers, so one wheel serves every later Python. Without a compiler the
installation succeeds all the same, and the reference implementation computes.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SOURCES = Path("ninfer_torch", "kernels", "cpu", "src")
INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512_bf16", "neon", "dotprod")
PARTS = ("module", "driver", "matrix_amx", *(f"isa_{name}" for name in INSTRUCTION_SETS))

native = Extension(
    "ninfer_torch.kernels.cpu._native",
    [str(SOURCES / f"{name}.cpp") for name in PARTS],
    depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
    language="c++",
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    # Decoded weights are exact: no contraction of a product and a difference to one rounding.
    extra_compile_args=["-std=c++17", "-O2", "-g0", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"],
    extra_link_args=["-fopenmp"],
    optional=True,
)


class Wheel(bdist_wheel):
    """A wheel whose tag says what is in it: without the extension it runs on any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        built = list(Path(self.bdist_dir).glob("ninfer_torch/kernels/cpu/_native*"))
        return super().get_tag() if built else ("py3", "none", "any")


setup(
    ext_modules=[native],
    cmdclass={"bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
