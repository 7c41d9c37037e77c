"""The tables of Qwen3.5: names, shapes and configs, against Transformers' classes, golden files and a second listing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_layers import MtpModel

import official_models
import official_names
from golden import golden, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.artifact.legacy_models import PUBLISHED
from ninfer_torch.errors import ArtifactError, ConversionError, LayoutError
from ninfer_torch.models.architectures import ARCHITECTURES, architecture_of
from ninfer_torch.models.base import ModelParameter, join_values, split_value
from ninfer_torch.models.qwen3_5 import Qwen3_5

CONFIGS = {
    "dense": official_models.DENSE,
    "moe": official_models.MOE,
    "vision and mtp": official_models.SEEING,
    "moe, vision and mtp": official_models.SEEING_MOE,
}
GOLDEN = ("qwen3_5_dense", "qwen3_5_moe", "qwen3_5_vision_mtp")


def architecture(configs: Any) -> Qwen3_5:
    found = ARCHITECTURES[configs["text"]["architectures"][0]]
    assert isinstance(found, Qwen3_5)
    return found


def built_on_meta(config: dict[str, Any]) -> Any:
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        return model_class(model_class.config_class(**config))


def config_of(configs: Any, tmp_path: Path) -> dict[str, Any]:
    """The checkpoint config of an artifact with no tensors and no tokenizer."""
    path = official_models.new_directory(configs)
    path.add_resource("r", b"{}")
    return architecture(configs).checkpoint_config(open_artifact(path.write(tmp_path / "c.ninfer")))


@pytest.mark.parametrize("configs", CONFIGS.values(), ids=CONFIGS)
def test_the_tables_name_every_parameter_of_the_transformers_classes(configs: Any, tmp_path: Path) -> None:
    model = built_on_meta(config_of(configs, tmp_path))
    prefixes = {"text": "model.language_model." if "vision" in configs else "model.", "vision": "model.visual.", "": ""}
    table = architecture(configs).parameters_of(configs)
    named = {prefixes[p.anchor] + p.name: p.shape for p in table if p.anchor in prefixes}
    assert named == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if "mtp" in configs:
        with torch.device("meta"):
            mtp = MtpModel(model, 1)
        own = {n: tuple(t.shape) for n, t in mtp.state_dict().items() if n.startswith("layers.")}
        assert {p.name: p.shape for p in table if p.anchor == "mtp"} == own


@pytest.mark.parametrize("configs", CONFIGS.values(), ids=CONFIGS)
def test_the_tables_name_every_logical_parameter_once(configs: Any) -> None:
    sources = [s for p in architecture(configs).parameters_of(configs, configs) for s in p.sources]
    assert len({source.name for source in sources}) == len(sources)
    expected = official_names.parameters(configs)
    assert {source.name: (source.shape, source.inputs) for source in sources} == expected


@pytest.mark.parametrize("model_id, own, drafts", [("qwen3.6-27b", 1420, 91), ("qwen3.6-35b-a3b", 32630, 81)])
def test_parameter_counts_of_the_published_models(model_id: str, own: int, drafts: int) -> None:
    """With the two of the proposal head: 1422, 1513 with dflash2, 32713 with dflash (spec/parameters.md)."""
    configs = PUBLISHED[model_id, "groupwise-int"].configs
    table = architecture(configs).parameters_of(configs, configs)
    names = {source.name for parameter in table for source in parameter.sources}
    listed = official_names.parameters(configs, proposal_rows=8)
    assert names == {name for name in listed if name.split("/")[0] in ("text", "vision", "mtp")}
    assert len(names) == own and len(listed) == own + drafts + 2


@pytest.mark.parametrize("configs", CONFIGS.values(), ids=CONFIGS)
def test_component_configs_come_back_from_the_checkpoint_config(configs: Any, tmp_path: Path) -> None:
    config = config_of(configs, tmp_path)
    assert architecture(configs).component_configs(config) == configs
    model_class = getattr(transformers, config["architectures"][0])
    round_trip = json.loads(model_class.config_class(**config).to_json_string(use_diff=False))
    assert architecture(configs).component_configs(round_trip) == configs


@pytest.mark.parametrize("model", GOLDEN)
def test_configs_of_golden_checkpoints_become_those_of_their_artifacts(model: str) -> None:
    checkpoint = json.loads(golden("ninfer", "models", model, "checkpoint", "config.json").read_text())
    artifact = open_artifact(golden("ninfer", "models", model, "groupwise.ninfer"))
    stored = {name: dict(component.config) for name, component in artifact.components.items()}
    found = architecture(stored).component_configs(checkpoint)
    assert json.dumps(found) == json.dumps(stored, default=list)  # the order of members, too


def test_golden_checkpoint_splits_into_the_bindings_of_its_artifact() -> None:
    checkpoint = load_tensors(golden("ninfer", "models", "qwen3_5_dense", "checkpoint", "model.safetensors"))
    artifact = open_artifact(golden("ninfer", "models", "qwen3_5_dense", "bf16.ninfer"))
    found = architecture_of(artifact)
    prefixes = found.checkpoint_prefixes(artifact)
    count = 0
    for parameter in found.parameters(artifact):
        values = split_value(parameter, checkpoint[prefixes[parameter.anchor] + parameter.name])
        for source, value in zip(parameter.sources, values, strict=True):
            stored = artifact.parameter(source.name, shape=source.shape)
            assert torch.equal(value.to(stored.dtype), stored), source.name
            assert stored.dtype == (torch.float32 if source.format == "fp32" else torch.bfloat16)
            count += 1
    assert count == len(artifact.bindings)


@given(
    st.sampled_from(list(CONFIGS.values())),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)
def test_join_is_the_inverse_of_split(configs: Any, choice: int, seed: int) -> None:
    table = architecture(configs).parameters_of(configs)
    parameter = table[choice % len(table)]
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    parts = split_value(parameter, value)
    assert [tuple(part.shape) for part in parts] == [source.shape for source in parameter.sources]
    assert torch.equal(join_values(parameter, parts), value)
    assert torch.equal(join_values(parameter, [part.reshape(-1) for part in parts]), value)


def test_the_query_takes_the_first_rows_of_every_head() -> None:
    (q_proj,) = [p for p in architecture(CONFIGS["dense"]).parameters_of(CONFIGS["dense"]) if "q_proj" in p.name]
    query, gate = split_value(q_proj, torch.arange(256.0).unsqueeze(1).expand(256, 128))
    assert query[:, 0].tolist() == [64 * head + row for head in range(4) for row in range(32)]
    assert gate[:, 0].tolist() == [64 * head + 32 + row for head in range(4) for row in range(32)]


def test_values_of_another_size_are_refused() -> None:
    parameter = ModelParameter("", "x", (4, 2), ())
    with pytest.raises(LayoutError, match=r"'x' has shape \[2, 4\], expected \[4, 2\]"):
        split_value(parameter, torch.zeros(2, 4))
    with pytest.raises(LayoutError, match="made of 6 elements"):
        join_values(parameter, [torch.zeros(6)])


def edited(component: str, **members: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one component's config; None removes a member."""

    def edit(configs: dict[str, Any]) -> None:
        for name, value in members.items():
            if value is None:
                del configs[component][name]
            else:
                configs[component][name] = value

    return edit


