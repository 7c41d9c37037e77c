"""fp8 rows: E4M3FN codes with one scale per row, in two planes (`row_scale_v1`) or one of records (`row_interleaved_v1`)."""

from __future__ import annotations

import torch

from ninfer_torch.formats import RowFloatFormat
from ninfer_torch.tensors.packed import FAMILIES, PackedTensor


class RowFloatTensor(PackedTensor):
    """Planes: `codes` uint8 [N, K] and `scales` bfloat16 [N], or `records` uint8 [N, K + 2], the binary16 scale last."""

    codes: torch.Tensor
    scales: torch.Tensor
    records: torch.Tensor

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        if len(self.call[0]) == 1:
            return [torch.cat([self.records[:, begin:end], self.records[:, -2:]], dim=1)]
        return [self.codes[:, begin:end].contiguous(), self.scales]


FAMILIES[RowFloatFormat.family] = RowFloatTensor
