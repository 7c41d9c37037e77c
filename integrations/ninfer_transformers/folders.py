"""`save_pretrained` of a quantized model: a folder with config, stub and artifact, as the Hub keeps one.

Only where Transformers is patched; otherwise, and for `save_format="safetensors"`, its own `save_pretrained` writes the
planes (`ninfer_transformers.planes`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ninfer_torch.artifact.reader import open_artifact
from ninfer_torch.errors import UnsupportedOperation
from ninfer_transformers.overlay import clothe

__all__ = ["ARTIFACT_NAME", "attach_saving", "save_folder"]

ARTIFACT_NAME = "model.ninfer"


_OTHER_WAY = 'save_format="safetensors"'


def save_folder(model: Any, folder: Path, *, max_file_bytes: int | None = None) -> None:
    """Write a quantized Transformers model as a folder that `from_pretrained` takes; an earlier save there is replaced.

    The new files are complete before the first old one goes: weights may be mapped from the file that is replaced.
    `max_file_bytes` bounds the artifact's files. Raises what `ninfer_torch.save` raises.
    """
    from ninfer_transformers.saving import save

    folder.mkdir(parents=True, exist_ok=True)
    notes = model.hf_quantizer.quantization_config.to_dict()
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
        try:
            written = save(model, Path(scratch, ARTIFACT_NAME), max_file_bytes=max_file_bytes)
        except UnsupportedOperation as error:
            raise UnsupportedOperation(f"{error}. {_OTHER_WAY} writes planes instead, for any composition") from error
        with open_artifact(written) as artifact:
            clothe(Path(scratch), artifact, ARTIFACT_NAME, notes)
        names = sorted(path.name for path in Path(scratch).iterdir())
        parts = re.compile(rf"{re.escape(ARTIFACT_NAME)}(\.part-\d+.*)?")
        for old in [path for path in folder.iterdir() if parts.fullmatch(path.name) and path.name not in names]:
            old.unlink()
        for name in names:
            os.replace(Path(scratch, name), folder / name)


def attach_saving(module: ModuleType) -> None:
    """Wrap `PreTrainedModel.save_pretrained` in transformers.modeling_utils; a second call changes nothing."""
    owner = module.PreTrainedModel
    original = owner.save_pretrained
    if getattr(original, "_writes_artifacts", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _config_of(self)
        if config is not None and "save_format" in kwargs:
            with _saved_as(config, kwargs.pop("save_format")):
                return save_pretrained(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        if not _writes_artifact(self, given.arguments):
            return original(self, *args, **kwargs)
        return _save(self, {**given.arguments, **given.arguments.pop("kwargs", {})})

    save_pretrained._writes_artifacts = True  # type: ignore[attr-defined]
    owner.save_pretrained = save_pretrained


def _config_of(model: Any) -> Any:
    """The NinferConfig of a model whose weights are ours, else None."""
    from ninfer_transformers.quantizer import NinferQuantizer

    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer.quantization_config if isinstance(quantizer, NinferQuantizer) else None


@contextlib.contextmanager
def _saved_as(config: Any, save_format: str) -> Iterator[None]:
    """The config says for one save what the caller said."""
    from ninfer_transformers.config import checked_save_format

    before = config.save_format
    config.save_format = checked_save_format(save_format)
    try:
        yield
    finally:
        config.save_format = before


def _writes_artifact(model: Any, arguments: Mapping[str, Any]) -> bool:
    config, adapters = _config_of(model), getattr(model, "_hf_peft_config_loaded", False)
    if config is None or adapters or arguments.get("distributed_checkpoint"):
        return False
    return bool(config.save_format == "artifact")


def _save(model: Any, arguments: Mapping[str, Any]) -> None:
    from transformers.utils.hub import convert_file_size_to_int, create_and_tag_model_card

    folder = Path(arguments["save_directory"])
    _check_state_dict(model, arguments.get("state_dict"))
    if arguments.get("variant"):
        raise UnsupportedOperation(
            f"an artifact has no variant {arguments['variant']!r}: save to a folder of its own, or set {_OTHER_WAY}"
        )
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; save_pretrained writes a folder, ninfer_torch.save one file")
    if not arguments.get("is_main_process", True):
        return
    limit = convert_file_size_to_int(arguments.get("max_shard_size", "50GB"))
    token = arguments.get("token")
    if not arguments.get("push_to_hub"):
        save_folder(model, folder, max_file_bytes=limit)
        return
    repo_id = _created_repository(arguments.get("repo_id") or folder.name, token, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    before = model._get_files_timestamps(folder)
    save_folder(model, folder, max_file_bytes=limit)
    create_and_tag_model_card(repo_id, model.model_tags, token=token).save(folder / "README.md")
    model._upload_modified_files(
        folder,
        repo_id,
        before,
        commit_message=arguments.get("commit_message"),
        token=token,
        create_pr=arguments.get("create_pr", False),
    )


def _created_repository(repo_id: str, token: Any, arguments: Mapping[str, Any]) -> str:
    import huggingface_hub

    options = {name: arguments[name] for name in ("private", "repo_type", "resource_group_id") if name in arguments}
    return str(huggingface_hub.HfApi(token=token).create_repo(repo_id, exist_ok=True, **options).repo_id)


def _check_state_dict(model: Any, given: Mapping[str, torch.Tensor] | None) -> None:
    """A state dict that is handed in must be the model's own, as a Trainer's is: an artifact is written from the model."""
    if given is None:
        return
    own = model.state_dict()
    foreign = given.keys() ^ own.keys() or {name for name, t in own.items() if given[name].data_ptr() != t.data_ptr()}
    if foreign:
        raise UnsupportedOperation(
            f"save_pretrained(state_dict=...) of a quantized model writes the model's own tensors; other ones are given for "
            f"{', '.join(sorted(foreign)[:4])}. Load them with model.load_state_dict first"
        )
