"""A model as NInfer's own artifacts know it: logical parameters, packing groups, components. Source: spec/parameters.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ninfer_torch.convert.logical_parts import LogicalSource, logical_tensors
from ninfer_torch.convert.matching import MatchedSource
from ninfer_torch.convert.recipes import Parameter, RecipeModel
from ninfer_torch.convert.source import Source
from ninfer_torch.models.base import LogicalParameter
from ninfer_torch.models.generic import Kind
from ninfer_torch.models.packing import binding_order, packing_groups

__all__ = ["VISION_RESOURCES", "direct_formats", "official_model", "official_source"]

VISION_RESOURCES = ("preprocessor_config.json", "video_preprocessor_config.json")
"""Resources of the vision component; all others are the text's (spec/container.md 8)."""

_DIRECT = ("/gdn/a_projection", "/gdn/b_projection", "/moe/router", "/moe/shared_score")
"""Projections that no official recipe quantizes (spec/conversion.md 8.1)."""

_KINDS: Mapping[str, Kind] = MappingProxyType({"text/token_embedding": "embedding", "text/output_head": "head"})


def official_source(source: Source) -> tuple[LogicalSource, MatchedSource]:
    """The logical parameters of a source, and the source under their names. Raises ConversionError as `logical_tensors`."""
    found = logical_tensors(source)
    return found, MatchedSource(source, found.tensors, found.unused)


def official_model(found: LogicalSource) -> RecipeModel:
    """The model as recipes see it: every logical parameter, in the order of its binding, with its packing groups."""
    described = _described(found)
    parameters = {}
    for name in binding_order(described):
        logical = described[name]
        shape = logical.shape or found.tensors[name].shape
        parameters[name] = Parameter(name, shape, _kind(logical), logical.inputs)
    return RecipeModel(
        found.architecture.name,
        MappingProxyType(found.configs["text"]),
        MappingProxyType(parameters),
        tuple(packing_groups(parameters)),
    )


def direct_formats(found: LogicalSource) -> dict[str, str]:
    """The direct format of every logical parameter (spec/conversion.md 2)."""
    return {name: logical.format for name, logical in _described(found).items()}


def _described(found: LogicalSource) -> dict[str, LogicalParameter]:
    parameters = found.architecture.parameters_of(found.configs, found.configs)
    return {source.name: source for parameter in parameters for source in parameter.sources}


def _kind(logical: LogicalParameter) -> Kind:
    if logical.name in _KINDS:
        return _KINDS[logical.name]
    return "linear" if logical.inputs and not logical.name.endswith(_DIRECT) else "direct"
