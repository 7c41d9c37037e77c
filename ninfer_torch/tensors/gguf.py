"""ggml block formats, blocks kept byte for byte: `gguf_blocks_v1`."""

from __future__ import annotations

import torch

from ninfer_torch.formats import GgufFormat, get_format
from ninfer_torch.tensors.packed import FAMILIES, PackedTensor


class GgufTensor(PackedTensor):
    """Plane: `blocks` uint8 [N, row bytes]."""

    blocks: torch.Tensor

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        record = get_format(self.format)
        if not isinstance(record, GgufFormat):
            raise TypeError(f"{self.format} is not a ggml block format")
        self.check_cut(begin, end, record.block_values)
        first, last = begin // record.block_values, end // record.block_values
        return [self.blocks[:, first * record.block_bytes : last * record.block_bytes].contiguous()]


FAMILIES[GgufFormat.family] = GgufTensor
