"""A pretrained model's parameters in shards; tests/round_trips holds those of eight devices to every bit."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layers.pretrained import config_from_huggingface, read_params, shards
from layers.pretrained.safetensors_file import SafetensorsFile
from layers.pretrained.table import parameter_shapes
from tests.layers.pretrained.golden import unpack
from tests.layers.pretrained.samples import entry, file_bytes


@pytest.mark.parametrize("piece_bytes", [1, 3000])
@pytest.mark.parametrize(("case", "dtype"), [("gemma2", "bfloat16"), ("qwen3_moe", "float32")])
def test_a_shard_that_grows_on_its_device_has_the_same_bits(case, dtype, piece_bytes, tmp_path, monkeypatch):
    unpack(case, tmp_path)
    config = config_from_huggingface(tmp_path)
    expected = read_params(tmp_path, config, dtype=dtype)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "_PIECE_BYTES", piece_bytes)
    params = read_params(tmp_path, config, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}


@pytest.mark.parametrize(
    ("stored", "held"), [(np.float64, "float32"), (np.float64, "bfloat16"), (np.float32, "float16")]
)
def test_what_is_stored_wider_is_rounded_before_it_travels(stored, held, tmp_path, monkeypatch, rng):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    with SafetensorsFile(next(tmp_path.glob("*.safetensors"))) as file:
        arrays = {name: rng.standard_normal(tensor.shape).astype(stored) for name, tensor in file.tensors.items()}
    header, data = {}, b""
    for name, array in arrays.items():
        dtype = {8: "F64", 4: "F32"}[array.itemsize]
        header[name] = entry(len(data), len(data) + array.nbytes, dtype=dtype, shape=array.shape)
        data += array.tobytes()
    next(tmp_path.glob("*.safetensors")).write_bytes(file_bytes(header, data))
    expected = read_params(tmp_path, config, dtype=held)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    read_piece, travelling = shards.ShardReader._read_piece, set()

    def recorded(reader, job):
        parts = read_piece(reader, job)
        travelling.update(part.dtype.name for part in parts)
        return parts

    monkeypatch.setattr(shards.ShardReader, "_read_piece", recorded)
    params = read_params(tmp_path, config, dtype=held)
    assert travelling == {held}
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    embedding = arrays["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params["embedding"]["embedding"], embedding.astype(jnp.dtype(held)))


def test_the_host_holds_few_bytes_that_are_not_on_their_way(tmp_path, monkeypatch):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "_PIECE_BYTES", 1)
    monkeypatch.setattr(shards, "_BYTES_AHEAD", 500)
    read_piece, lock, num_read, placed, most = shards.ShardReader._read_piece, threading.Lock(), 0, 0, 0

    def counted(reader, job):
        nonlocal num_read, most
        parts = read_piece(reader, job)
        with lock:
            num_read += job.num_bytes
            most = max(most, num_read - placed)
        return parts

    def progress(num_bytes, total):
        nonlocal placed
        with lock:
            placed = num_bytes
        assert 0 < num_bytes <= total

    monkeypatch.setattr(shards.ShardReader, "_read_piece", counted)
    read_params(tmp_path, config, progress=progress)
    assert num_read == placed > 8000, "all bytes are told of"
    assert most < 1500, "what is read ahead, the piece that is being placed, and one that is larger than that"


def test_a_piece_that_cannot_be_read_ends_the_loading(tmp_path, monkeypatch):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    read_piece, calls = shards.ShardReader._read_piece, iter(range(1000))

    def failing(reader, job):
        if next(calls) == 3:
            raise ValueError("model.safetensors ends at byte 7")
        return read_piece(reader, job)

    monkeypatch.setattr(shards.ShardReader, "_read_piece", failing)
    with pytest.raises(ValueError, match="ends at byte 7"):
        read_params(tmp_path, config)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


def test_shardings_of_another_model_are_refused(tmp_path):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda leaf: device, parameter_shapes(config))
    del shardings["head"]
    with pytest.raises(ValueError, match=r"differ in 1 paths, head\.kernel among them"):
        read_params(tmp_path, config, shardings)
