"""The one thin layer over Transformers: wherever a public loader takes a path, an artifact stands for its overlay.

Every wrapper does the same: a `.ninfer` file, or a folder with one and no weights of its own, is replaced by
`hub_dir(path)`; for a Hub id the original is tried first, and only where it finds nothing is the repository searched
for an artifact. Results name the path the caller gave. `NINFER_TORCH_NO_PATCH=1` leaves Transformers as it is; the
folder `hub_dir(path)` works all the same.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ninfer_torch.errors import NinferError
from ninfer_transformers.locate import fetch_artifact, stands_for_artifact
from ninfer_transformers.overlay import overlay_of

__all__ = ["PATCHES", "Patch", "apply_patches", "patching_disabled"]

_PATH = "pretrained_model_name_or_path"
_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Patch:
    """A callable whose argument `parameter` is a path: a classmethod of `owner`, or a function of the module where
    `owner` is None.
    """

    owner: str | None
    name: str
    parameter: str = _PATH


def _classes(*owners: str) -> tuple[Patch, ...]:
    return tuple(Patch(owner, "from_pretrained") for owner in owners)


_FILE_LOOKUPS = (Patch(None, "cached_file", "path_or_repo_id"), Patch(None, "find_adapter_config_file", "model_id"))

PATCHES: Mapping[str, tuple[Patch, ...]] = {
    "transformers.configuration_utils": (Patch("PreTrainedConfig", "get_config_dict"),),
    "transformers.generation.configuration_utils": (
        Patch("GenerationConfig", "from_pretrained", "pretrained_model_name"),
    ),
    "transformers.modeling_utils": _classes("PreTrainedModel"),
    "transformers.models.auto.auto_factory": _FILE_LOOKUPS,
    "transformers.models.auto.image_processing_auto": _classes("AutoImageProcessor"),
    "transformers.models.auto.processing_auto": _classes("AutoProcessor"),
    "transformers.models.auto.tokenization_auto": _classes("AutoTokenizer"),
    "transformers.pipelines": _FILE_LOOKUPS,
    "transformers.tokenization_utils_base": _classes("PreTrainedTokenizerBase"),
}
"""What is wrapped, by Transformers module.

The `AutoModelFor*` classes and `pipeline` need no wrapper: they pass their path on, and beyond that only look for a
file at it, through functions that their modules import by name. Which of these there are depends on the version.
"""


def patching_disabled() -> bool:
    """Whether NINFER_TORCH_NO_PATCH asks to leave Transformers alone."""
    return os.environ.get("NINFER_TORCH_NO_PATCH", "0") not in ("", "0")


def apply_patches(module: ModuleType) -> None:
    """Wrap the callables of one imported Transformers module; a second call changes nothing."""
    for patch in PATCHES.get(module.__name__, ()):
        owner = module if patch.owner is None else getattr(module, patch.owner)
        if patch in _FILE_LOOKUPS and patch.name not in vars(owner):
            continue
        original = vars(owner)[patch.name]
        function = original.__func__ if isinstance(original, classmethod) else original
        if getattr(function, "_translates_artifacts", False):
            continue
        wrapper = (
            _translate_class_method(function, patch)
            if isinstance(original, classmethod)
            else _translate_function(function, patch)
        )
        setattr(owner, patch.name, wrapper)


def _translate_class_method(function: Callable[..., Any], patch: Patch) -> Any:
    @functools.wraps(function)
    def wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        return _call(functools.partial(function, cls), patch, args, kwargs)

    wrapper._translates_artifacts = True  # type: ignore[attr-defined]
    return classmethod(wrapper)


def _translate_function(function: Callable[..., Any], patch: Patch) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _call(function, patch, args, kwargs)

    wrapper._translates_artifacts = True  # type: ignore[attr-defined]
    return wrapper


def _call(original: Callable[..., Any], patch: Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    path = args[0] if args else kwargs.get(patch.parameter)
    if not isinstance(path, str | os.PathLike) or kwargs.get("gguf_file"):
        return original(*args, **kwargs)

    def call_with(overlay: Path) -> Any:
        replaced = {**kwargs, "subfolder": ""} if kwargs.get("subfolder") else dict(kwargs)
        positional = (str(overlay), *args[1:]) if args else ()
        if not args:
            replaced[patch.parameter] = str(overlay)
        return _renamed(original(*positional, **replaced), str(overlay), os.fspath(path))

    local = stands_for_artifact(Path(path) / (kwargs.get("subfolder") or ""))
    if local is not None:
        return call_with(overlay_of(local))
    try:
        result = original(*args, **kwargs)
    except NinferError:
        raise
    except (OSError, ValueError):
        overlay = _hub_overlay(path, kwargs)
        if overlay is None:
            raise
        return call_with(overlay)
    if patch.name == "get_config_dict" and not result[0]:
        overlay = _hub_overlay(path, kwargs)  # a repository without config.json is no error to Transformers
        return result if overlay is None else call_with(overlay)
    return result


def _hub_overlay(path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> Path | None:
    """The overlay of the artifact in a Hub repository; None where there is none to have."""
    if os.path.exists(path) or not _REPO_ID.fullmatch(os.fspath(path)):
        return None
    try:
        artifact = fetch_artifact(os.fspath(path), kwargs)
    except NinferError:
        raise
    except Exception:  # noqa: BLE001  (the client lets the errors of its HTTP library through)
        return None  # whatever keeps the Hub's client from an answer, the original call has said it already
    return None if artifact is None else overlay_of(artifact)


def _renamed(result: Any, overlay: str, path: str) -> Any:
    """The result with the caller's path in place of the overlay's, where it remembers one."""
    loaded = result[0] if isinstance(result, tuple) else result
    for holder in (loaded, getattr(loaded, "config", loaded)):
        if holder is not None and getattr(holder, "name_or_path", None) == overlay:
            holder.name_or_path = path
    return result
