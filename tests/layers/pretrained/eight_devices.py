"""Loads models of several families into shards of eight devices and saves them; run as a program by test_shards.py.

Prints a JSON object: for each case and mesh how many tensors were compared, and the names of those that differ.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from layers.pretrained import config_from_huggingface, load, load_gpt, read_params, write_huggingface
from layers.pretrained.folder import open_tensors, read_config
from layers.pretrained.steps import read_whole
from layers.pretrained.table import parameter_shapes
from tests.layers.pretrained.golden import unpack

AXES = ("data", "fsdp", "tensor", "context")
# Families whose tensors differ in kind: split heads, joined and interleaved ones, experts, stacks of several patterns.
CASES = ("llama", "phi3", "gpt_oss", "qwen3_moe", "gemma3")
MESHES = ((1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 8), (1, 1, 8, 1))


def random_spec(rng: np.random.Generator, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> PartitionSpec:
    """Deals the mesh's axes out to dims that they divide, and leaves some out: those replicate."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for axis in rng.permutation(AXES):
        dim = int(rng.integers(len(shape) + 1))
        if dim < len(shape):
            axes = (*spec[dim], str(axis))
            if shape[dim] % math.prod(mesh.shape[name] for name in axes) == 0:
                spec[dim] = axes
    return PartitionSpec(*(axes or None for axes in spec))


def differing(before: Path, after: Path) -> dict[str, object]:
    """What two folders' tensors don't have in common."""
    with open_tensors(before) as one, open_tensors(after) as other:
        names = sorted(one.keys() ^ other.keys())
        names += [
            n for n in one.keys() & other.keys() if read_whole(one[n]).tobytes() != read_whole(other[n]).tobytes()
        ]
        return {"compared": len(one), "differing": names}


def main(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = {}
    for case, sizes in zip(CASES, MESHES, strict=True):
        # One case's larger stacks grow on the devices, a layer at a time.
        load._SMALL_BYTES, load._CHUNK_BYTES = (600, 1) if case == "llama" else (1 << 24, 1 << 27)
        with tempfile.TemporaryDirectory() as name:
            (source := Path(name) / "source").mkdir()
            unpack(case, source)
            config, model_type = config_from_huggingface(source), read_config(source)["model_type"]
            mesh = jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 4)
            shardings = jax.tree.map(
                lambda leaf, mesh=mesh: NamedSharding(mesh, random_spec(rng, leaf.shape, mesh)),
                parameter_shapes(config),
            )
            told = []
            params = read_params(source, config, shardings, progress=lambda *args, told=told: told.append(args))
            assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
            assert told == sorted(told)
            assert told[-1][0] == told[-1][1] == told[0][1]
            write_huggingface(Path(name) / "export", config, params, dtype="bfloat16", model_type=model_type)
            found[f"{case} on {sizes}"] = differing(source, Path(name) / "export")
    with tempfile.TemporaryDirectory() as name:
        unpack("olmo2", Path(name))
        tokens = rng.integers(0, 40, (8, 32)).astype(np.int32)
        mesh = jax.make_mesh((2, 2, 2, 1), AXES, (AxisType.Auto,) * 4)
        options = {"compute_dtype": "float32", "implementation": "reference"}
        one, eight = (load_gpt(name, mesh=mesh, **options) for mesh in (None, mesh))
        shards = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(eight.embedding)}
        expected, logits = (np.asarray(jax.jit(lambda m, t: m.logits(m(t)))(m, tokens)) for m in (one, eight))
        largest = float(np.abs(logits - expected).max() / np.abs(expected).max())
    print(json.dumps({"folders": found, "logits": largest, "devices": sorted(shards)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
