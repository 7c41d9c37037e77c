"""Config, tokenizer and generation config of a GGUF file, through Transformers' own GGUF reading.

Transformers' readers open the file themselves, refuse types they do not know (42 among them) and trust its header.
They are therefore shown a small copy of the header that this package has checked: the metadata they need, and every
tensor's name over one shared dummy word. What they leave out and a model depends on (class, rotary scaling, vocabulary
rows, attention scale) is filled in here.
"""

from __future__ import annotations

import json
import math
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ninfer_torch.convert.gguf_file import DEFAULT_ALIGNMENT, GgufArray, GgufFile
from ninfer_torch.convert.gguf_qwen35_config import BUILT_HERE, qwen35_config
from ninfer_torch.convert.gguf_rules import Architecture
from ninfer_torch.errors import ConversionError
from ninfer_torch.layouts import align_up

__all__ = ["llama3_factors", "read_config", "read_resources", "write_header_copy"]

Factors = Mapping[str, torch.Tensor]
"""Per-frequency rotary factors, by the name of their tensor."""

_COPY_NAME = "model.gguf"
_UINT32 = 4
_TOKENS = "tokenizer.ggml.tokens"


def write_header_copy(file: GgufFile, path: Path, keys: list[str], extra: Mapping[str, int]) -> None:
    """Writes a GGUF file of metadata and tensor names: the entries `keys` of `file` as they are, and uint32 `extra`.

    Every tensor becomes one float32 word, the same for all.
    """
    entries = [file.metadata_bytes(key) for key in keys]
    entries += [_string(key) + struct.pack("<II", _UINT32, value) for key, value in extra.items()]
    tensors = [_string(name) + struct.pack("<IQIQ", 1, 1, 0, 0) for name in file.tensors]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries + tensors)
    path.write_bytes(header.ljust(align_up(len(header), DEFAULT_ALIGNMENT) + DEFAULT_ALIGNMENT, b"\0"))


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


@contextmanager
def _shown_to_transformers(file: GgufFile, keys: list[str], extra: Mapping[str, int], what: str) -> Iterator[Path]:
    """A folder with a header copy in it; whatever Transformers raises inside becomes a ConversionError."""
    with tempfile.TemporaryDirectory(prefix="ninfer-torch-") as folder:
        write_header_copy(file, Path(folder) / _COPY_NAME, keys, extra)
        try:
            yield Path(folder)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConversionError(f"{file.name}: Transformers cannot read {what}: {reason}") from error


def read_config(file: GgufFile, table: Architecture, factors: Factors) -> Any:
    """The Transformers config of a model, complete. `factors` are the rotary factors that the file holds.

    Raises ConversionError for settings that no Transformers config can state.
    """
    from transformers import AutoConfig

    if table.name in BUILT_HERE:
        return qwen35_config(file, table)
    prefix, vocab_size = f"{table.name}.", f"{table.name}.vocab_size"
    keys = [key for key in file.metadata if key.startswith(prefix) or key.endswith("_token_id")]
    keys = ["general.architecture", *(key for key in keys if key != vocab_size)]
    rows, columns = _embedding_shape(file)
    # The vocabulary is slow to read and tells the config only its length; the rows of the embedding are what counts.
    with _shown_to_transformers(file, keys, {vocab_size: rows}, "the config") as folder:
        config = AutoConfig.from_pretrained(folder, gguf_file=_COPY_NAME)
    if config.hidden_size != columns:
        raise ConversionError(
            f"{file.name}: {prefix}embedding_length is {config.hidden_size}, but the embedding has {columns} columns"
        )
    config.architectures = [table.model_class]
    config.tie_word_embeddings = "output.weight" not in file.tensors
    config.dtype = torch.bfloat16
    config.name_or_path = ""  # the folder of the copy, gone by now
    _COMPLETE[table.name](config, file, factors)
    return config


