"""PEFT: what cannot be merged is said by name before the first layer is merged."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ninfer_torch.convert.merging import check_mergeable

__all__ = ["attach_adapters"]


def attach_adapters(module: ModuleType) -> None:
    """Wrap the check that PEFT's tuners make before a merge (peft.tuners.tuners_utils); a second call changes nothing."""
    owner, layer = module.BaseTuner, module.BaseTunerLayer
    original = owner._check_merge_allowed
    if getattr(original, "_knows_packed_weights", False):
        return

    @functools.wraps(original)
    def check_merge_allowed(self: Any) -> None:
        original(self)
        for name, tuned in self.model.named_modules():
            if isinstance(tuned, layer):
                base = tuned.get_base_layer()
                for leaf, weight in base.named_parameters(recurse=False):
                    if leaf in _changed(tuned):
                        check_mergeable(f"{name}.{leaf}" if name else leaf, weight)

    check_merge_allowed._knows_packed_weights = True  # type: ignore[attr-defined]
    owner._check_merge_allowed = check_merge_allowed


def _changed(tuned: Any) -> tuple[str, ...]:
    """The parameters of a base layer that a tuner's layer adapts: the one it names, or the weight."""
    return (getattr(tuned, "parameter_name", None) or "weight",)
