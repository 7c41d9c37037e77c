"""The order of NInfer's logical parameters, and which of them lie in one parent. Source: spec/conversion.md 8, spec/parameters.md 10."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["binding_order", "packing_groups"]

_COMPONENTS = ("text", "mtp", "vision")

_ORDER = (
    *("token_embedding", "output_head", "final_norm"),
    *("input_projection", "embedding_norm", "hidden_norm"),
    *("patch_embedding", "patch_embedding_bias", "position_embedding"),
    "input_norm",
    *("gdn/a_log", "gdn/dt_bias", "gdn/convolution", "gdn/a_projection", "gdn/b_projection"),
    *("gdn/query", "gdn/key", "gdn/value", "gdn/z", "gdn/norm", "gdn/output"),
    *("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias"),
    *("attention/query", "attention/query_bias", "attention/gate", "attention/key", "attention/key_bias"),
    *("attention/value", "attention/value_bias", "attention/query_norm", "attention/key_norm"),
    *("attention/output", "attention/output_bias"),
    "post_attention_norm",
    *("mlp/gate", "mlp/up", "mlp/down", "mlp/fc1", "mlp/fc1_bias", "mlp/fc2", "mlp/fc2_bias"),
    *("moe/router", "moe/shared_score", "moe/experts", "moe/shared/gate", "moe/shared/up", "moe/shared/down"),
    *("merger/norm_weight", "merger/norm_bias", "merger/fc1", "merger/fc1_bias", "merger/fc2", "merger/fc2_bias"),
)
"""Names below their component or layer, in the order of their bindings."""

_RANKS = {name: rank for rank, name in enumerate(_ORDER)}
_MTP_FINAL_NORM = len(_ORDER)
_AFTER_LAYERS = "merger/"
_MATRICES = ("gate", "up", "down")

_TOGETHER = (
    ("attention/query", "attention/key", "attention/gate", "attention/value"),
    ("attention/query", "attention/key"),
    ("attention/gate", "attention/value"),
    ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
    ("gdn/query", "gdn/key"),
    ("gdn/value", "gdn/z"),
    ("gdn/a_projection", "gdn/b_projection"),
    ("mlp/gate", "mlp/up"),
    ("moe/router", "moe/shared_score"),
)
_BANKS = (("gate", "up"), ("down",))
_SHARED = ("moe/shared/gate", "moe/shared/up")
_VISION = (
    ("attention/query", "attention/key", "attention/value"),
    ("attention/query_bias", "attention/key_bias", "attention/value_bias"),
)


def binding_order(names: Iterable[str]) -> list[str]:
    """The logical names of text, mtp and vision in the order in which their bindings, uses and objects stand."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, int, int, int, int]:
    component, _, rest = name.partition("/")
    layer, below = _layer(rest)
    if layer < 0 and below.startswith(_AFTER_LAYERS):
        layer = 1 << 30
    expert, matrix = 0, 0
    if below.startswith("moe/experts/"):
        number, last = below.removeprefix("moe/experts/").split("/")
        below, expert, matrix = "moe/experts", int(number), _MATRICES.index(last)
    rank = _MTP_FINAL_NORM if name == "mtp/final_norm" else _RANKS[below]
    return _COMPONENTS.index(component), layer, rank, expert, matrix


def _layer(rest: str) -> tuple[int, str]:
    """(number of the layer or -1, name below it)."""
    if not rest.startswith("layers/"):
        return -1, rest
    number, _, below = rest.removeprefix("layers/").partition("/")
    return int(number), below


def packing_groups(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The groups of these parameters that usually share a parent, rows in this order, layer by layer.

    A parameter may stand in several groups: the first whose members agree in format and method is taken.
    """
    ordered = binding_order(names)
    known = set(ordered)
    layers: dict[tuple[str, int], int] = {}
    for name in ordered:
        component, _, rest = name.partition("/")
        layer, below = _layer(rest)
        if layer >= 0:
            experts = int(below.split("/")[2]) + 1 if below.startswith("moe/experts/") else 0
            layers[component, layer] = max(layers.get((component, layer), 0), experts)
    for (component, layer), experts in layers.items():
        prefix = f"{component}/layers/{layer}/"
        for group in _layer_groups(component, experts):
            members = tuple(prefix + name for name in group)
            if len(members) > 1 and known.issuperset(members):
                yield members


def _layer_groups(component: str, experts: int) -> Iterator[tuple[str, ...]]:
    if component == "vision":
        yield from _VISION
        return
    yield from _TOGETHER
    for bank in _BANKS if experts else ():
        yield tuple(f"moe/experts/{expert}/{matrix}" for expert in range(experts) for matrix in bank)
    yield _SHARED
