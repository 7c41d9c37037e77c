"""Every kernel of every format compiled ahead of time for sm_90 in bfloat16: the interpreter accepts what the compiler refuses.

Compiled kernels stay in Triton's disk cache, so that only changed ones are compiled again.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels.triton.offline import Variant, compile_variant, facts_of, variants
from ninfer_torch.kernels.triton.tiles import TILES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

QUANTIZED = [name for name, record in FORMATS.items() if record.quantized]
ONE_OF_A_FAMILY = {TILES[name].family: name for name in reversed(QUANTIZED)}


def of_kind(format: str, operation: str, kernel: str, dtype: str = "bf16") -> list[Variant]:
    found = variants(format, dtype, "sm_90")
    return [variant for variant in found if (variant.operation, variant.launch.kernel) == (operation, kernel)]


@pytest.mark.parametrize("format", QUANTIZED)
def test_values_are_exact_in_the_compiled_code(format: str) -> None:
    (variant,) = of_kind(format, "rows", "rows")
    ptx = compile_variant(variant).asm["ptx"]
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    for forbidden in ("fma.rn.f32", "div.full", "div.approx", ".ftz", "tf32"):
        assert forbidden not in ptx, forbidden


@pytest.mark.parametrize("format", QUANTIZED)
def test_decode_kernels_keep_everything_in_registers(format: str) -> None:
    for variant in of_kind(format, "linear", "small_m"):
        facts = facts_of(variant, compile_variant(variant))
        assert facts.stack == 0, f"{variant}: {facts}"
        assert facts.instructions_per_weight is not None and facts.load_bits


@pytest.mark.parametrize("format", QUANTIZED)
def test_prefill_multiplies_on_tensor_cores(format: str) -> None:
    variant = of_kind(format, "linear", "tiled")[-1]
    compiled = compile_variant(variant)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("format", QUANTIZED)
def test_gradients_compile(format: str) -> None:
    variant = of_kind(format, "backward", "backward")[-1]
    assert "mma" in compile_variant(variant).asm["ptx"]


@pytest.mark.parametrize("format", ONE_OF_A_FAMILY.values())
def test_the_other_launches_compile(format: str) -> None:
    paired = [variant for variant in of_kind(format, "linear", "tiled") if variant.launch.paired]
    experts = [of_kind(format, "expert_linear", kernel)[-1] for kernel in ("small_m", "tiled")]
    for variant in (*paired, *experts, of_kind(format, "backward", "backward")[0]):
        assert compile_variant(variant).asm["cubin"], variant
    assert paired


def test_float32_products_are_never_tf32() -> None:
    for operation, kernel in (("linear", "tiled"), ("backward", "backward")):
        ptx = compile_variant(of_kind("q4_g64_fp16", operation, kernel, "fp32")[-1]).asm["ptx"]
        assert "tf32" not in ptx and "fma.rn.f32" in ptx


@pytest.mark.parametrize(("operation", "kernel"), [("linear", "small_m"), ("linear", "tiled"), ("rows", "rows")])
def test_arguments_of_one_compile(operation: str, kernel: str) -> None:
    ones = ("M", "N", "count", "row_begin", "run_rows", "steps", "steps_per_split", "x_row")
    variant = of_kind("nvfp4", operation, kernel)[-1]
    assert compile_variant(variant, [name for name in ones if name != "N"]).asm["cubin"]
    assert compile_variant(variant, ones).asm["cubin"]


def test_partial_sums_and_permutation_compile() -> None:
    import triton
    from triton.compiler import ASTSource

    from ninfer_torch.kernels.triton.offline import TARGETS
    from ninfer_torch.kernels.triton.small_m import reduce_kernel
    from ninfer_torch.kernels.triton.tiled import permute_kernel

    signature = {"out": "*bf16", "partials": "*fp32", "bias": "*bf16", "count": "i32", "N": "i32"}
    constants = {"SPLITS": 4, "HAS_BIAS": True, "BLOCK": 1024}
    for ones in ({}, {"count": 1, "N": 1}):
        types = {**signature, **dict.fromkeys([*constants, *ones], "constexpr")}
        source = ASTSource(reduce_kernel, types, {**constants, **ones})
        assert triton.compile(source, target=TARGETS["sm_90"]).asm["cubin"]
    for format in ONE_OF_A_FAMILY.values():
        constants = {"TILE": TILES[format].tile, "BLOCK_M": 16, "BLOCK_U": 64, "M": 1, "x_column": 1}
        types = {name: "*bf16" if name in ("out", "x") else "i32" for name in permute_kernel.arg_names}
        source = ASTSource(permute_kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
        assert triton.compile(source, target=TARGETS["sm_90"]).asm["cubin"]
