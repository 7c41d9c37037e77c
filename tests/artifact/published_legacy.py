"""Object lists of the published version 2 files, spelled out from spec/container.md 13.3 and parameters.md, with no help
from the library: names, shapes and sizes as the old programs had them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from artifact.tiny_legacy import place

Shape = tuple[int, ...]
Row = tuple[str, Shape, str]

V = 248320
RESOURCES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
]


def up(value: int) -> int:
    return -(-value // 256) * 256


def grouped(high: int) -> Callable[[int, int], int]:
    """Bytes of a [N, K] object of four bits and `high` more per code, in groups of 64."""
    return lambda n, k: up(n * (groups := -(-k // 128) * 2) * 32) + up(n * groups * 8 * high) + n * groups * 2


MATRICES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "Q4G64_F16S": ("row-split-k128-v1", grouped(0)),
    "Q5G64_F16S": ("row-split-k128-v1", grouped(1)),
    "Q6G64_F16S": ("row-split-k128-v1", grouped(2)),
    "W8G32_F16S": ("row-split-k128-v1", lambda n, k: up(n * -(-k // 128) * 128) + n * -(-k // 128) * 8),
    "NVFP4": ("blockscale-k16-m128x4-v1", lambda n, k: up(n * k // 2) + n * k // 16 + 4),
    "FP8_E4M3FN_ROW_BF16S": ("row-scale-v1", lambda n, k: up(n * k) + 2 * n),
}
WORDS = {"BF16": 2, "FP32": 4, "I32": 4}

Q4, Q5, Q6, Q8 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"
BF16, FP32, I32, NVFP4, FP8 = "BF16", "FP32", "I32", "NVFP4", "FP8_E4M3FN_ROW_BF16S"


def tensor(name: str, shape: Shape, format: str) -> dict[str, Any]:
    if format in WORDS:
        layout, size = "contiguous-le-v1", math.prod(shape) * WORDS[format]
    else:
        layout, encoded = MATRICES[format]
        size = encoded(*shape)
    return {
        "name": name,
        "kind": "tensor",
        "shape": list(shape),
        "format": format,
        "layout": layout,
        "offset": 0,
        "bytes": size,
    }


def objects(rows: Iterator[Row]) -> list[dict[str, Any]]:
    files = [
        {"name": f"frontend/{name}", "kind": "resource", "encoding": "raw-bytes-v1", "offset": 0, "bytes": 7}
        for name in RESOURCES
    ]
    return place([*files, *(tensor(*row) for row in rows)])


def vision(width: int) -> Iterator[Row]:
    h, i, merged = 1152, 4304, 4608
    yield "vision/patch_embedding", (h, 1536), BF16
    yield "vision/patch_embedding_bias", (h,), BF16
    yield "vision/position_embedding", (2304, h), BF16
    for layer in range(27):
        p = f"vision/layers/{layer}/"
        for norm in ("norm1", "norm2"):
            yield f"{p}{norm}/weight", (h,), BF16
            yield f"{p}{norm}/bias", (h,), BF16
        yield p + "attention/qkv", (3 * h, h), Q8
        yield p + "attention/qkv_bias", (3 * h,), BF16
        yield p + "attention/output", (h, h), Q8
        yield p + "attention/output_bias", (h,), BF16
        yield p + "mlp/fc1", (i, h), Q8
        yield p + "mlp/fc1_bias", (i,), BF16
        yield p + "mlp/fc2", (h, i), Q8
        yield p + "mlp/fc2_bias", (h,), BF16
    yield "vision/merger/norm/weight", (h,), BF16
    yield "vision/merger/norm/bias", (h,), BF16
    yield "vision/merger/fc1", (merged, merged), Q8
    yield "vision/merger/fc1_bias", (merged,), BF16
    yield "vision/merger/fc2", (width, merged), Q8
    yield "vision/merger/fc2_bias", (width,), BF16


def draft(component: str, width: int, intermediate: int, layers: int, taps: int) -> Iterator[Row]:
    yield f"{component}/feature_projection", (width, taps * width), Q8
    yield f"{component}/context_norm", (width,), BF16
    for layer in range(layers):
        p = f"{component}/layers/{layer}/"
        yield p + "input_norm", (width,), BF16
        yield p + "attention/query_key_value", (6144, width), Q8
        yield p + "attention/query_norm", (128,), BF16
        yield p + "attention/key_norm", (128,), BF16
        yield p + "attention/output", (width, 4096), Q8
        yield p + "post_attention_norm", (width,), BF16
        yield p + "mlp/gate_up", (2 * intermediate, width), Q8
        yield p + "mlp/down", (width, intermediate), Q8
        if component == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):
                yield f"{p}{conv}/base_kernel", (2, 2, width), BF16
                yield f"{p}{conv}/kernel_projection", (4 * width // 16, width), BF16
    if component == "dflash2":
        yield "dflash2/candidate_selector/hidden_projection", (256, width), BF16
        yield "dflash2/candidate_selector/predecessor_codebook", (V, 256), BF16
        yield "dflash2/candidate_selector/successor_codebook", (V, 256), BF16
    yield f"{component}/final_norm", (width,), BF16


def norms(p: str, width: int) -> Iterator[Row]:
    yield p + "input_norm", (width,), BF16
    yield p + "post_attention_norm", (width,), BF16


def heads(width: int) -> Iterator[Row]:
    yield "text/token_embedding", (V, width), Q6
    yield "text/final_norm", (width,), BF16
    yield "text/output_head", (V, width), Q6
    yield "text/draft_head", (131072, width), Q4
    yield "text/draft_head_token_ids", (131072,), I32


def stem(width: int) -> Iterator[Row]:
    yield "mtp/input_projection", (width, 2 * width), Q8
    for norm in ("embedding_norm", "hidden_norm", "final_norm"):
        yield f"mtp/{norm}", (width,), BF16


def attention(p: str, queries: int, keys: int, width: int) -> Iterator[Row]:
    yield p + "attention/query_key_gate_value", (2 * queries + 2 * keys, width), Q8
    yield p + "attention/query_norm", (256,), BF16
    yield p + "attention/key_norm", (256,), BF16
    yield p + "attention/output", (width, queries), Q8


def dense(dflash2: bool = False) -> list[dict[str, Any]]:
    """qwen3.6-27b and qwen3.8-27b, groupwise-int."""
    return objects(dense_rows(dflash2))


def dense_rows(dflash2: bool) -> Iterator[Row]:
    h, i = 5120, 17408
    yield from heads(h)
    for layer in range(64):
        p = f"text/layers/{layer}/"
        yield from norms(p, h)
        if layer % 4 == 3:
            yield p + "attention/query_key", (7168, h), Q4
            yield p + "attention/gate_value", (7168, h), Q5
            yield p + "attention/query_norm", (256,), BF16
            yield p + "attention/key_norm", (256,), BF16
            yield p + "attention/output", (h, 6144), Q5
        else:
            yield from gated_delta_net_state(p, 48, 10240)
            yield p + "gdn/a_projection", (48, h), BF16
            yield p + "gdn/b_projection", (48, h), BF16
            yield p + "gdn/query_key", (4096, h), Q4
            yield p + "gdn/value_z", (12288, h), Q5
            yield p + "gdn/output", (h, 6144), Q5
        yield p + "mlp/gate_up", (2 * i, h), Q4
        yield p + "mlp/down", (h, i), Q5
    yield from stem(h)
    yield from norms("mtp/layer/", h)
    yield from attention("mtp/layer/", 6144, 1024, h)
    yield "mtp/layer/mlp/gate_up", (2 * i, h), Q8
    yield "mtp/layer/mlp/down", (h, i), Q8
    yield from vision(h)
    if dflash2:
        yield from draft("dflash2", h, i, 5, 5)


def gated_delta_net_state(p: str, heads: int, channels: int) -> Iterator[Row]:
    yield p + "gdn/a_log", (heads,), FP32
    yield p + "gdn/dt_bias", (heads,), FP32
    yield p + "gdn/convolution", (4, channels), BF16
    yield p + "gdn/norm", (128,), BF16


def dense_nvfp4() -> list[dict[str, Any]]:
    """qwen3.6-27b, nvfp4: one parent per input, a divisor per site but for nine sites kept in eight bits."""
    return objects(dense_nvfp4_rows())


def dense_nvfp4_rows() -> Iterator[Row]:
    h, i = 5120, 17408

    def site(name: str, shape: Shape, operation: str, exact: bool = False) -> Iterator[Row]:
        yield name, shape, FP8 if exact else NVFP4
        if not exact:
            yield f"{name.rpartition('/')[0]}/{operation}/input_scale_divisor", (), FP32

    yield from heads(h)
    for layer in range(64):
        p = f"text/layers/{layer}/"
        yield from norms(p, h)
        if layer % 4 == 3:
            yield from site(p + "attention/query_key_gate_value", (14336, h), "input_projection")
            yield p + "attention/query_norm", (256,), BF16
            yield p + "attention/key_norm", (256,), BF16
            yield from site(p + "attention/output", (h, 6144), "output_projection")
        else:
            yield from gated_delta_net_state(p, 48, 10240)
            yield p + "gdn/a_projection", (48, h), BF16
            yield p + "gdn/b_projection", (48, h), BF16
            yield from site(p + "gdn/query_key_value_z", (16384, h), "input_projection")
            yield from site(p + "gdn/output", (h, 6144), "output_projection")
        yield from site(p + "mlp/gate_up", (2 * i, h), "gate_up_projection")
        yield from site(p + "mlp/down", (h, i), "down_projection", exact=layer < 9)
    yield from stem(h)
    yield from norms("mtp/layer/", h)
    yield from attention("mtp/layer/", 6144, 1024, h)
    yield "mtp/layer/mlp/gate_up", (2 * i, h), Q8
    yield "mtp/layer/mlp/down", (h, i), Q8
    yield from vision(h)


def mixture() -> list[dict[str, Any]]:
    """qwen3.6-35b-a3b, groupwise-int."""
    return objects(mixture_rows())


def mixture_rows() -> Iterator[Row]:
    h = 2048

    def experts(p: str) -> Iterator[Row]:
        yield p + "moe/router_shared_gate", (257, h), BF16
        yield p + "moe/routed_gate_up", (262144, h), Q4
        yield p + "moe/routed_down", (524288, 512), Q5
        yield p + "moe/shared_gate_up", (1024, h), Q8
        yield p + "moe/shared_down", (h, 512), Q8

    yield from heads(h)
    for layer in range(40):
        p = f"text/layers/{layer}/"
        yield from norms(p, h)
        if layer % 4 == 3:
            yield from attention(p, 4096, 512, h)
        else:
            yield from gated_delta_net_state(p, 32, 8192)
            yield p + "gdn/a_b_projection", (64, h), BF16
            yield p + "gdn/query_key_value_z", (12288, h), Q8
            yield p + "gdn/output", (h, 4096), Q8
        yield from experts(p)
    yield from stem(h)
    yield from norms("mtp/layer/", h)
    yield from attention("mtp/layer/", 4096, 512, h)
    yield from experts("mtp/layer/")
    yield from vision(h)
    yield from draft("dflash", h, 6144, 6, 8)
