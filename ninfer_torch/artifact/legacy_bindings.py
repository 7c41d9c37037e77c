"""What the objects of a published version 1 or 2 file mean: components, bindings and uses.

Old files name objects only, and the program that ran them knew the rest. Here the tables of `legacy_names` and the
configs of `legacy_models` take its place. Source: spec/container.md 13.3. No torch here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ninfer_torch.artifact import legacy_names as names
from ninfer_torch.artifact.legacy_models import PublishedModel
from ninfer_torch.artifact.records import (
    Binding,
    Component,
    Object,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)

__all__ = ["Meaning", "Mismatch", "derive_meaning", "resource_roles"]

_LAYER = re.compile(r"((?:text|vision|dflash2?)/layers/\d+|mtp/layer)/(.+)")
_DRAFTERS = ("mtp", "dflash", "dflash2")

Config = Mapping[str, Any]


class Mismatch(Exception):
    """The objects are not those of the model; the text says which is the first to differ."""


@dataclass(frozen=True)
class Meaning:
    """The records of a version 3 directory that older files leave out."""

    components: Mapping[str, Component]
    bindings: Mapping[str, Binding]
    uses: tuple[Use, ...]


def resource_roles(objects: Sequence[Object], component: str) -> Mapping[str, str]:
    """Role -> object id of the files under `frontend/` that belong to `component`, `text` or `vision`."""
    roles = {}
    for record in objects:
        if isinstance(record, ResourceObject) and record.id.startswith(names.RESOURCE_PREFIX):
            role = record.id.removeprefix(names.RESOURCE_PREFIX)
            if role and component == ("vision" if role in names.VISION_RESOURCES else "text"):
                roles[role] = record.id
    return MappingProxyType(roles)


def derive_meaning(model: PublishedModel, objects: Sequence[Object]) -> Meaning:
    """Components, bindings and uses of `objects`, which must be all of `model`'s for every component they belong to.

    Raises Mismatch for an object the model does not have, for another number of rows and for a missing parameter.
    """
    logical = {names.RENAMED.get(record.id, record.id).partition("/")[0] for record in objects}
    present = [component for component in model.configs if component in logical]
    if "text" not in present:
        raise Mismatch("it has no object of the text model")
    parameters = dict(_parameters(model.configs, present, "proposal" in logical))
    binder = _Binder(model.configs, parameters)
    for record in objects:
        if isinstance(record, TensorObject):
            binder.add(record)
    missing = [name for name in parameters if name not in binder.bindings]
    if missing:
        raise Mismatch(f"{len(missing)} of {len(parameters)} parameters have no object, the first is {missing[0]!r}")
    components = {
        name: Component(
            copy.deepcopy(model.configs[name]),
            None if name == "text" else "text",
            resource_roles(objects, name),
            Proposal("indexed", model.proposal_rows) if name == "text" and "proposal" in logical else None,
        )
        for name in present
    }
    bindings = {name: binder.bindings[name] for name in parameters}
    uses = tuple(binder.use(name, input) for name, inputs in parameters.items() for input in inputs)
    return Meaning(MappingProxyType(components), MappingProxyType(bindings), uses)


def _parameters(
    configs: Mapping[str, Config], present: Sequence[str], proposal: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every logical parameter of the components present, with the inputs of its uses."""
    drafters = [component for component in _DRAFTERS if component in present]

    def row(
        component: str, name: str, inputs: Sequence[str], prefix: str = "", expert: int = 0
    ) -> tuple[str, tuple[str, ...]]:
        spelled = [
            template.format(C=component, P=prefix, D=drafter, e=expert)
            for template in inputs
            for drafter in (drafters if "{D}" in template else ("",))
        ]
        return prefix + name.format(C=component, e=expert), tuple(spelled)

    for component in [*present, *(["proposal"] if proposal else [])]:
        for name, inputs in names.GLOBALS[component].items():
            yield row(component, name, inputs)
        for prefix, parts in _layers(component, configs):
            for name, inputs in (item for part in parts for item in names.LAYER_PARTS[part].items()):
                for expert in range(configs["text"]["num_experts"] if names.EXPERT in name else 1):
                    yield row(component, name, inputs, prefix, expert)


def _layers(component: str, configs: Mapping[str, Config]) -> list[tuple[str, tuple[str, ...]]]:
    """Prefix and parts of every layer of a component."""
    feed_forward = "moe" if "num_experts" in configs["text"] else "mlp"
    if component == "proposal":
        return []
    if component == "mtp":
        return [("mtp/layers/0/", ("norms", "full_attention", feed_forward))]
    if component == "text":
        kinds = enumerate(configs["text"]["layer_types"])
        return [(f"text/layers/{index}/", ("norms", kind, feed_forward)) for index, kind in kinds]
    count = configs[component]["depth" if component == "vision" else "num_hidden_layers"]
    return [(f"{component}/layers/{index}/", (component,)) for index in range(count)]


