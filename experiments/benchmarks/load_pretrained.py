"""How fast a Hugging Face folder streams into a mesh's shards, and what memory of the host that takes.

    python -m experiments.benchmarks.load_pretrained --output load_pretrained.jsonl

Writes a folder of Llama-3.1-8B's shape with random bfloat16 tensors (16 GB, removed at the end), and loads it onto all
devices, parameters over `fsdp`: first with the files out of the page cache, in a process that hasn't compiled the
writes yet; then so again; then with the files in the page cache.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.command_line import read_arguments
from layers.pretrained import config_from_huggingface, read_params
from layers.pretrained.table import parameter_shapes
from trainer.config import MeshConfig
from trainer.hardware import installed_versions, peak_resident_bytes, reset_peak
from trainer.step.sharding import make_mesh, parameter_shardings
from trainer.terminal.streams import reader_may_leave

_NUM_FILES = 4
_WRITTEN_BYTES = 1 << 26


@dataclass(frozen=True)
class LoadArguments:
    """Writes a random folder, and times how it is loaded."""

    num_layers: int = 32
    """Layers of the model."""
    width: int = 4096
    """Width of the model: heads of 128 features, four query heads to a key/value head, an MLP 3.5 times as wide."""
    vocab_size: int = 128_256
    """Tokens of the model's vocabulary."""
    folder: Path | None = None
    """Folder in which the random model is made for the time; None: that of temporary files."""
    output: Path | None = None
    """File that the JSON lines are appended to."""


def tensor_shapes(arguments: LoadArguments) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama's folder."""
    vocab_size, width = arguments.vocab_size, arguments.width
    mlp_width, kv_width = width * 7 // 2, width // 4
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "lm_head.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    for layer in range(arguments.num_layers):
        layer_tensors = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv_width, width),
            "self_attn.v_proj": (kv_width, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (mlp_width, width),
            "mlp.up_proj": (mlp_width, width),
            "mlp.down_proj": (width, mlp_width),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_tensors.items()}
    return shapes


def write_folder(folder: Path, arguments: LoadArguments) -> int:
    """Writes it, out of the page cache, and returns how many bytes tensors have."""
    config = {
        "model_type": "llama",
        "hidden_size": arguments.width,
        "intermediate_size": arguments.width * 7 // 2,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": arguments.width // 128,
        "num_key_value_heads": arguments.width // 512,
        "vocab_size": arguments.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(arguments)
    files: list[dict[str, tuple[int, ...]]] = [{} for _ in range(_NUM_FILES)]
    for name, shape in shapes.items():
        min(files, key=lambda file: sum(map(math.prod, file.values())))[name] = shape
    # Finite ones: exponents near 1.
    random = np.random.default_rng().integers(0, 1 << 16, _WRITTEN_BYTES // 2, np.uint16) & 0x80FF | 0x3F00
    file_of_tensor: dict[str, str] = {}
    num_bytes = 0
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{_NUM_FILES:05}.safetensors"
        file_of_tensor |= dict.fromkeys(tensors, file)
        num_bytes += _write_file(folder / file, tensors, random.tobytes())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes


def _write_file(path: Path, tensors: Mapping[str, tuple[int, ...]], content: bytes) -> int:
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for first in range(0, end, len(content)):
            file.write(content[: end - first])
        file.flush()
        os.fsync(file.fileno())
        _leave_page_cache(file.fileno())
    return end


def _leave_page_cache(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path) -> tuple[float, int, int]:
    """Loads the folder onto all devices; returns the seconds, and the bytes resident before and at most."""
    config = dataclasses.replace(config_from_huggingface(folder), param_dtype="bfloat16")
    shardings = parameter_shardings(parameter_shapes(config), make_mesh(MeshConfig(fsdp=len(jax.devices()))))
    reset_peak()
    before, begun = peak_resident_bytes(), time.perf_counter()
    jax.block_until_ready(read_params(folder, config, shardings))
    return time.perf_counter() - begun, before, peak_resident_bytes()


def main(command_line: Sequence[str]) -> int:
    """Measures, prints a line for each load and returns the exit status."""
    arguments = read_arguments(LoadArguments, command_line)
    device = jax.devices()[0]
    # Memory is compared once all devices are started: with its first array JAX takes three quarters of a GPU's memory,
    # for which the driver keeps 3 % as much on the host.
    jax.block_until_ready([jax.device_put(np.ones(8), each) + 1 for each in jax.devices()])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        num_bytes = write_folder(folder, arguments)
        for source in ("disk, first load", "disk", "page cache"):
            if source != "page cache":
                for path in folder.iterdir():
                    with path.open("rb") as file:
                        _leave_page_cache(file.fileno())
            seconds, before, most = load(folder)
            row: dict[str, Any] = {"from": source, "folder_bytes": num_bytes, "seconds": seconds}
            row |= {"resident_before_bytes": before, "resident_peak_bytes": most}
            row |= {"device": device.device_kind, "num_devices": len(jax.devices())}
            row |= {"versions": installed_versions(("jax", "jaxlib")), "date": datetime.date.today().isoformat()}
            if arguments.output is not None:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(
                f"{source}: {num_bytes / 1e9:.2f} GB in {seconds:.1f} s, {num_bytes / seconds / 1e9:.2f} GB/s; "
                f"resident {before / 1e9:.2f} GB before, {most / 1e9:.2f} GB at most"
            )
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
