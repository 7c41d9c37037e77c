"""Where a model's weights lie: device maps, accelerate's offloading, moves and limits, as with dense weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from transformers import AutoModelForCausalLM
from transformers.integrations.accelerate import infer_auto_device_map

import ninfer_torch
from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from tiny_families import FAMILIES, prompt, tiny_family

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


def saved(tmp_path: Path, family: str) -> Path:
    model = tiny_family(family)
    ninfer_torch.quantize_(model, "q4")
    return Path(ninfer_torch.save(model, tmp_path / "m.ninfer"))


def loaded(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(prompt()).logits
    assert isinstance(found, torch.Tensor)
    return found


def places(model: Any) -> dict[str, tuple[str, bool]]:
    """Device and whether it is quantized, of every parameter."""
    return {
        name: (p.device.type, isinstance(p, NinferTensor)) for name, p in model.named_parameters(remove_duplicate=False)
    }


def is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_accelerate_offloads_to_the_cpu_and_brings_words_back(family: str, tmp_path: Path) -> None:
    path = saved(tmp_path, family)
    expected, model = logits(loaded(path)), loaded(path)
    quantized = {name: packed for name, (_, packed) in places(model).items()}
    accelerate.cpu_offload(model, execution_device=CPU)
    assert places(model) == {name: ("meta", packed) for name, packed in quantized.items()}
    assert torch.equal(logits(model), expected)
    assert {device for device, _ in places(model).values()} == {"meta"}, "a weight stays after its layer has run"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dispatched_model_survives_deepcopy(family: str, tmp_path: Path) -> None:
    path = saved(tmp_path, family)
    model = accelerate.dispatch_model(loaded(path), {"": "cpu"}, main_device="cpu", force_hooks=True)
    twin = copy.deepcopy(model)
    assert places(twin) == places(model)
    assert torch.equal(logits(twin), logits(loaded(path)))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_on_the_meta_device(family: str, tmp_path: Path) -> None:
    """As with the same model in dense weights: accelerate takes meta for an accelerator and leaves shapes there."""
    path, dense = saved(tmp_path, family), tiny_family(family)
    dense.save_pretrained(tmp_path / "dense")
    device_map = {"model": "meta", "lm_head": "meta"}
    model, twin = (loaded(p, device_map=device_map) for p in (path, tmp_path / "dense"))
    assert {name: device for name, (device, _) in places(model).items()} == dict.fromkeys(
        dict(twin.named_parameters(remove_duplicate=False)), "meta"
    )
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in twin.named_parameters()}
    assert any(packed for _, packed in places(model).values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "device_map", ["auto", "sequential", "cpu", {"": "disk"}, {"model": "cpu", "lm_head": "disk"}], ids=str
)
def test_what_a_device_map_puts_on_disk_stays_in_the_file(family: str, device_map: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, family)
    model = loaded(path, device_map=device_map)
    assert {device for device, _ in places(model).values()} == {"cpu"}
    assert is_tied(model) == (family == "llama tied")
    assert torch.equal(logits(model), logits(loaded(path)))
    assert not list(tmp_path.rglob("*.dat")), "offloaded copies"


def test_offloading_to_a_disk_by_copies_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path, "llama"))
    with pytest.raises(UnsupportedOperation, match="instead of accelerate's offload to a disk, load the .ninfer file"):
        accelerate.disk_offload(model, str(tmp_path / "offload"), execution_device=CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_limits_count_packed_bytes(family: str, tmp_path: Path) -> None:
    """A limit of exactly the packed size holds the whole model, which dense weights would overflow; half of it does not.

    Transformers' own planning for a card, which need not be there. Some slack is left: it keeps room for the largest layer.
    """
    model = loaded(saved(tmp_path, family))
    total = int(model.get_memory_footprint())
    largest = max(module_bytes(module) for module in model.modules() if not list(module.children()))

    def planned(limit: int) -> set[Any]:
        options = {"max_memory": {0: limit, "cpu": 1 << 40}, "hf_quantizer": model.hf_quantizer}
        return set(infer_auto_device_map(model, **options).values())

    assert total + largest < tiny_family(family).get_memory_footprint()
    assert planned(total + largest) == {0}
    assert "cpu" in planned(total // 2)


def module_bytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for b in module.buffers())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_moves_keep_words_and_ties(
    family: str, overwrite: bool, swap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(saved(tmp_path, family))
    expected, before = logits(model), places(model)
    former = (
        torch.__future__.get_overwrite_module_params_on_conversion(),
        torch.__future__.get_swap_module_params_on_conversion(),
    )
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model = model.to("cpu", non_blocking=True).to(memory_format=torch.preserve_format).cpu()
        assert places(model) == before and is_tied(model) == (family == "llama tied")
        assert torch.equal(logits(model), expected)
        model.to("meta", non_blocking=True)
        assert places(model) == {name: ("meta", packed) for name, (_, packed) in before.items()}
        assert is_tied(model) == (family == "llama tied")
        assert all(
            plane.is_meta for p in model.parameters() if isinstance(p, NinferTensor) for plane in p.planes.values()
        )
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(former[0])
        torch.__future__.set_swap_module_params_on_conversion(former[1])


def test_accelerate_sets_a_weight_by_name(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path, "llama"))
    expected, weight = logits(model), model.lm_head.weight
    set_module_tensor_to_device(model, "lm_head.weight", "meta")
    assert isinstance(model.lm_head.weight, NinferTensor) and model.lm_head.weight.is_meta
    set_module_tensor_to_device(model, "lm_head.weight", "cpu", value=weight)
    assert isinstance(model.lm_head.weight, NinferTensor) and model.lm_head.weight.format == weight.format
    assert torch.equal(logits(model), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_moves_to_a_card_and_back(family: str, tmp_path: Path) -> None:
    path = saved(tmp_path, family)
    expected = logits(loaded(path))
    for model in (loaded(path, device_map="auto"), loaded(path, device_map={"": 0}), loaded(path).cuda()):
        assert {device for device, _ in places(model).values()} == {"cuda"}
        assert all(p.is_cuda for w in model.parameters() if isinstance(w, NinferTensor) for p in w.planes.values())
        assert is_tied(model) == (family == "llama tied")
        assert torch.equal(logits(model.cpu()), expected)


@pytest.mark.cuda
def test_pinned_weights(tmp_path: Path) -> None:
    weight = loaded(saved(tmp_path, "llama")).lm_head.weight.pin_memory()
    assert isinstance(weight, NinferTensor) and all(plane.is_pinned() for plane in weight.planes.values())
    assert weight.to("cuda", non_blocking=True).is_cuda