def _extents(component: str, configs: Mapping[str, Config]) -> dict[str, int]:
    """The symbols of spec/parameters.md 1 that a component's blocks use, in rows."""
    config = configs["text" if component == "mtp" else component]
    if component == "vision":
        return {"H": config["hidden_size"]}
    width = config["head_dim"]
    extents = {
        "Q": config["num_attention_heads"] * width,
        "KV": config["num_key_value_heads"] * width,
        "I": config.get("intermediate_size", 0),
    }
    if component in ("text", "mtp"):
        extents |= {
            "1": 1,
            "H": config["hidden_size"],
            "KG": config["linear_num_key_heads"] * config["linear_key_head_dim"],
            "VG": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "nv": config["linear_num_value_heads"],
            "E": config.get("num_experts", 0),
            "IE": config.get("moe_intermediate_size", 0),
            "IS": config.get("shared_expert_intermediate_size", 0),
        }
    return extents


class _Binder:
    """Finds the parameters in one object after another."""

    def __init__(self, configs: Mapping[str, Config], parameters: Mapping[str, Sequence[str]]) -> None:
        self.bindings: dict[str, Binding] = {}
        self._formats: dict[str, str] = {}
        self._divisors: dict[str, Binding] = {}
        self._parameters = parameters
        self._configs = configs

    def add(self, record: TensorObject) -> None:
        match = _LAYER.fullmatch(record.id)
        if match is None:
            self._bind(names.RENAMED.get(record.id, record.id), record, Binding(record.id))
            return
        component = record.id.partition("/")[0]
        prefix = "mtp/layers/0/" if component == "mtp" else f"{match[1]}/"
        suffix = match[2]
        if component not in self._configs:
            raise Mismatch(f"object {record.id!r} belongs to component {component!r}, which the model does not have")
        if suffix.endswith(names.DIVISOR_SUFFIX):
            self._add_divisor(record, prefix, suffix.removesuffix(names.DIVISOR_SUFFIX))
        elif suffix in names.BLOCKS[component]:
            self._add_blocks(record, prefix, component, names.BLOCKS[component][suffix])
        else:
            self._bind(prefix + suffix, record, Binding(record.id))

    def _bind(self, name: str, record: TensorObject, binding: Binding) -> None:
        if name not in self._parameters:
            raise Mismatch(f"object {record.id!r} means parameter {name!r}, which the model does not have")
        if name in self.bindings:
            raise Mismatch(f"objects {self.bindings[name].objects[0]!r} and {record.id!r} both hold parameter {name!r}")
        self.bindings[name] = binding
        self._formats[name] = record.format

    def _add_blocks(self, record: TensorObject, prefix: str, component: str, blocks: Sequence[tuple[str, str]]) -> None:
        extents = _extents(component, self._configs)
        repeats = extents["E"] if names.EXPERT in blocks[0][0] else 1
        expected = repeats * sum(extents[rows] for _, rows in blocks)
        found = record.shape[0] if record.shape else 1
        if found != expected:
            parts = " + ".join(f"{name} {extents[rows]}" for name, rows in blocks)
            times = f"{repeats} times " if repeats > 1 else ""
            raise Mismatch(f"object {record.id!r} has {found} rows, expected {expected} ({times}{parts})")
        columns, begin = record.elements // found, 0
        for expert in range(repeats):
            for template, rows in blocks:
                end = begin + extents[rows] * columns
                whole = end - begin == record.elements
                binding = Binding(record.id) if whole else Binding(None, (Part(record.id, begin, end),))
                self._bind(prefix + template.format(e=expert), record, binding)
                if component.startswith("dflash") and template in names.DRAFT_ALIASES:
                    self._bind(prefix + names.DRAFT_ALIASES[template], record, binding)
                begin = end

    def _add_divisor(self, record: TensorObject, prefix: str, site: str) -> None:
        if site not in names.DIVISOR_SITES or record.format != "fp32" or record.elements != 1:
            raise Mismatch(
                f"object {record.id!r} is {record.format} {list(record.shape)}, expected one fp32 element and one of the "
                f"sites {', '.join(names.DIVISOR_SITES)}"
            )
        for suffix in names.DIVISOR_SITES[site]:
            if prefix + suffix not in self._parameters:
                raise Mismatch(
                    f"object {record.id!r} is for parameter {prefix + suffix!r}, which the model does not have"
                )
            self._divisors[prefix + suffix] = Binding(record.id)

    def use(self, name: str, input: str) -> Use:
        """The use of a bound parameter with one input.

        An nvfp4 parameter without a divisor cannot take 4-bit activations, whatever the format's policy.
        """
        policy = names.POLICIES.get(self._formats[name], "A16Only")
        divisor = self._divisors.get(name)
        if divisor is not None:
            return Use(name, input, policy, MappingProxyType({"activation_input_divisor": divisor}))
        return Use(name, input, "A16Only" if policy == "AllowA4" else policy)
