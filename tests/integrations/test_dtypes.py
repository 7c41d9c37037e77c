"""Casts of whole models: the compute dtype follows, packed words and what must stay float32 do not move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ninfer_torch
from ninfer_torch.tensors import NinferTensor
from tiny_families import FAMILIES, prompt, tiny_family

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def words(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {key: plane.clone() for key, plane in parameter.planes.items()}
        for name, parameter in model.named_parameters()
        if isinstance(parameter, NinferTensor)
    }


def check_words(model: Any, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    found = words(model)
    assert found.keys() == expected.keys() and expected
    for name, planes in expected.items():
        assert found[name].keys() == planes.keys()
        for key, plane in planes.items():
            assert found[name][key].dtype == plane.dtype and torch.equal(found[name][key], plane), (name, key)


def packed_model(family: str) -> Any:
    model = tiny_family(family)
    ninfer_torch.quantize_(model, "q4")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_module_casts_leave_every_word(family: str) -> None:
    model = packed_model(family)
    before = words(model)
    for cast, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32)):
        getattr(torch.nn.Module, cast)(model)
        check_words(model, before)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        with torch.no_grad():
            assert model(prompt()).logits.dtype == dtype


@pytest.mark.parametrize("cast", ["half", "float"])
def test_casts_that_transformers_refuses_for_quantized_models_change_nothing(cast: str) -> None:
    model = packed_model("llama")
    before = words(model)
    with pytest.raises(ValueError, match="not supported for quantized model"):
        getattr(model, cast)()
    check_words(model, before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loaded_dtype_is_that_of_the_computation(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = packed_model(family)
    ninfer_torch.save(source, tmp_path / "m.ninfer")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=dtype, attn_implementation="eager")
    check_words(model, words(source))
    assert all(p.dtype == dtype for p in model.parameters() if isinstance(p, NinferTensor))
    with torch.no_grad():
        assert model(prompt()).logits.dtype == dtype


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3.5 moe"])
def test_what_a_class_keeps_in_float32_is_kept(
    family: str, dtype: torch.dtype, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same parameters as of a dense checkpoint, packed ones among them: their words stay, their compute dtype follows."""
    source = packed_model(family)
    member = "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules"
    monkeypatch.setattr(type(source), member, ["down_proj", "norm"])
    ninfer_torch.save(source, tmp_path / "m.ninfer")
    tiny_family(family).save_pretrained(tmp_path / "dense")
    model, dense = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("m.ninfer", "dense")
    )
    check_words(model, words(source))
    kept = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kept == {name: parameter.dtype for name, parameter in dense.named_parameters()}
    wide = {name for name, found in kept.items() if found == torch.float32}
    assert any("down_proj" in name for name in wide) == (strict or dtype != torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_multiplies_in_its_dtype(family: str) -> None:
    model = packed_model(family)
    before = words(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(prompt()).logits
    with torch.no_grad():
        expected = model(prompt()).logits
    check_words(model, before)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_footprint_is_packed_and_the_count_logical(family: str) -> None:
    dense, model = tiny_family(family), packed_model(family)
    assert model.num_parameters() == dense.num_parameters()
    unique = {id(parameter): parameter for parameter in model.parameters()}.values()
    expected = sum(
        sum(plane.nbytes for plane in p.planes.values()) if isinstance(p, NinferTensor) else 4 * p.numel()
        for p in unique
    )
    assert model.get_memory_footprint(return_buffers=False) == expected < dense.get_memory_footprint(False) / 2
