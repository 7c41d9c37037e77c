"""Logical parameter names and their Transformers counterparts."""

from ninfer_torch.models.generic import ModelPlan, PlannedTensor, logical_name, plan_model, state_dict_name, use_input

__all__ = ["ModelPlan", "PlannedTensor", "logical_name", "plan_model", "state_dict_name", "use_input"]