ROPE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
BROKEN = {
    "missing": (edited("text", head_dim=None), "config lacks head_dim"),
    "unknown": (edited("text", hidden_sise=3), "unknown members hidden_sise"),
    "of the other family": (edited("text", num_experts=3), "unknown members num_experts"),
    "ill-typed": (edited("text", hidden_size=128.0), "'hidden_size' is 128.0, expected a positive integer"),
    "no flag": (edited("text", tie_word_embeddings=1), "'tie_word_embeddings' is 1, expected true or false"),
    "layer kinds": (edited("text", layer_types=["linear_attention", "mamba"]), "'layer_types'"),
    "layer count": (edited("text", num_hidden_layers=3), "num_hidden_layers = 3 entries in layer_types, found 2"),
    "grouped heads": (edited("text", num_key_value_heads=3), r"num_attention_heads \(4\) % num_key_value_heads \(3\)"),
    "value heads": (edited("text", linear_num_key_heads=3), r"linear_num_value_heads \(4\) % linear_num_key_heads"),
    "rope members": (edited("text", rope_parameters={**ROPE, "rope_type": "yarn"}), "'rope_parameters'"),
    "rope sum": (edited("text", rope_parameters={**ROPE, "mrope_section": [2, 1, 2]}), "mrope_section of sum 4"),
    "rope order": (edited("text", rope_parameters={**ROPE, "mrope_section": [0, 2, 2]}), "interleavable mrope_section"),
    "architecture": (edited("mtp", architectures=["OtherMTP"]), r"'architectures' is \['OtherMTP'\]"),
    "vision type": (edited("vision", model_type="x"), "component 'vision': config member 'model_type' is 'x'"),
    "vision heads": (edited("vision", num_heads=5), r"hidden_size \(64\) % num_heads \(5\)"),
    "vision positions": (edited("vision", num_position_embeddings=15), "a square num_position_embeddings, found 15"),
}


@pytest.mark.parametrize("edit, message", BROKEN.values(), ids=BROKEN)
def test_configs_outside_the_architecture_are_refused(edit: Any, message: str, tmp_path: Path) -> None:
    configs = copy.deepcopy(official_models.SEEING)
    edit(configs)
    with pytest.raises(ArtifactError, match=message):
        config_of(configs, tmp_path)


@pytest.mark.parametrize(
    "member, value", [("hidden_act", "gelu"), ("attention_bias", True), ("num_mtp_layers", 2), ("head_dim", None)]
)
def test_checkpoints_outside_the_architecture_are_refused(member: str, value: Any, tmp_path: Path) -> None:
    config = config_of(official_models.DENSE, tmp_path) | {member: value}
    with pytest.raises(ConversionError, match=member.replace("num_mtp_layers", "mtp layers")):
        architecture(official_models.DENSE).component_configs(config)


def test_media_token_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    directory = official_models.new_directory(official_models.SEEING)
    tokens = {"added_tokens": [{"id": 7, "content": "<|image_pad|>"}, {"id": 9, "content": "<|vision_start|>"}]}
    listed = {"added_tokens_decoder": {"11": {"content": "<|video_pad|>"}}}
    for role, value in (("tokenizer.json", tokens), ("tokenizer_config.json", listed)):
        directory.add_resource(role, json.dumps(value).encode())
        directory.components["text"].setdefault("resources", {})[role] = role
    artifact = open_artifact(directory.write(tmp_path / "c.ninfer"))
    config = architecture(official_models.SEEING).checkpoint_config(artifact)
    ids = [config.get(f"{name}_token_id") for name in ("image", "vision_start", "video", "vision_end")]
    assert ids == [7, 9, 11, None]
