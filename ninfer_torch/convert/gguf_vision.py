"""The vision tower of a Qwen3.5 model in a GGUF file of its own, which llama.cpp calls `mmproj`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ninfer_torch.convert.gguf_file import GgufFile
from ninfer_torch.convert.gguf_keys import check_keys
from ninfer_torch.convert.gguf_parameters import listed, read_parameters, refuse_undecodable
from ninfer_torch.convert.gguf_qwen35 import VISION
from ninfer_torch.convert.gguf_qwen35_config import media_tokens, vision_members
from ninfer_torch.convert.gguf_rules import Architecture
from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError

__all__ = ["VisionFile"]

_CLASSES: Mapping[str, str] = {
    "qwen35": "Qwen3_5ForConditionalGeneration",
    "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
}
"""The class around text model and vision tower, by the text file's architecture."""

_PROJECTOR = "qwen3vl_merger"


class VisionFile:
    """A vision tower for the text model of architecture `text`; `tensors` are named `model.visual.*`.

    Raises ConversionError for a text model without one, for a file of another kind, and as `GgufSource` for what it does
    not know.
    """

    def __init__(self, path: str | os.PathLike[str], text: Architecture) -> None:
        self.file = GgufFile(path)
        found = self.file.metadata.get("general.architecture")
        if text.name not in _CLASSES or found != VISION.name:
            raise ConversionError(
                f"{self.file.name}: a file of architecture {found!r} beside a {text.name} model, expected a "
                f"{VISION.name!r} file beside one of {', '.join(_CLASSES)}"
            )
        self._class = _CLASSES[text.name]
        check_keys(self.file, VISION)
        self._check_kind()
        depth = self.file.metadata[f"{VISION.name}.vision.block_count"]
        if not isinstance(depth, int) or not 0 < depth <= len(self.file.tensors):
            raise ConversionError(
                f"{self.file.name}: vision.block_count is {depth!r} with {len(self.file.tensors)} tensors"
            )
        left = set(self.file.tensors)
        what = f"a vision tower of {depth} blocks"
        self.tensors: Mapping[str, SourceTensor] = read_parameters(self.file, VISION, {"": range(depth)}, left, what)
        if left:
            raise ConversionError(f"{self.file.name}: tensors that {what} does not have: {listed(sorted(left))}")
        refuse_undecodable(self.file, set())

    def _check_kind(self) -> None:
        projector = self.file.metadata[f"{VISION.name}.projector_type"]
        deep = f"{VISION.name}.vision.is_deepstack_layers"
        if projector != _PROJECTOR or (deep in self.file.metadata and any(self.file.numbers(deep))):
            raise ConversionError(
                f"{self.file.name}: a vision tower with projector {projector!r} or deepstack layers, expected "
                f"{_PROJECTOR!r} without them"
            )

    def check_width(self, columns: int) -> None:
        """Raise ConversionError unless the tower's output is as wide as the text model, `columns`."""
        width = self.file.metadata[f"{VISION.name}.vision.projection_dim"]
        if width != columns:
            raise ConversionError(
                f"{self.file.name}: the vision tower gives {width} channels, the text model has {columns}; the two files "
                "belong to different models"
            )

    def around(self, text: Any, vocabulary: GgufFile) -> Any:
        """The config of the class around both: the text model's config and that of the tower.

        The ids of image and video tokens are those of `vocabulary`, the text model's file.
        """
        import transformers

        whole = getattr(transformers, self._class).config_class
        members = vision_members(self.file, VISION.name)
        text_members = {name: value for name, value in text.to_dict().items() if name not in ("architectures", "dtype")}
        config = whole(
            text_config=text_members,
            vision_config=members,
            tie_word_embeddings=text.tie_word_embeddings,
            **media_tokens(vocabulary),
        )
        config.architectures = [self._class]
        config.dtype = text.dtype
        return config

    def provenance(self) -> dict[str, Any]:
        """File name, bytes and architecture."""
        return {"path": self.file.name, "bytes": self.file.size, "architecture": VISION.name}
