"""Grouped signed integers: q2, q4, q5, q6, q8 and t2 in `row_split_k128_v1`."""

from __future__ import annotations

import torch

from ninfer_torch.formats import GroupedFormat, get_format
from ninfer_torch.layouts import planes_of
from ninfer_torch.tensors.packed import FAMILIES, PackedTensor


class GroupedTensor(PackedTensor):
    """Planes: `codes` uint8 [N, groups, bytes], `high` uint8 [N, groups, bytes] (q5, q6), `scales` float16 [N, groups]."""

    codes: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        record = get_format(self.format)
        if not isinstance(record, GroupedFormat):
            raise TypeError(f"{self.format} is not a grouped format")
        self.check_cut(begin, end, record.group)
        first, last = begin // record.group, -(-end // record.group)
        specs = planes_of(self.format, (max(self.geometry.rows, 1), end - begin))
        zero = 0x55 if record.bias else 0  # the word of code 0, repeated
        cut = []
        for spec, plane in zip(specs, self.call[0], strict=True):
            part = plane.new_full((plane.shape[0], *spec.shape[1:]), zero if spec.name == "codes" else 0)
            part[:, : last - first] = plane[:, first:last]
            cut.append(part)
        return cut


FAMILIES[GroupedFormat.family] = GroupedTensor
