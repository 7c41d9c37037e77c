"""Quantized weights in safetensors: every plane a plain tensor of bytes, and a description of each weight beside them.

The first plane lies under the parameter's own name, flat, so that whoever reads it as a dense weight finds another
shape and stops; the others follow as `<name>_<plane>`. What the words mean is in the files' metadata, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ninfer_torch.errors import ArtifactError, LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import Geometry, plane_names, planes_of, slice_rows
from ninfer_torch.tensors import NinferTensor, PackedTensor, StackedRows, TransformedInput
from ninfer_torch.tensors.packed import make_tensor, own_storage
from ninfer_torch.tensors.patch import PatchKernel, patch_kernel
from ninfer_torch.tensors.stacked import rebuild_stacked
from ninfer_torch.tensors.transformed import transform_input

__all__ = ["METADATA_KEY", "PLAIN", "flatten_state_dict", "read_descriptions", "rebuild_weight", "stored_names"]

METADATA_KEY = "ninfer_planes"
_VERSION = 1

PLAIN = "plain"
"""Kind of a dense tensor whose dtype is not the model's and must not become it."""

Description = dict[str, Any]


def flatten_state_dict(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors by name, and the metadata that describes them; a weight under several names is stored once. Dense
    ones of another floating type than `dtype`, the model's, are bytes too, so that no loader casts them.

    Raises UnsupportedOperation for a composition that has no description.
    """
    plain: dict[str, torch.Tensor] = {}
    descriptions: dict[str, Description] = {}
    seen: set[int] = set()
    addresses: set[int] = set()
    for name, weight in weights.items():
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        keeps_dtype = weight.is_floating_point() and dtype is not None and weight.dtype != dtype
        if not isinstance(weight, NinferTensor) and not keeps_dtype:
            plain[name] = weight.detach()
            continue
        parts: dict[str, torch.Tensor] = {}
        descriptions[name] = _describe(weight.detach(), "", parts)
        for stored, plane in zip(stored_names(name, list(parts)), parts.values(), strict=True):
            plain[stored] = plane.clone() if plane.data_ptr() in addresses else plane  # two weights may view one object
            addresses.add(plane.data_ptr())
    text = json.dumps({"version": _VERSION, "weights": descriptions}, separators=(",", ":"))
    return plain, {METADATA_KEY: text}


def stored_names(name: str, parts: Sequence[str]) -> list[str]:
    """The names of a weight's planes in a file: its own, then `<name>_<plane>`."""
    return [name, *(f"{name}_{part}" for part in parts[1:])]


def _describe(weight: torch.Tensor, prefix: str, parts: dict[str, torch.Tensor]) -> Description:
    """Describe one tensor and put its planes, as flat bytes, into `parts`."""
    if isinstance(weight, PackedTensor):
        planes, format, geometry, policy, _ = weight.call
        for name, plane in zip(plane_names(format), planes, strict=True):
            parts[prefix + name] = _bytes(plane)
        return {
            "kind": "packed",
            "format": format,
            "shape": tuple(weight.shape),
            "geometry": tuple(geometry),
            "planes": [(_dtype_name(plane.dtype), tuple(plane.shape)) for plane in planes],
            "policy": policy,
        }
    if not isinstance(weight, NinferTensor):
        parts[prefix + "values"] = _bytes(weight)
        return {"kind": PLAIN, "dtype": _dtype_name(weight.dtype), "shape": tuple(weight.shape)}
    if isinstance(weight, StackedRows):
        blocks = [_describe(block, f"{prefix}block{n}_", parts) for n, block in enumerate(weight.blocks)]
        runs = [list(run) for run in weight.placement.runs]
        return {"kind": "stacked", "blocks": blocks, "runs": runs, "shape": tuple(weight.shape)}
    if isinstance(weight, TransformedInput):
        inner = _describe(weight.weight, prefix, parts)
        parts[prefix + "vector"] = _bytes(weight.vector)
        return {"kind": "transformed", "weight": inner, "role": weight.role, "dtype": _dtype_name(weight.vector.dtype)}
    if isinstance(weight, PatchKernel):
        return {"kind": "patch", "weight": _describe(weight.weight, prefix, parts), "shape": tuple(weight.shape)}
    raise UnsupportedOperation(
        f"a {type(weight).__name__} has no form in safetensors; ninfer_torch.save(model, 'model.ninfer') writes an artifact"
    )


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    """A plane as flat bytes in a storage of its own, as safetensors wants it."""
    flat = plane.detach().contiguous().reshape(-1).view(torch.uint8)
    return own_storage(flat)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_descriptions(files: Sequence[str | Path]) -> dict[str, Description] | None:
    """What the metadata of a checkpoint's files says about its weights; None where it says nothing.

    Raises ArtifactError for a description that this version does not read.
    """
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
        if text is None:
            continue
        try:
            found = json.loads(text)
            version, weights = found["version"], found["weights"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: metadata {METADATA_KEY!r} cannot be read: {error}", "json") from error
        if version != _VERSION:
            raise ArtifactError(
                f"{path}: planes are described in version {version!r}, this ninfer_torch reads {_VERSION}; upgrade it",
                "schema",
            )
        return weights
    return None


def rebuild_weight(
    name: str, description: Description, planes: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The weight that `planes`, by the names they have in the file, and its description stand for.

    Raises ArtifactError, naming the weight, for a plane that is missing or of another size.
    """
    parts = part_names(description)
    stored = stored_names(name, parts)
    missing = [key for key in stored if key not in planes]
    if missing:
        raise ArtifactError(f"{name}: the checkpoint lacks {', '.join(missing)}", "reference")
    try:
        weight = _rebuild(description, {part: planes[key] for part, key in zip(parts, stored, strict=True)}, "", dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"{name}: its planes do not fit their description {description}: {error}", "reference"
        ) from error
    return weight


def _check_planes(format: str, geometry: Geometry, shape: Sequence[int], planes: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError unless the planes are those of the rows that the geometry speaks of: kernels trust them."""
    rows, columns, begin, parent_rows, divisors = geometry
    specs = planes_of(format, (parent_rows, columns), divisors)
    parent = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
    expected, _ = slice_rows(format, parent, Geometry.whole((parent_rows, columns), divisors), begin, begin + rows)
    fits = [(plane.dtype, plane.shape) for plane in planes] == [(plane.dtype, plane.shape) for plane in expected]
    if not fits or shape[-1] != columns or torch.Size(shape[:-1]).numel() != rows:
        raise LayoutError(f"planes {[list(plane.shape) for plane in planes]} are not those of {format} {list(shape)}")


def part_names(description: Description, prefix: str = "") -> list[str]:
    """The planes of a described weight, in the order in which they are stored."""
    kind = description["kind"]
    if kind == "packed":
        return [prefix + name for name in plane_names(description["format"])]
    if kind == PLAIN:
        return [f"{prefix}values"]
    if kind == "stacked":
        blocks = enumerate(description["blocks"])
        return [name for number, block in blocks for name in part_names(block, f"{prefix}block{number}_")]
    if kind == "transformed":
        return [*part_names(description["weight"], prefix), f"{prefix}vector"]
    if kind == "patch":
        return part_names(description["weight"], prefix)
    raise ArtifactError(f"a weight of kind {kind!r} is not known to this ninfer_torch; upgrade it", "schema")


def _rebuild(description: Description, parts: Mapping[str, torch.Tensor], prefix: str, dtype: torch.dtype) -> Any:
    kind, shape = description["kind"], description.get("shape", ())
    if kind == "packed":
        format, geometry = description["format"], Geometry(*description["geometry"])
        stored = [parts[prefix + name] for name in plane_names(format)]
        planes = [
            plane.view(getattr(torch, name)).reshape(extents)
            for plane, (name, extents) in zip(stored, description["planes"], strict=True)
        ]
        _check_planes(format, geometry, shape, planes)
        return make_tensor(get_format(format).name, planes, geometry, shape, dtype, description["policy"])
    if kind == PLAIN:
        return parts[f"{prefix}values"].view(getattr(torch, description["dtype"])).reshape(shape)
    if kind == "stacked":
        blocks = [
            _rebuild(block, parts, f"{prefix}block{number}_", dtype)
            for number, block in enumerate(description["blocks"])
        ]
        return rebuild_stacked(blocks, [tuple(run) for run in description["runs"]], tuple(shape), dtype, False)
    inner = _rebuild(description["weight"], parts, prefix, dtype)
    if kind == "patch":
        return patch_kernel(inner, shape)
    vector = parts[f"{prefix}vector"].view(getattr(torch, description["dtype"]))
    return transform_input(inner, description["role"], vector)
