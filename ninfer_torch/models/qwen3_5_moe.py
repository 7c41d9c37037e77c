"""Qwen3.5 with a mixture of experts: the feed-forward layers differ, all else is Qwen3.5. Source: spec/parameters.md 4.5.

Symbols beyond those of `qwen3_5`: E experts, IE and IS widths of an expert and of the shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer_torch.models.base import Row, Source
from ninfer_torch.models.qwen3_5 import Qwen3_5
from ninfer_torch.models.qwen3_5_config import Family

__all__ = ["MOE", "Qwen3_5Moe"]

_MOE_FFN = (
    Row("mlp.gate.weight", (Source("moe/router", "E H", "ffn_input"),)),
    Row("mlp.shared_expert_gate.weight", (Source("moe/shared_score", "1 H", "ffn_input"),)),
    Row(
        "mlp.experts.gate_up_proj",
        (
            Source("moe/experts/{e}/gate", "IE H", "ffn_input"),
            Source("moe/experts/{e}/up", "IE H", "ffn_input"),
        ),
        shape="E 2IE H",
        each="E",
    ),
    Row(
        "mlp.experts.down_proj",
        (Source("moe/experts/{e}/down", "H IE", "moe/experts/{e}/product"),),
        shape="E H IE",
        each="E",
    ),
    Row("mlp.shared_expert.gate_proj.weight", (Source("moe/shared/gate", "IS H", "ffn_input"),)),
    Row("mlp.shared_expert.up_proj.weight", (Source("moe/shared/up", "IS H", "ffn_input"),)),
    Row("mlp.shared_expert.down_proj.weight", (Source("moe/shared/down", "H IS", "moe/shared/product"),)),
)

MOE = Family(
    text_class="Qwen3_5MoeForCausalLM",
    conditional_class="Qwen3_5MoeForConditionalGeneration",
    mtp_class="Qwen3_5MoeMTP",
    model_type="qwen3_5_moe",
    text_type="qwen3_5_moe_text",
    vision_type="qwen3_5_moe_vision",
    ffn_members=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)


class Qwen3_5Moe(Qwen3_5):
    """The mixture-of-experts models."""

    family = MOE
    ffn = _MOE_FFN
    anchors: Mapping[str, str] = {
        "text": "Qwen3_5MoeTextModel",
        "vision": "Qwen3_5MoeVisionModel",
        "mtp": "MtpModel",
    }

    def sizes(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """The numbers behind the symbols of the tables."""
        text = configs["text"]
        width = text["moe_intermediate_size"]
        own = {"E": text["num_experts"], "IE": width, "2IE": 2 * width, "IS": text["shared_expert_intermediate_size"]}
        return {**super().sizes(configs), "1": 1, **own}
