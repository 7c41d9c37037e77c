"""A plain matrix as a block of a composed weight: bf16 or fp32 words, `contiguous_le_v1`.

A direct object on its own is a plain torch tensor; only inside `StackedRows` and `TransformedInput` does it take this
form, so that their blocks are all of one kind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.formats import FORMATS, DirectFormat
from ninfer_torch.layouts import Geometry
from ninfer_torch.tensors.base import NinferTensor, count_rows
from ninfer_torch.tensors.functions import autocast_dtype, without_autocast
from ninfer_torch.tensors.packed import FAMILIES, PackedTensor, make_tensor

_FLOATING = {
    record.dtype: name
    for name, record in FORMATS.items()
    if isinstance(record, DirectFormat) and record.dtype.is_floating_point
}


class DirectTensor(PackedTensor):
    """Plane: `words` [N, K] of the format's dtype. A product is dense, in the wider of its dtype and the
    activations'.
    """

    words: torch.Tensor

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        return [self.words[:, begin:end]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.words.to(dtype, copy=True).reshape(self.shape)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x.to(autocast_dtype(x))
        wide = torch.promote_types(x.dtype, self.words.dtype)
        with without_autocast(x):
            out = F.linear(x.to(wide), self.words.to(wide), None if bias is None else bias.to(wide))
        return out.to(x.dtype)

    def product_transposed(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, self.words.dtype)
        return (x.to(wide) @ self.words.to(wide)).to(x.dtype)

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.embedding(ids, self.words).to(dtype)

    expert_product = NinferTensor.expert_product
    expert_product_transposed = NinferTensor.expert_product_transposed


FAMILIES[DirectFormat.family] = DirectTensor


def as_block(weight: torch.Tensor, dtype: torch.dtype) -> NinferTensor:
    """`weight` as a NinferTensor of compute dtype `dtype`; a plain bf16 or fp32 tensor [..., N, K] is wrapped, not
    copied.

    Raises UnsupportedOperation for any other plain tensor and for one that requires gradients.
    """
    if isinstance(weight, NinferTensor):
        return weight if weight.compute_dtype == dtype else weight.placed(weight.device, dtype)
    format = _FLOATING.get(weight.dtype)
    if format is None or weight.dim() < 2 or weight.requires_grad:
        raise UnsupportedOperation(
            f"a composed weight is made of quantized tensors and frozen bf16 or fp32 matrices, found {weight.dtype} "
            f"{list(weight.shape)}{' that requires gradients' if weight.requires_grad else ''}"
        )
    rows, columns = count_rows(weight.shape), weight.shape[-1]
    words = weight.detach().reshape(rows, columns)
    return make_tensor(format, [words], Geometry.whole((rows, columns)), weight.shape, dtype, "A16Only")
