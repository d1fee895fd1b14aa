"""Hugging Face folders of random bits: written and read here without the code that is tested.

Each config.json is one that transformers wrote for a golden model, with sizes that every mesh of eight devices divides.
The tensors' names and shapes are the family's table's, which tests/layers/pretrained holds to transformers' own files.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from layers.pretrained.families import find_family
from layers.pretrained.table import find_sources, flat, parameter_shapes, tensor_shapes
from tests.layers.pretrained.golden import GOLDEN
from tests.layers.pretrained.samples import file_bytes
from tests.round_trips.cases import MULTIMODAL, PACKED, Case

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "uint8": np.uint8}
_STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
_DTYPE_OF = {stored: _DTYPES[name] for name, stored in _STORED_NAMES.items()}
_NUM_HEADS, _WIDTH, _VOCAB_SIZE, _MLP_WIDTH, _PACKED_MLP_WIDTH = 8, 64, 264, 24, 32
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, np.ndarray]


class Source(NamedTuple):
    """A folder and what is expected of it."""

    path: Path
    model_type: str
    """Of an export."""
    tensors: Tensors
    """Of an export."""


def write_folder(case: Case, path: Path, rng: np.random.Generator) -> Source:
    """Makes a case's folder.

    Args:
      case: whose model and dtypes.
      path: of the folder.
      rng: draws the number of key/value heads, the tensors' bits, and into how many files they go.
    """
    config = _config(case, rng)
    family = find_family(config["model_type"], case.model)
    ours = family.read_config(config, case.model)
    parameters = {path: leaf.shape for path, leaf in flat(parameter_shapes(ours)).items()}
    shapes = tensor_shapes(find_sources(family, ours, parameters), parameters)
    tensors = {name: _random_tensor(shape, case, rng) for name, shape in shapes.items()}
    stored = dict(tensors)
    if case.model == MULTIMODAL:
        config = {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 8}}
        stored = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        stored["vision_tower.vision_model.post_layernorm.weight"] = _random_tensor((8,), case, rng)
        stored["multi_modal_projector.mm_input_projection_weight"] = _random_tensor((8, 8), case, rng)
    if case.model == PACKED:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            num_experts, num_in, num_out = stored.pop(name).shape
            blocks = rng.integers(0, 256, (num_experts, num_out, num_in // 32, 16)).astype(np.uint8)
            # Up to what bfloat16 holds, or such that the experts' weights are of a size to compute with.
            lowest, highest = (123, 126) if case.trip == "logits" else (0, 252)
            scales = rng.integers(lowest, highest + 1, blocks.shape[:3]).astype(np.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = _unpacked(blocks, scales)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    _write_files(path, stored, rng)
    return Source(path, family.model_type, tensors)


def read_folder(folder: Path) -> Tensors:
    """All tensors of a folder, as its files have them."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        del header["__metadata__"]
        for name, entry in header.items():
            assert name not in tensors, name
            first, last = entry["data_offsets"]
            flat_tensor = np.frombuffer(data[start + first : start + last], _DTYPE_OF[entry["dtype"]])
            tensors[name] = flat_tensor.reshape(entry["shape"])
    return tensors


def differing(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> list[str]:
    """The names of arrays whose bytes, dtypes or shapes differ, and of those that only one of the two has."""

    def bits(arrays: Mapping[str, np.ndarray], name: str) -> tuple | None:
        return None if name not in arrays else (arrays[name].dtype, arrays[name].shape, arrays[name].tobytes())

    return sorted(name for name in found.keys() | expected.keys() if bits(found, name) != bits(expected, name))


def _config(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """The golden model's config.json, with heads and widths that the mesh divides."""
    golden = {MULTIMODAL: "gemma3", PACKED: "gpt_oss"}.get(case.model, case.model)
    with zipfile.ZipFile(GOLDEN / f"{golden}.zip") as archive:
        config = json.loads(archive.read("config.json"))
    tensor_axis = case.mesh[2]
    mlp_width = _PACKED_MLP_WIDTH if case.model == PACKED else _MLP_WIDTH
    sizes = {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": _WIDTH,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": int(rng.choice([num for num in (1, 2, 4, 8) if num % tensor_axis == 0])),
        "intermediate_size": mlp_width,
    }
    if config.get("head_dim") is None:
        # The head dim follows from the width. It stays, as longrope lists a factor for each pair of features.
        sizes["hidden_size"] = config["hidden_size"] // config["num_attention_heads"] * _NUM_HEADS
    if "moe_intermediate_size" in config:
        sizes["moe_intermediate_size"] = mlp_width
    return config | sizes


def _random_tensor(shape: tuple[int, ...], case: Case, rng: np.random.Generator) -> np.ndarray:
    """Weights where something is computed; else any bits, those of infinite and subnormal numbers among them."""
    dtype = np.dtype(_DTYPES[case.stored])
    if case.trip == "logits":
        return rng.standard_normal(shape).astype(dtype) / 4
    bits = rng.integers(0, 256**dtype.itemsize, shape, f"u{dtype.itemsize}").view(dtype)
    # A wider dtype holds every number, and no NaN's bits. JAX 0.10 takes bfloat16 through float32 on CPUs.
    has_nans = case.held == case.stored != "bfloat16"
    with np.errstate(invalid="ignore"):
        return bits if has_nans else np.where(np.isnan(bits), np.ones_like(bits), bits)


def _unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrices [expert, in, out] of packed ones, in bfloat16, by the format's definition."""
    num_experts, num_out, num_blocks, _ = blocks.shape
    values = np.empty((num_experts, num_out, num_blocks, 32))
    values[..., 0::2], values[..., 1::2] = _FP4[blocks % 16], _FP4[blocks // 16]
    values *= 2.0 ** (scales[..., None].astype(int) - 127)
    return values.reshape(num_experts, num_out, num_blocks * 32).swapaxes(1, 2).astype(ml_dtypes.bfloat16)


def _write_files(folder: Path, tensors: Tensors, rng: np.random.Generator) -> None:
    """Writes model.safetensors, or several files and their index."""
    names, num_files = rng.permutation(list(tensors)).tolist(), int(rng.integers(1, 4))
    file_of = {}
    for number in range(num_files):
        file_name = "model.safetensors" if num_files == 1 else f"part-{number}.safetensors"
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for name in names[number::num_files]:
            tensor, start = tensors[name], len(data)
            data += tensor.tobytes()
            dtype = _STORED_NAMES[tensor.dtype.name]
            header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, len(data)]}
            file_of[name] = file_name
        (folder / file_name).write_bytes(file_bytes(header, data))
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
