"""Banks of quantized experts, through the interface that Transformers has for implementations of experts.

Tokens are sorted by expert and each bank is one `ninfer::expert_linear`, as with Transformers' own grouped_mm; the
weights stay packed, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.functions import check_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["IMPLEMENTATION", "leave_packed_experts", "packed_experts_forward", "use_packed_experts"]

IMPLEMENTATION = "ninfer"
_DEFAULT = "grouped_mm"
"""What Transformers chooses by itself, and on some devices exchanges for one that gathers dense experts."""


def packed_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts of tokens [T, H]: their sum, weighted by `top_k_weights` [T, k] of experts `top_k_index` [T, k].

    Experts that are not quantized, have biases or lie [E, K, N] are left to Transformers' grouped_mm.
    """
    first = self.gate_up_proj if self.has_gate else self.up_proj
    packed = isinstance(first, NinferTensor) and isinstance(self.down_proj, NinferTensor)
    if not packed or self.is_transposed or self.has_bias:
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    chosen = top_k_index.shape[-1]
    experts, order = torch.sort(top_k_index.reshape(-1))
    every = torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(experts, every, right=True).to(torch.int32)
    inner = _multiply(hidden_states[order // chosen], first, offsets)
    products = _multiply(self._apply_gate(inner) if self.has_gate else self.act_fn(inner), self.down_proj, offsets)
    if getattr(self, "has_post_expert_norm", False):  # older releases do not know such experts
        products = self.post_expert_norm(products)
    products = products * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    restored = torch.empty_like(products).index_copy(0, order, products)
    return restored.unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


def _multiply(tokens: torch.Tensor, bank: NinferTensor, offsets: torch.Tensor) -> torch.Tensor:
    check_dtype("experts", tokens, bank.compute_dtype)
    return bank.expert_product(tokens, offsets)


def use_packed_experts(model: PreTrainedModel, packed: Iterable[str]) -> None:
    """Choose this implementation for a model with quantized banks, unless the caller of from_pretrained chose one."""
    banks = any(len(model.get_parameter(name).shape) == 3 for name in packed)
    if banks and _DEFAULT in model.get_experts_implementation().values():
        chosen = model.get_experts_implementation()
        model.set_experts_implementation({k: IMPLEMENTATION if v == _DEFAULT else v for k, v in chosen.items()})


def leave_packed_experts(model: PreTrainedModel) -> None:
    """Choose what Transformers chooses by itself again."""
    chosen = model.get_experts_implementation()
    if IMPLEMENTATION in chosen.values():
        model.set_experts_implementation({k: _DEFAULT if v == IMPLEMENTATION else v for k, v in chosen.items()})


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, packed_experts_forward)