def _embedding_shape(file: GgufFile) -> tuple[int, int]:
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise ConversionError(f"{file.name}: tensor 'token_embd.weight' has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def _complete_llama(config: Any, file: GgufFile, factors: Factors) -> None:
    heads = config.num_attention_heads
    config.num_key_value_heads = file.metadata.get("llama.attention.head_count_kv", heads)
    config.head_dim = _head_width(file, "llama", config.hidden_size // heads)
    scaling = _linear_scaling(file, "llama")
    for name, values in factors.items():
        if scaling:
            raise ConversionError(f"{file.name}: {name!r} beside linear rotary scaling; no config states both")
        scaling = _llama3_scaling(file, values, config.rope_parameters["rope_theta"], config.head_dim)
    config.rope_parameters = config.rope_parameters | scaling


def _complete_gemma3(config: Any, file: GgufFile, factors: Factors) -> None:
    config.head_dim = _head_width(file, "gemma3", config.head_dim)
    # The 27B model alone divides by the square root of hidden size / heads; llama.cpp knows it by its 62 layers too.
    of_27b = config.num_hidden_layers == 62
    config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if of_27b else config.head_dim
    rope = {kind: dict(parameters) for kind, parameters in config.rope_parameters.items()}
    rope["full_attention"] |= _linear_scaling(file, "gemma3")
    if "gemma3.rope.freq_base_swa" in file.metadata:
        rope["sliding_attention"]["rope_theta"] = file.metadata["gemma3.rope.freq_base_swa"]
    config.rope_parameters = rope


def _complete_qwen(config: Any, file: GgufFile, factors: Factors) -> None:
    name = str(file.metadata["general.architecture"])
    config.head_dim = _head_width(file, name, config.hidden_size // config.num_attention_heads)
    config.rope_parameters = config.rope_parameters | _linear_scaling(file, name)


def _complete_qwen3moe(config: Any, file: GgufFile, factors: Factors) -> None:
    _complete_qwen(config, file, factors)
    config.num_experts = file.metadata["qwen3moe.expert_count"]
    config.moe_intermediate_size = file.metadata["qwen3moe.expert_feed_forward_length"]
    config.norm_topk_prob = True  # llama.cpp does so for every model of this architecture, and no key says otherwise


def _complete_phi3(config: Any, file: GgufFile, factors: Factors) -> None:
    metadata, width = file.metadata, config.hidden_size // config.num_attention_heads
    turned = metadata["phi3.rope.dimension_count"]
    if not isinstance(turned, int) or turned > width or turned % 2:
        raise ConversionError(
            f"{file.name}: phi3.rope.dimension_count is {turned!r}, expected an even number of the {width} columns of a head"
        )
    config.original_max_position_embeddings = metadata.get(
        "phi3.rope.scaling.original_context_length", config.max_position_embeddings
    )
    config.sliding_window = metadata.get("phi3.attention.sliding_window") or None
    for role, name in _SPECIAL_TOKENS.items():  # the class has defaults of its own, ids of one model's vocabulary
        if role != "unk_token":
            setattr(config, f"{role}_id", metadata.get(f"tokenizer.ggml.{name}_token_id"))
    rope = config.rope_parameters | {"partial_rotary_factor": turned / width}
    config.rope_parameters = rope | _longrope_scaling(config, file, factors, turned // 2)


def _longrope_scaling(config: Any, file: GgufFile, factors: Factors, frequencies: int) -> dict[str, Any]:
    """What LongRoPE adds to the rope parameters: a factor per frequency, for short and for long texts."""
    attention_factor = file.metadata.get("phi3.rope.scaling.attn_factor")
    if not factors and attention_factor is None:
        return {}
    short, long = (factors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    if short is None or long is None or any(tuple(found.shape) != (frequencies,) for found in (short, long)):
        found = {name: list(values.shape) for name, values in factors.items()}
        raise ConversionError(
            f"{file.name}: rotary factors {found}, attention factor {attention_factor}; expected "
            f"'rope_factors_short.weight' and 'rope_factors_long.weight' of {frequencies} numbers each"
        )
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": config.original_max_position_embeddings,
        "factor": config.max_position_embeddings / config.original_max_position_embeddings,
    }
    return scaling | ({} if attention_factor is None else {"attention_factor": attention_factor})


_COMPLETE: Mapping[str, Callable[[Any, GgufFile, Factors], None]] = MappingProxyType(
    {
        "llama": _complete_llama,
        "gemma3": _complete_gemma3,
        "qwen2": _complete_qwen,
        "qwen3": _complete_qwen,
        "qwen3moe": _complete_qwen3moe,
        "phi3": _complete_phi3,
    }
)
"""What each architecture's config still lacks after Transformers' reading."""


def _head_width(file: GgufFile, name: str, default: int) -> Any:
    """Columns of one head, for which the file may have three keys; they must agree, since every column is rotated."""
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    stated = {f"{name}.{key}": file.metadata[f"{name}.{key}"] for key in keys if f"{name}.{key}" in file.metadata}
    if len(set(stated.values())) > 1:
        raise ConversionError(
            f"{file.name}: heads of unequal width {stated}, expected one for keys, values and rotation"
        )
    return next(iter(stated.values()), default)


def _linear_scaling(file: GgufFile, name: str) -> dict[str, Any]:
    """What linear rotary scaling adds to the rope parameters: nothing for a factor of 0 or 1.

    Where no type is stated llama.cpp takes `linear`, and so does this.
    """
    kind = file.metadata.get(f"{name}.rope.scaling.type", "linear")
    factor = file.metadata.get(f"{name}.rope.scaling.factor", 0.0)
    if kind not in ("linear", "none") or not isinstance(factor, int | float):
        raise ConversionError(
            f"{file.name}: rotary scaling of type {kind!r}, factor {factor!r} is not read by this version; "
            "known: none, linear"
        )
    return {} if kind == "none" or factor in (0, 1) else {"rope_type": "linear", "factor": float(factor)}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings every published Llama 3.1 to 3.3 model shares; only the factor differs."""


def llama3_factors(theta: float, head_width: int, factor: float) -> torch.Tensor:
    """What Llama 3's scaling divides the rotary frequencies by: float64 [head_width / 2], from 1 to `factor`."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    turns = _LLAMA3["original_max_position_embeddings"] * theta**-exponents / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GgufFile, factors: torch.Tensor, theta: float, head_width: int) -> dict[str, Any]:
    factor = float(factors.max())
    expected = llama3_factors(theta, head_width, factor)
    if factors.shape != expected.shape or not torch.allclose(factors.to(torch.float64), expected, rtol=1e-5, atol=0):
        raise ConversionError(
            f"{file.name}: the rotary factors 'rope_freqs.weight' {list(factors.shape)} are not those of Llama 3's "
            f"scaling by {factor}; no Transformers config can state them"
        )
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3


def read_resources(file: GgufFile) -> dict[str, bytes]:
    """The files that Transformers' `save_pretrained` writes for the file's tokenizer, and generation_config.json.

    A file without a vocabulary gives no tokenizer, one without special token ids no generation config.
    """
    return _tokenizer_files(file) | _generation_config(file)


def _tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    if not isinstance(file.metadata.get(_TOKENS), GgufArray):
        return {}
    from transformers import AutoTokenizer

    keys = [key for key in file.metadata if key != "general.alignment" and key != "general.name"]
    with _shown_to_transformers(file, keys, {}, "the tokenizer") as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_COPY_NAME)
    _correct_special_tokens(tokenizer, file)
    _correct_splitting(tokenizer, file)
    with tempfile.TemporaryDirectory(prefix="ninfer-torch-") as saved:
        tokenizer.save_pretrained(saved)
        files = {path.name: path.read_bytes() for path in sorted(Path(saved).iterdir())}
    settings = json.loads(files["tokenizer_config.json"])
    for key in ("is_local", "local_files_only", "name_or_path"):  # facts about this conversion, not about the tokenizer
        settings.pop(key, None)
    return files | {"tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False).encode("utf-8")}


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Special tokens of a tokenizer and their names in the GGUF metadata."""


def _correct_special_tokens(tokenizer: Any, file: GgufFile) -> None:
    """Names the special tokens by the file's ids; older Transformers takes the end of text for its beginning."""
    for role, name in _SPECIAL_TOKENS.items():
        number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokenizer):
            raise ConversionError(
                f"{file.name}: tokenizer.ggml.{name}_token_id is {number!r}, expected one of {len(tokenizer)} tokens"
            )
        setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(number))


def _correct_splitting(tokenizer: Any, file: GgufFile) -> None:
    """Has text split before merging as the file's `tokenizer.ggml.pre` says, or warns that it may not be.

    SmolLM's vocabulary was learned with every digit alone; GPT-2's splitting takes the space before a number along.
    """
    from tokenizers import pre_tokenizers

    splitting = file.metadata.get("tokenizer.ggml.pre")
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or splitting in _splittings_of_transformers():
        return
    if splitting == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        return
    warnings.warn(
        f"{file.name}: how tokenizer.ggml.pre = {splitting!r} splits text is not known here; it will be split as "
        "GPT-2's does",
        stacklevel=2,
    )


def _splittings_of_transformers() -> set[str]:
    """Values of `tokenizer.ggml.pre` that Transformers' reading gets right: GPT-2's, and those newer versions list."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return {"gpt-2"}
    return {"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}


_TOKEN_IDS = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
"""Generation settings and the GGUF tokens they take; the end of a turn or message ends generation too."""


def _generation_config(file: GgufFile) -> dict[str, bytes]:
    from transformers import GenerationConfig

    settings: dict[str, int | list[int]] = {}
    for name, tokens in _TOKEN_IDS.items():
        found = [file.metadata.get(f"tokenizer.ggml.{token}_token_id") for token in tokens]
        ids = list(dict.fromkeys(value for value in found if isinstance(value, int)))
        if ids:
            settings[name] = ids[0] if len(ids) == 1 else ids
    if not settings:
        return {}
    return {"generation_config.json": GenerationConfig(**settings).to_json_string().encode("utf-8")}
