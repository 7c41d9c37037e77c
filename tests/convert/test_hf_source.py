"""A safetensors folder as a source: every tensor once, read by rows, and clear words where the folder is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from ninfer_torch.convert.hf_source import HuggingFaceSource
from ninfer_torch.convert.source import Source
from ninfer_torch.errors import ConversionError

TENSORS = {
    "a.weight": torch.arange(24, dtype=torch.float32).view(6, 4).to(torch.bfloat16),
    "a.bias": torch.tensor([1.0, -0.0, 3.0], dtype=torch.float16),
    "conv": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "wide": torch.tensor([[1e300]], dtype=torch.float64),
    "scalar": torch.tensor(7.5),
    "index": torch.tensor([3, 1], dtype=torch.int64),
    "flags": torch.tensor([True, False]),
}
ENCODINGS = {
    "a.weight": "bf16",
    "a.bias": "fp16",
    "conv": "fp32",
    "wide": "fp64",
    "scalar": "fp32",
    "index": "int64",
    "flags": "bool",
}


def write_single(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def write_sharded(
    folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None
) -> None:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = weight_map or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def two_shards() -> dict[str, dict[str, torch.Tensor]]:
    names = list(TENSORS)
    return {
        "model-00001-of-00002.safetensors": {name: TENSORS[name] for name in names[:3]},
        "model-00002-of-00002.safetensors": {name: TENSORS[name] for name in names[3:]},
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_read_by_rows(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        write_sharded(tmp_path, two_shards())
    else:
        write_single(tmp_path, TENSORS)
    source = HuggingFaceSource(tmp_path)
    assert isinstance(source, Source)
    assert {name: tensor.encoding for name, tensor in source.tensors.items()} == ENCODINGS
    assert source.unused == ()
    for name, expected in TENSORS.items():
        tensor = source.tensors[name]
        assert tensor.shape == tuple(expected.shape)
        whole = tensor.values(0, tensor.rows)
        assert whole.dtype == expected.dtype and torch.equal(whole, expected)
        if expected.dim():
            assert torch.equal(tensor.values(1, tensor.rows), expected[1:])
            assert tensor.values(0, 0).shape == expected[:0].shape
    with pytest.raises(ConversionError, match=r"rows \[2, 7\) lie outside its 6 rows"):
        source.tensors["a.weight"].values(2, 7)
    with pytest.raises(ConversionError, match="stored as bf16"):
        source.tensors["a.weight"].blocks(0, 1)


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path, two_shards())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ConversionError, match="model-00002-of-00002.safetensors: missing shard; .* places 4 tensors there"
    ):
        HuggingFaceSource(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = two_shards()
    shards["model-00002-of-00002.safetensors"]["conv"] = TENSORS["conv"]
    write_sharded(tmp_path, shards)
    with pytest.raises(
        ConversionError, match="model-00002.*tensor 'conv' lies in model-00001-of-00002.safetensors too"
    ):
        HuggingFaceSource(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    shards = two_shards()
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    write_sharded(tmp_path, shards, {**weight_map, "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(ConversionError, match="model-00001-of-00002.safetensors: lacks tensor 'ghost'"):
        HuggingFaceSource(tmp_path)
    write_sharded(tmp_path, shards, {name: shard for name, shard in weight_map.items() if name != "conv"})
    source = HuggingFaceSource(tmp_path)
    assert "conv" not in source.tensors
    assert [(tensor.name, "index" in tensor.reason) for tensor in source.unused] == [("conv", True)]


def test_index_that_is_none(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": 3}', "{}"):
        index.write_text(text)
        with pytest.raises(ConversionError, match="weight_map"):
            HuggingFaceSource(tmp_path)
    for path in ("../other.safetensors", "sub/other.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": path}}))
        with pytest.raises(ConversionError, match="not a bare file name"):
            HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantized_words_are_no_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    write_single(tmp_path, {"fine": torch.ones(2), "packed": torch.zeros(2, 2).to(dtype)})
    with pytest.raises(ConversionError, match="model.safetensors: tensor 'packed' holds (U8|I8|F8_E4M3) words"):
        HuggingFaceSource(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="found no weight files"):
        HuggingFaceSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConversionError, match="found pytorch_model.bin"):
        HuggingFaceSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConversionError, match="model.safetensors: not a readable safetensors file"):
        HuggingFaceSource(tmp_path)
    with pytest.raises(ConversionError, match="not a folder"):
        HuggingFaceSource(tmp_path / "model.safetensors")


def test_config_and_resources(tmp_path: Path) -> None:
    write_single(tmp_path, TENSORS)
    with pytest.raises(ConversionError, match="no config.json"):
        HuggingFaceSource(tmp_path).config()
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ConversionError, match="Transformers cannot read this config"):
        HuggingFaceSource(tmp_path).config()
    config = LlamaConfig(hidden_size=64, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    assert HuggingFaceSource(tmp_path).config().hidden_size == 64
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}\r\n", "generation_config.json": b'{"a": 1}'}
    for name, data in {**files, "README.md": b"no", "added_tokens.json": b""}.items():
        (tmp_path / name).write_bytes(data)
    assert HuggingFaceSource(tmp_path).resources() == files


def test_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    write_single(tmp_path, TENSORS)
    members = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(members))
    with pytest.raises(ConversionError, match=r"quantized \(gptq\)"):
        HuggingFaceSource(tmp_path).config()


def test_provenance_names_files_and_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "secret-parent" / "my-model"
    folder.mkdir(parents=True)
    write_sharded(folder, two_shards())
    provenance = HuggingFaceSource(folder).provenance()
    assert "secret-parent" not in json.dumps(provenance)
    assert provenance["name"] == "my-model"
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert {file["name"]: file["bytes"] for file in provenance["files"]} == sizes


# Headers


def raw_file(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return folder


def entry(begin: int, end: int, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE: dict[str, tuple[object, bytes, str]] = {
    "no JSON": (b"{", b"", "header cannot be read"),
    "a list": ([], b"", "header cannot be read"),
    "an entry that is none": ({"a": 3}, b"", "header cannot be read"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "header cannot be read"),
    "a negative extent": ({"a": entry(0, 8, (-2,))}, bytes(8), "header cannot be read"),
    "a fractional extent": ({"a": entry(0, 8, (2.0,))}, bytes(8), "header cannot be read"),
    "an extent that is a truth": ({"a": entry(0, 4, (True,))}, bytes(4), "header cannot be read"),
    "a name twice": (
        b'{"a":' + json.dumps(entry(0, 8)).encode() + b',"a":' + json.dumps(entry(0, 8)).encode() + b"}",
        bytes(8),
        "occurs twice",
    ),
    "too few bytes": (
        {"a": entry(0, 4)},
        bytes(4),
        r"tensor 'a', F32 \[2\], lies at bytes 0 to 4 .* expected 8 bytes from 0",
    ),
    "extents of 2^62": ({"a": entry(0, 8, (2**62, 4))}, bytes(8), r"expected \d+ bytes from 0"),
    "a hole": ({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), r"'b', F32 \[2\], lies at bytes 12 to 20 .* from 8"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), r"'b'.* lies at bytes 4 to 12 .* from 8"),
    "bytes of nobody": ({"a": entry(0, 8)}, bytes(9), "end at byte .*; is the download complete"),
    "a cut file": ({"a": entry(0, 8)}, bytes(7), "end at byte .*; is the download complete"),
}


@pytest.mark.parametrize(("header", "data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_headers_that_do_not_describe_their_file_are_refused(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    with pytest.raises(ConversionError, match=rf"model\.safetensors: not a readable safetensors file: .*{message}"):
        HuggingFaceSource(raw_file(tmp_path, header, data))


@pytest.mark.parametrize("length", [2**63, 200_000_000, 64])
def test_a_header_beyond_its_file_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConversionError, match=f"a header of {length} bytes in a file of 10"):
        HuggingFaceSource(raw_file(tmp_path, b"{}", length=length))


def test_a_file_larger_than_memory_opens(tmp_path: Path) -> None:
    """Sparse, a thousand gigabytes: the header is read, and rows are, but nothing is mapped."""
    rows, columns = 500_000, 1 << 20
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 2 * rows * columns, (rows, columns), "BF16")}
    raw_file(tmp_path, header)
    try:
        with open(tmp_path / "model.safetensors", "r+b") as stream:
            stream.truncate(8 + len(json.dumps(header)) + 2 * rows * columns)
    except OSError as error:
        pytest.skip(f"no sparse file of this size here: {error}")
    tensor = HuggingFaceSource(tmp_path).tensors["a"]
    assert tensor.shape == (rows, columns)
    assert torch.equal(tensor.values(rows - 1, rows), torch.zeros(1, columns, dtype=torch.bfloat16))
