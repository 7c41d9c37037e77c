"""A model as it will be written: under the names of a state dict, or under NInfer's own. Recipes, sources and configs of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ninfer_torch.convert.matching import MatchedSource, match_source
from ninfer_torch.convert.official import VISION_RESOURCES, direct_formats, official_model, official_source
from ninfer_torch.convert.presets import direct_format
from ninfer_torch.convert.recipes import CHECKPOINT, Parameter, RecipeModel
from ninfer_torch.convert.source import Source
from ninfer_torch.models.generic import COMPONENT, ModelPlan, logical_name, plan_model, use_input

__all__ = ["ModelView", "PlannedComponent", "generic_view", "official_view", "planned_components", "recipe_model"]

_VISION = "vision"


@dataclass(frozen=True)
class PlannedComponent:
    """One component to write: its config, the component it serves, its resources (role -> object id)."""

    config: Mapping[str, Any]
    target: str | None
    resources: Mapping[str, str]


@dataclass(frozen=True)
class ModelView:
    """A model as it will be written: what recipes see, the sources under its names, configs by component."""

    model: RecipeModel
    matched: Mapping[str, MatchedSource]
    formats: Mapping[str, str]
    configs: Mapping[str, Mapping[str, Any]]


def recipe_model(plan: ModelPlan) -> RecipeModel:
    """A model as recipes see it: every state-dict name is a parameter."""
    parameters = {}
    for planned in plan.tensors:
        names = [logical_name(name) for name in planned.names]
        for name in planned.names:
            own = logical_name(name)
            inputs = (use_input(name),) if name in planned.multiplied else ()
            twins = tuple(twin for twin in names if twin != own)
            parameters[own] = Parameter(own, planned.shape, planned.kind, inputs, twins, planned.reason)
    return RecipeModel(plan.architecture, MappingProxyType(plan.config), MappingProxyType(parameters))


def generic_view(source: Source, others: Mapping[str, Source]) -> ModelView:
    """A model of any architecture under its state-dict names. Raises ConversionError as `match_source` does."""
    plan = plan_model(source.config())
    matched = {CHECKPOINT: match_source(plan, source)}
    matched |= {key: match_source(plan, other, complete=False) for key, other in others.items()}
    model = recipe_model(plan)
    formats = {name: direct_format(matched[CHECKPOINT].tensors[name].encoding) for name in model.parameters}
    return ModelView(model, matched, formats, {COMPONENT: plan.config})


def official_view(source: Source, others: Mapping[str, Source]) -> ModelView:
    """A model of a registered architecture under NInfer's names. Raises ConversionError as `logical_tensors` does."""
    found, main = official_source(source)
    matched = {CHECKPOINT: main, **{key: official_source(other)[1] for key, other in others.items()}}
    return ModelView(official_model(found), matched, direct_formats(found), found.configs)


def planned_components(view: ModelView, resources: Mapping[str, bytes]) -> dict[str, PlannedComponent]:
    """The components of a view with the resources of each. Every component serves the text; processors of images and videos are the vision tower's, where there is one."""
    homes = {role: _VISION if role in VISION_RESOURCES and _VISION in view.configs else COMPONENT for role in resources}
    return {
        component: PlannedComponent(
            config,
            None if component == COMPONENT else COMPONENT,
            {role: f"resource/{component}/{role}" for role, home in homes.items() if home == component},
        )
        for component, config in view.configs.items()
    }
