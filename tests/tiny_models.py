"""Tiny random models and the artifacts made of them, for tests of the host integrations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ninfer_torch.artifact import ArtifactWriter, open_artifact
from ninfer_torch.convert.methods import quantize

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def tiny_llama(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of two layers with random weights large enough to make its logits differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then <bos> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_folder(folder: Path, model: LlamaForCausalLM) -> Path:
    """An ordinary Hugging Face folder: the source of a conversion."""
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


Entry = tuple[str, torch.Tensor]
"""(format, values) of one parameter, before it is quantized."""


def written_artifact(
    path: Path,
    model: LlamaForCausalLM,
    format: str = "q8_g32_fp16",
    *,
    change: Callable[[dict[str, Entry]], None] | None = None,
    config: Mapping[str, Any] | None = None,
    prefix: str = "text/",
    rename: Callable[[str], str] = lambda name: name,
    policy: str = "A16Only",
    resources: Mapping[str, bytes] | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """An artifact written parameter by parameter, so that a test can leave one out, add one or bend its shape.

    Matrices become `format`, all else bf16. `change` edits the table of parameters before it is written.
    """
    entries: dict[str, Entry] = {
        name: (format if value.dim() == 2 else "bf16", value.detach()) for name, value in model.state_dict().items()
    }
    if change is not None:
        change(entries)
    members = json.loads(json.dumps(model.config.to_dict() if config is None else dict(config)))
    members["architectures"] = members.get("architectures") or [type(model).__name__]
    resources = resources or {}
    objects: dict[tuple[int, str], str] = {}
    with ArtifactWriter(path, artifact_id="0123456789abcdef" * 2, max_file_bytes=max_file_bytes) as writer:
        writer.component("text", members, resources={role: f"resource/{role}" for role in resources})
        for role, data in resources.items():
            writer.resource(f"resource/{role}", data)
        for name, (entry_format, value) in entries.items():
            identity = (value.data_ptr(), entry_format)
            if identity not in objects:
                objects[identity] = f"weight/{name}"
                tensor = quantize(value.float() if entry_format == "fp32" else value, entry_format)
                writer.tensor(objects[identity], entry_format, tuple(value.shape), tensor)
            logical = prefix + rename(name)
            writer.bind(logical, objects[identity])
            if value.dim() == 2 and "embed" not in name:
                writer.use(logical, logical.removesuffix(".weight") + "/input", activation_policy=policy)
    return path


def dense_twin(path: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A plain model of ordinary tensors that hold the artifact's values, made without the integration."""
    with open_artifact(path) as artifact:
        members = dict(artifact.components["text"].config)
        values = {}
        for name, binding in artifact.bindings.items():
            tensor = artifact.tensor(binding.object)
            values[name.removeprefix("text/")] = tensor.dequantize() if hasattr(tensor, "planes") else tensor.float()
    config = LlamaConfig(**{key: value for key, value in members.items() if key != "dtype"})
    model = LlamaForCausalLM(config).to(dtype).eval()
    if config.tie_word_embeddings:
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    model.load_state_dict(values)
    return model


def prompt_ids(length: int = 9, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(5))
