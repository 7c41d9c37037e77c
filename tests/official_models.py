"""Tiny artifacts in NInfer's own names, and what their weights are: written with numpy, struct and json alone.

Nothing here, nor in the modules it imports, imports the library: `official_names` has names, shapes and inputs,
`official_words` packs objects, `official_state` fuses plain values into a state dict.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from official_names import Parameters, Shape, parameters
from official_words import LAYOUTS, draw, encoded_size, round_up

# Containers: spec/container.md 3 to 8.


@dataclass
class Directory:
    """The members of a directory under construction, and the payload beside them (none where it stays sparse)."""

    components: dict[str, Any]
    objects: list[dict[str, Any]] = field(default_factory=list)
    bindings: dict[str, Any] = field(default_factory=dict)
    uses: list[dict[str, Any]] = field(default_factory=list)
    payload: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, format: str, shape: Shape, data: bytes | None = None, divisors: int = 1) -> str:
        offset, size = round_up(self.size, 256), encoded_size(format, shape, divisors)
        record = {"id": name, "kind": "tensor", "shape": list(shape), "format": format, "layout": LAYOUTS[format]}
        record |= {"offset": offset, "bytes": size} | ({"divisors": divisors} if divisors > 1 else {})
        self._place(record, offset, size, data)
        return name

    def add_resource(self, name: str, data: bytes) -> str:
        record = {"id": name, "kind": "resource", "encoding": "raw_bytes_v1", "offset": self.size, "bytes": len(data)}
        self._place(record, self.size, len(data), data)
        return name

    def _place(self, record: dict[str, Any], offset: int, size: int, data: bytes | None) -> None:
        if data is not None:
            if len(data) != size:
                raise ValueError(f"{record['id']}: {len(data)} bytes, expected {size}")
            self.payload[offset] = data
        self.objects.append(record)
        self.size = offset + size

    def write(self, path: Path) -> Path:
        members = {
            "components": self.components,
            "objects": self.objects,
            "bindings": self.bindings,
            "uses": self.uses,
            "metadata": {},
            "provenance": {},
            "files": [{"path": None, "payload_bytes": self.size}],
        }
        text = json.dumps(members, separators=(",", ":")).encode()
        start = round_up(32 + len(text), 4096)
        with path.open("wb") as file:
            file.write(struct.pack("<8sQ16s", b"NINFER\0\3", len(text), bytes(range(16))) + text)
            for offset, data in self.payload.items():
                file.seek(start + offset)
                file.write(data)
            file.truncate(start + self.size)
        return path


Group = tuple[str, ...]


@dataclass
class Recipe:
    """How the parameters of a tiny model are stored.

    `formats` maps a suffix of names to a format, first match wins; what has no input is bf16 (a_log and dt_bias fp32).
    `groups` lists suffixes that share an object, under one layer prefix; `banks` lists, for the experts of a layer,
    the order of their suffixes in one object. `signs` and `columns` name the suffixes whose uses have the auxiliary.
    """

    formats: Sequence[tuple[str, str]]
    groups: Sequence[Group] = ()
    banks: Sequence[Group] = ()
    signs: Sequence[str] = ()
    columns: Sequence[str] = ()
    policy: str = "A16Only"
    four_bit: bool = False

    def format_of(self, name: str, inputs: tuple[str, ...]) -> str:
        name = re.sub(r"experts/\d+/", "experts/", name)
        if not inputs and name != "text/token_embedding":
            return "fp32" if name.endswith(("a_log", "dt_bias")) else "bf16"
        return next((format for suffix, format in self.formats if name.endswith(suffix)), "bf16")


@dataclass
class Written:
    """A written artifact: stored and plain values by logical name."""

    path: Path
    configs: Mapping[str, Mapping[str, Any]]
    stored: dict[str, np.ndarray]
    plain: dict[str, np.ndarray]


def write_model(
    path: Path, configs: Mapping[str, Mapping[str, Any]], recipe: Recipe, *, tied: bool = False, seed: int = 0
) -> Written:
    """Write a model of random weights. `tied` binds the head to the embedding's object."""
    directory, stored, plain = draft_model(configs, recipe, tied=tied, seed=seed)
    return Written(directory.write(path), configs, stored, plain)


