"""What weights made of other weights have in common: inner tensors by name; no format, layout or object of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ninfer_torch.tensors.base import NinferTensor, new_wrapper


class ComposedTensor(NinferTensor):
    """A weight over other NinferTensors, and perhaps plain tensors beside them, which are attributes under their names.

    It has `formats` but no `format`, `geometry` or `call`; `planes` are those of the inner tensors under dotted names; its
    policy is that of the weights inside.
    """

    members: dict[str, torch.Tensor]

    @property
    def composition(self) -> str:
        """How the tensor is composed, in a few words for its repr."""
        return ", ".join(self.members)

    @property
    def way_to_store(self) -> str:
        """How an artifact holds this weight, for the message of who tries to make one object of it."""
        raise NotImplementedError(f"{type(self).__name__}.way_to_store")

    def over(self, inner: Mapping[str, torch.Tensor], dtype: torch.dtype) -> NinferTensor:
        """The same composition of other inner tensors."""
        raise NotImplementedError(f"{type(self).__name__}.over")

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.members.items():
            if isinstance(tensor, NinferTensor):
                found.update({f"{name}.{plane}": words for plane, words in tensor.planes.items()})
            else:
                found[name] = tensor
        return found

    @property
    def _weights(self) -> list[NinferTensor]:
        return [tensor for tensor in self.members.values() if isinstance(tensor, NinferTensor)]

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for weight in self._weights for name in weight.formats))

    def map_planes(
        self,
        apply: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        policy: str | None = None,
    ) -> NinferTensor:
        mapped = {
            name: tensor.map_planes(apply, dtype=dtype, policy=policy)
            if isinstance(tensor, NinferTensor)
            else apply(tensor)
            for name, tensor in self.members.items()
        }
        return self.over(mapped, dtype or self.compute_dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(formats={', '.join(self.formats)}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, bits_per_weight={self.bits_per_weight:.4g}, {self.composition})"
        )


def new_composed(
    cls: type[Any], inner: Mapping[str, torch.Tensor], policy: str, shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """An instance of `cls` over `inner`, on the device of the first."""
    tensor = new_wrapper(cls, shape, dtype, next(iter(inner.values())).device)
    for name, part in inner.items():
        setattr(tensor, name, part)
    tensor.members, tensor.policy = dict(inner), policy
    return tensor
