"""What happens when a module of Transformers has been imported: registration of the quantizer, translation of paths."""

from __future__ import annotations

import sys
from types import ModuleType

from ninfer_torch.versions import warn_if_untested
from ninfer_transformers.adapters import attach_adapters
from ninfer_transformers.folders import attach_saving
from ninfer_transformers.mtp import attach_mtp
from ninfer_transformers.patch import apply_patches, patching_disabled

__all__ = ["LAYERS", "REGISTRY", "TUNERS", "attach"]

REGISTRY = "transformers.quantizers.auto"
LAYERS = "transformers.modeling_layers"
MODELS = "transformers.modeling_utils"
TUNERS = "peft.tuners.tuners_utils"


def attach(module: ModuleType) -> None:
    """Attach this package to one module of Transformers or PEFT, which is fully imported. Called by ninfer_torch's
    import hook.
    """
    if module.__name__.startswith("transformers."):
        warn_if_untested("transformers", sys.modules["transformers"].__version__)
    if module.__name__ == REGISTRY:
        _register_quantizer(module)
    elif patching_disabled():
        return
    elif module.__name__ == LAYERS:
        attach_mtp(module)
    elif module.__name__ == TUNERS:
        attach_adapters(module)
    else:
        apply_patches(module)
        if module.__name__ == MODELS:
            attach_saving(module)


def _register_quantizer(registry: ModuleType) -> None:
    from ninfer_transformers import quantizer

    if hasattr(quantizer, "register"):  # else its own imports brought the registry in; it registers at its end
        quantizer.register(registry)
