"""Any Transformers model under the names of its state dict: the architecture of generic artifacts (`models.generic`)."""

from __future__ import annotations

from typing import Any

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.models.base import Architecture, LogicalParameter, ModelParameter, Placement
from ninfer_torch.models.generic import COMPONENT, logical_name, state_dict_name

__all__ = ["StateDictModel"]

_PREFIX = logical_name("")


class StateDictModel(Architecture):
    """One row per binding, `text/<state-dict name>`; the config is Transformers' own, shapes and layers are the model's."""

    name = "any Transformers class"

    def checkpoint_config(self, artifact: Artifact) -> dict[str, Any]:
        """The stored config, which is that of the checkpoint."""
        return dict(artifact.components[COMPONENT].config)

    def parameters(self, artifact: Artifact) -> tuple[ModelParameter, ...]:
        """One parameter per binding, in binding order; the input of one that is multiplied is that of its only use."""
        inputs: dict[str, list[str]] = {}
        for use in artifact.uses:
            inputs.setdefault(use.parameter, []).append(use.input)
        return tuple(
            ModelParameter(
                "",
                state_dict_name(name),
                None,
                (LogicalParameter(name, inputs=tuple(inputs.get(name, ())), packable=None, format="any"),),
            )
            for name in artifact.bindings
            if name.startswith(_PREFIX)
        )

    def checkpoint_names(self, artifact: Artifact) -> list[str]:
        """The names of the bindings, less their component."""
        return [parameter.name for parameter in self.parameters(artifact)]

    def place(self, model: Any, artifact: Artifact) -> Placement:
        """Each parameter under its own name. A base model takes what lies under its prefix and leaves the rest."""
        stored = {parameter.name: parameter for parameter in self.parameters(artifact)}
        names, prefix = list(model.state_dict()), f"{model.base_model_prefix}."
        is_base = not any(name in stored for name in names) and any(prefix + name in stored for name in names)
        sources = {name: prefix + name if is_base else name for name in names}
        taken = set(sources.values())
        unplaced = [name for name in stored if name not in taken and not (is_base and not name.startswith(prefix))]
        return Placement(
            {name: stored[source] for name, source in sources.items() if source in stored}, tuple(unplaced)
        )
