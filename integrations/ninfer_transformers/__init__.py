"""Hugging Face Transformers over `.ninfer` artifacts.

`import ninfer_torch` arms a hook that calls `attach` for Transformers' modules as they are imported; nothing here
imports Transformers before that. What official extension points reach is done through them: a quantizer (`quantizer`),
a stub checkpoint (`stub`), a folder of small files around the artifact (`overlay`) and planes in safetensors (`planes`). The
rest is one thin translation of paths (`patch`), `save_pretrained` of folders with an artifact (`folders`), and the check that
PEFT makes before it merges (`adapters`).
"""

import ninfer_torch._transformers_hook  # noqa: F401  armed first: it may import submodules here at once, and none may be half imported then
from ninfer_transformers.overlay import hub_dir
from ninfer_transformers.saving import save

__all__ = ["hub_dir", "save"]
