"""Hugging Face Transformers over `.ninfer` artifacts.

`import ninfer_torch` arms a hook that calls `attach` for Transformers' modules as they are imported; nothing here
imports Transformers before that. What official extension points reach is done through them: a quantizer (`quantizer`),
a stub checkpoint (`stub`) and a folder of small files around the artifact (`overlay`). The rest is one thin translation
of paths (`patch`).
"""

from ninfer_transformers.overlay import hub_dir
from ninfer_transformers.saving import save

__all__ = ["hub_dir", "save"]
