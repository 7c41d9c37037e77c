"""Logical parameter names and their Transformers counterparts: a table per architecture, one contract for all."""

from ninfer_torch.models.architectures import ARCHITECTURES, GENERIC, architecture_of
from ninfer_torch.models.assembly import build_parameter, plan_parameter
from ninfer_torch.models.base import Architecture, LogicalParameter, ModelParameter, join_values, split_value
from ninfer_torch.models.generic import ModelPlan, PlannedTensor, logical_name, plan_model, state_dict_name, use_input

__all__ = [
    "ARCHITECTURES",
    "GENERIC",
    "Architecture",
    "LogicalParameter",
    "ModelParameter",
    "ModelPlan",
    "PlannedTensor",
    "architecture_of",
    "build_parameter",
    "join_values",
    "logical_name",
    "plan_model",
    "plan_parameter",
    "split_value",
    "state_dict_name",
    "use_input",
]
