"""One case: a way into shards and back, and the arrays that come out otherwise than they went in."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layers import GPTConfig
from layers.pretrained import config_from_huggingface, load_gpt, read_params, shards, write_huggingface
from layers.pretrained.table import flat, parameter_shapes
from tests.round_trips.cases import AXES, NUM_DEVICES, Case
from tests.round_trips.folders import Source, differing, read_folder, write_folder
from trainer.checkpoints.parameters import restore_params
from trainer.config import CompilationConfig, DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.export.__main__ import main as export
from trainer.saved_run import open_saved_run
from trainer.step.sharding import make_mesh, parameter_shardings
from trainer.train import train
from trainer.workdir import claim_workdir

_LOGITS_TOLERANCE = 1e-12  # relative to the largest, in float64: sums in another order
# One case in so many has each shard grow on its device, a layer at a time, as large ones do. It compiles for each.
_GROWING_ONE_IN = 20


def judge(case: Case) -> list[str]:
    """Runs a case; returns what came out otherwise than it went in."""
    rng = np.random.default_rng(list(repr(case).encode()))
    with tempfile.TemporaryDirectory() as folder:
        return _TRIPS[case.trip](case, write_folder(case, Path(folder) / "source", rng), rng)


def _judge_folder(case: Case, source: Source, rng: np.random.Generator) -> list[str]:
    """A folder's tensors go into shards, and from there into another folder."""
    config, output = config_from_huggingface(source.path), source.path.parent / "export"
    with contextlib.ExitStack() as stack:
        if rng.integers(_GROWING_ONE_IN) == 0:
            stack.enter_context(mock.patch.multiple(shards, _SMALL_BYTES=600, _CHUNK_BYTES=int(rng.integers(1, 2000))))
        params = _read(case, source.path, config, rng)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {case.held}
    write_huggingface(
        output,
        config,
        params,
        dtype=None if case.held == case.stored else case.stored,  # None: each parameter's own
        shard_size=float(rng.choice([5e4, 5e9])),
        model_type=source.model_type,
    )
    assert config_from_huggingface(output) == config
    return differing(read_folder(output), source.tensors)


def _judge_run(case: Case, source: Source, rng: np.random.Generator) -> list[str]:
    """A run on the mesh leaves parameters, which are exported and read into its shards again."""
    folder = source.path.parent
    workdir, output, texts = folder / "run", folder / "export", folder / "texts.txt"
    texts.write_text("".join(map(chr, rng.integers(32, 127, 4000))))
    model = config_from_huggingface(source.path)
    config = TrainConfig(
        name="round_trip",
        num_steps=1,
        sequence_length=64,
        batch_size=8,
        model=dataclasses.replace(model, compute_dtype="float32", implementation="reference", remat="none"),
        data=DataConfig(source="text", files=(str(texts),), token_cache_dir=str(folder / "tokens")),
        optimizer=OptimizerConfig(num_warmup_steps=0),
        mesh=MeshConfig(*case.mesh),
        compilation=CompilationConfig(cache_dir=""),
    )
    with contextlib.redirect_stdout(io.StringIO()) as told:
        trained = train(config, claim_workdir(workdir, config), command=["round_trip"], started=time.perf_counter())
        exported = export(["--workdir", str(workdir), "--output", str(output)])
    assert (trained, exported) == (0, 0), told.getvalue()
    jax.clear_caches()
    assert config_from_huggingface(output) == model
    params = _read(case, output, config.model, rng)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    expected = restore_params(open_saved_run(workdir, setting="--workdir").checkpoint, abstract)
    return differing(*({path: np.asarray(leaf) for path, leaf in flat(tree).items()} for tree in (params, expected)))


def _judge_logits(case: Case, source: Source, rng: np.random.Generator) -> list[str]:
    """A model loaded onto the mesh computes what it computes on one device."""
    mesh = make_mesh(MeshConfig(*case.mesh))
    options = {"param_dtype": case.held, "compute_dtype": case.held, "implementation": "reference"}
    compute = jax.jit(lambda model, tokens: model.logits(model(tokens)))
    with jax.enable_x64(True):
        one, eight = (load_gpt(source.path, mesh=mesh, **options) for mesh in (None, mesh))
        tokens = rng.integers(0, one.config.vocab_size, (8, 32)).astype(np.int32)
        expected, logits = (np.asarray(compute(model, tokens)) for model in (one, eight))
    jax.clear_caches()
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(eight)} == {NUM_DEVICES}
    off = float(np.abs(logits - expected).max() / np.abs(expected).max())
    return [] if off <= _LOGITS_TOLERANCE else [f"logits differ by {off:.1e}"]


_TRIPS = {"folder": _judge_folder, "run": _judge_run, "logits": _judge_logits}


def _read(case: Case, folder: Path, config: GPTConfig, rng: np.random.Generator) -> Any:
    """A folder's parameters in the shards of a case."""
    mesh, shapes = make_mesh(MeshConfig(*case.mesh)), parameter_shapes(config)
    if case.placement == "trainer":
        shardings = parameter_shardings(shapes, mesh)
    else:
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, _random_spec(leaf.shape, mesh, rng)), shapes)
    told: list[tuple[int, int]] = []
    params = read_params(folder, config, shardings, dtype=case.held, progress=lambda *counts: told.append(counts))
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == told[0][1]
    return params


def _random_spec(shape: tuple[int, ...], mesh: Mesh, rng: np.random.Generator) -> PartitionSpec:
    """Gives the mesh's axes to dims that they divide, and leaves some out: those replicate."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for axis in map(str, rng.permutation(AXES)):
        dim = int(rng.integers(len(shape) + 1))
        if dim < len(shape) and shape[dim] % math.prod(mesh.shape[name] for name in (*spec[dim], axis)) == 0:
            spec[dim] = (*spec[dim], axis)
    return PartitionSpec(*(axes or None for axes in spec))
