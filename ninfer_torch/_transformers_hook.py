"""The import hook: tells the Transformers integration when a module of Transformers or PEFT has been imported.

Transformers imports its submodules lazily, so the top name says nothing; each submodule of interest is watched by
itself. A module imported before `arm` is reported at once. Nothing here imports Transformers or the integration before
that.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["WATCHED", "arm"]

WATCHED = frozenset(
    {
        "peft.tuners.tuners_utils",
        "transformers.configuration_utils",
        "transformers.generation.configuration_utils",
        "transformers.modeling_layers",
        "transformers.modeling_utils",
        "transformers.models.auto.auto_factory",
        "transformers.models.auto.image_processing_auto",
        "transformers.models.auto.processing_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.pipelines",
        "transformers.quantizers.auto",
        "transformers.tokenization_utils_base",
    }
)
"""The modules the integration wants to hear of, by full name."""

_INTEGRATION = "ninfer_transformers.attach"


def arm() -> None:
    """Report the watched modules that are imported already, and every other one right after its import. A second call
    changes nothing.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        _report_imported()


_unreported = set(WATCHED)


def _report(module: ModuleType) -> None:
    _unreported.discard(module.__name__)
    importlib.import_module(_INTEGRATION).attach(module)


def _report_imported() -> None:
    """Report what is imported but was not seen on its way in; a module that is still running waits for the next
    occasion.
    """
    for name in sorted(_unreported):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _report(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds watched modules as the finders after it do, and has them reported once they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in WATCHED:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader)
        return spec


class _ReportingLoader(importlib.abc.Loader):
    """A module's own loader, followed by the report; everything else is asked of the loader behind it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _report(module)
        _report_imported()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
