"""nvfp4: E2M1 codes under swizzled E4M3FN block scales and float32 divisors, `block_scale_k16_m128x4_v1`."""

from __future__ import annotations

import torch

from ninfer_torch.formats import BlockFloatFormat
from ninfer_torch.tensors.packed import FAMILIES, PackedTensor


class BlockFloatTensor(PackedTensor):
    """Planes: `codes` uint8 [N, K/2], `scales` uint8 tiles [N/128, K/64, 32, 4, 4], `divisors` float32 [d].

    The scale tiles and the divisors of a row view are those of its parent.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    divisors: torch.Tensor

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        self.check_cut(begin, end, 64)
        codes = self.codes[:, begin // 2 : end // 2].contiguous()
        return [codes, self.scales[:, begin // 64 : end // 64].contiguous(), self.divisors]


FAMILIES[BlockFloatFormat.family] = BlockFloatTensor