def draft_model(
    configs: Mapping[str, Mapping[str, Any]], recipe: Recipe, *, tied: bool = False, seed: int = 0
) -> tuple[Directory, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The directory of a model of random weights, and its stored and plain values."""
    rng = np.random.default_rng(seed)
    directory, known = new_directory(configs), parameters(configs)
    stored: dict[str, np.ndarray] = {}
    for members in objects(known, recipe):
        if tied and members == ("text/output_head",):
            continue
        shapes, inputs = [known[name][0] for name in members], known[members[0]][1]
        format = recipe.format_of(members[0], inputs)
        shape = shapes[0] if len(members) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        divisors = len(members) if format == "nvfp4" and "experts" in members[0] else 1
        data, values = draw(format, shape, rng, divisors)
        object_id = directory.add(f"weight/{len(directory.objects):06d}", format, shape, data, divisors)
        begin = 0
        for name, member in zip(members, shapes, strict=True):
            end = begin + math.prod(member)
            whole = {"object": object_id}
            part = {"parts": [{"object": object_id, "range": [begin, end]}]}
            directory.bindings[name] = whole if len(members) == 1 else part
            stored[name], begin = values.reshape(-1)[begin:end].reshape(member), end
    if tied:
        directory.bindings["text/output_head"] = directory.bindings["text/token_embedding"]
        stored["text/output_head"] = stored["text/token_embedding"]
    return directory, stored, _add_uses(directory, known, recipe, stored, rng)


def new_directory(configs: Mapping[str, Mapping[str, Any]]) -> Directory:
    """A directory with the components of `configs`; all but text serve text."""
    return Directory(
        {name: {"config": config} | ({} if name == "text" else {"target": "text"}) for name, config in configs.items()}
    )


def objects(known: Parameters, recipe: Recipe) -> list[Group]:
    """Every parameter once: the members of each object, in row order."""
    remaining, objects = dict.fromkeys(known), []
    prefixes = dict.fromkeys(
        name.rpartition(marker)[0]
        for name in known
        for marker in ("attention/", "gdn/", "mlp/", "moe/")
        if marker in name
    )
    for prefix in prefixes:
        for group in recipe.groups:
            members = tuple(prefix + suffix for suffix in group)
            if all(name in remaining for name in members):
                objects.append(members)
        for bank in recipe.banks:
            experts = sum(name.startswith(f"{prefix}moe/experts/") for name in known) // 3
            members = tuple(f"{prefix}moe/experts/{e}/{suffix}" for e in range(experts) for suffix in bank)
            if members and all(name in remaining for name in members):
                objects.append(members)
        for members in objects:
            for name in members:
                remaining.pop(name, None)
    return [*objects, *((name,) for name in remaining)]


def _add_uses(
    directory: Directory, known: Parameters, recipe: Recipe, stored: Mapping[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    vectors: dict[tuple[str, int], tuple[str, np.ndarray]] = {}

    def vector(role: str, width: int) -> tuple[str, np.ndarray]:
        if (role, width) not in vectors:
            if role == "hadamard_signs":
                values = rng.choice([-1.0, 1.0], width)
                words, format = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), "bf16"
            else:
                values, format = rng.permutation(width), "int32"
                words = values.astype(np.int32)
            name = directory.add(f"auxiliary/{len(vectors):06d}", format, (width,), words.tobytes())
            vectors[role, width] = name, values
        return vectors[role, width]

    plain = dict(stored)
    for name, (shape, inputs) in known.items():
        for input in inputs:
            auxiliaries: dict[str, Any] = {}
            for role, suffixes in (("hadamard_signs", recipe.signs), ("input_columns", recipe.columns)):
                if name.endswith(tuple(suffixes)):
                    object_id, values = vector(role, shape[-1])
                    auxiliaries[role] = {"object": object_id}
                    plain[name] = unfold(role, stored[name], values)
            if recipe.four_bit and recipe.format_of(name, inputs) == "nvfp4":
                object_id = f"divisor/{name}"
                directory.add(object_id, "fp32", (), struct.pack("<f", 2.0))
                auxiliaries["activation_input_divisor"] = {"object": object_id}
            policy = "AllowA4" if "activation_input_divisor" in auxiliaries else recipe.policy
            use = {"parameter": name, "input": input, "activation_policy": policy}
            directory.uses.append(use | ({"auxiliaries": auxiliaries} if auxiliaries else {}))
    embedding = known["text/token_embedding"]
    if recipe.format_of("text/token_embedding", ()) == "t2_g128_fp16":
        signs = vectors["hadamard_signs", embedding[0][-1]][1]
        plain["text/token_embedding"] = unfold("hadamard_signs", stored["text/token_embedding"], signs)
    return plain


def unfold(role: str, stored: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """The plain rows of a folded matrix (spec/container.md 7), by the matrix of the transform."""
    if role == "input_columns":
        plain = np.empty_like(stored)
        plain[:, vector] = stored
        return plain
    index = np.arange(32)  # popcount(i & j) adds over the high and the low five bits of i and j
    parity = np.array([(word.bit_count() % 2) for word in range(32)])
    matrix = 1.0 - 2.0 * parity[index[:, None] & index[None, :]]
    blocks = stored.astype(np.float64).reshape(stored.shape[0], -1, 32, 32)
    return ((matrix @ blocks @ matrix / 32).reshape(stored.shape) * vector).astype(np.float32)


# The models of the tests.

_TEXT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 9.999999974752427e-07,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 192,
}
_EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 64,
}
_VISION = {
    "model_type": "qwen3_5_vision",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}
DENSE = {"text": _TEXT}
WIDE = {
    "text": {
        **_TEXT,
        "hidden_size": 1024,
        "vocab_size": 32,
        "intermediate_size": 1024,
        "linear_num_value_heads": 32,
        "num_attention_heads": 32,
    }
}  # every width a multiple of 1024
MOE = {"text": {k: v for k, v in {**_TEXT, **_EXPERTS}.items() if k != "intermediate_size"}}
SEEING = {"text": {**_TEXT, "tie_word_embeddings": True}, "vision": _VISION, "mtp": {"architectures": ["Qwen3_5MTP"]}}
SEEING_MOE = {
    **MOE,
    "vision": {**_VISION, "model_type": "qwen3_5_moe_vision"},
    "mtp": {"architectures": ["Qwen3_5MoeMTP"]},
}

PAIRS = (
    ("attention/query", "attention/key"),
    ("attention/gate", "attention/value"),
    ("gdn/query", "gdn/key"),
    ("gdn/value", "gdn/z"),
    ("gdn/a_projection", "gdn/b_projection"),
    ("mlp/gate", "mlp/up"),
    ("moe/router", "moe/shared_score"),
    ("moe/shared/gate", "moe/shared/up"),
)
_BIASES = (("attention/query_bias", "attention/key_bias", "attention/value_bias"),)
ONE_BANK = (("gate", "up"), ("down",))
_TWO_BANKS = (("gate",), ("up",), ("down",))
TEXT_FORMATS = (
    ("attention/gate", "q5_g64_fp16"),
    ("attention/value", "q5_g64_fp16"),
    ("gdn/value", "q5_g64_fp16"),
    ("gdn/z", "q5_g64_fp16"),
    ("a_projection", "bf16"),
    ("b_projection", "bf16"),
    ("router", "bf16"),
    ("shared_score", "bf16"),
    ("down", "q5_g64_fp16"),
    ("output_head", "q6_g64_fp16"),
    ("token_embedding", "q8_g32_fp16"),
)
_ROTATED = ("query", "key", "value", "z", "gate", "up", "down", "attention/output", "gdn/output", "output_head")

RECIPES: Mapping[str, tuple[Mapping[str, Any], Recipe]] = {
    "bf16": (DENSE, Recipe((), PAIRS)),
    "groupwise": (DENSE, Recipe((*TEXT_FORMATS, ("", "q4_g64_fp16")), PAIRS)),
    "one parent": (
        DENSE,
        Recipe(
            (*TEXT_FORMATS[4:6], ("", "fp8_e4m3fn_row_bf16")),
            (
                ("attention/query", "attention/key", "attention/gate", "attention/value"),
                ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
            ),
            policy="AllowA8",
        ),
    ),
    "rotated": (
        WIDE,
        Recipe((*TEXT_FORMATS[4:6], ("", "t2_g128_fp16")), PAIRS[:4], signs=_ROTATED),
    ),
    "columns": (
        DENSE,
        Recipe(
            (("gdn/query", "gguf_q4_0"), ("gdn/key", "gguf_q4_0"), ("gdn/output", "gguf_q4_0"), ("", "gguf_q8_0")),
            PAIRS[2:3],
            columns=("gdn/output",),
            policy="AllowA8",
        ),
    ),
    "moe": (MOE, Recipe((*TEXT_FORMATS, ("", "q4_g64_fp16")), PAIRS, ONE_BANK)),
    "moe two banks": (
        MOE,
        Recipe(
            ((("/up", "gguf_q4_0")), *TEXT_FORMATS[4:8], ("", "gguf_q8_0")), PAIRS[:5], _TWO_BANKS, policy="AllowA8"
        ),
    ),
    "moe nvfp4": (
        MOE,
        Recipe(
            (
                ("experts/gate", "nvfp4"),
                ("experts/up", "nvfp4"),
                ("experts/down", "nvfp4"),
                ("gdn/output", "nvfp4"),
                *TEXT_FORMATS[4:8],
                ("", "fp8_e4m3fn_row_bf16"),
            ),
            PAIRS,
            ONE_BANK,
            policy="AllowA8",
            four_bit=True,
        ),
    ),
    "vision and mtp": (
        SEEING,
        Recipe((*TEXT_FORMATS, ("", "q4_g64_fp16")), (*PAIRS, *_BIASES)),
    ),
    "moe vision and mtp": (
        SEEING_MOE,
        Recipe((*TEXT_FORMATS, ("", "q4_g64_fp16")), (*PAIRS, *_BIASES), ONE_BANK),
    ),
}
"""The models a test may write, by name: configs and recipe."""
