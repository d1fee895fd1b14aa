"""A pretrained model's parameters in shards; tests/round_trips holds those of eight devices to every bit."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layers.pretrained import config_from_huggingface, read_params, shards
from layers.pretrained.safetensors_file import DTYPES, SafetensorsFile
from layers.pretrained.table import parameter_shapes
from tests.layers.pretrained.golden import unpack
from tests.layers.pretrained.samples import entry, file_bytes


@pytest.mark.parametrize("chunk_bytes", [1, 3000])
@pytest.mark.parametrize(("case", "dtype"), [("gemma2", "bfloat16"), ("qwen3_moe", "float32")])
def test_a_shard_that_grows_on_its_device_has_the_same_bits(case, dtype, chunk_bytes, tmp_path, monkeypatch):
    unpack(case, tmp_path)
    config = config_from_huggingface(tmp_path)
    expected = read_params(tmp_path, config, dtype=dtype)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", chunk_bytes)
    params = read_params(tmp_path, config, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}


def write_random(folder, rng, dtype_of):
    """A Llama of random tensors, each of the dtype that belongs to its name."""
    unpack("llama", folder)
    path = next(folder.glob("*.safetensors"))
    with SafetensorsFile(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    arrays = {name: rng.standard_normal(shape).astype(dtype_of(name)) for name, shape in shapes.items()}
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, data = {}, b""
    for name, array in arrays.items():
        stop = len(data) + array.nbytes
        header[name] = entry(len(data), stop, dtype=names[array.dtype], shape=array.shape)
        data += array.tobytes()
    path.write_bytes(file_bytes(header, data))
    return arrays


@pytest.mark.parametrize("others", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_layers_of_different_dtypes_keep_their_bits(others, held, chunk_bytes, tmp_path, monkeypatch, rng):
    arrays = write_random(tmp_path, rng, lambda name: jnp.dtype(others if "layers.1." in name else "bfloat16"))
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", chunk_bytes)
    params = read_params(tmp_path, config_from_huggingface(tmp_path), dtype=held)
    found = np.asarray(params["blocks"][0]["mlp"]["down"]["kernel"])
    for layer in range(2):
        array = arrays[f"model.layers.{layer}.mlp.down_proj.weight"].T
        np.testing.assert_array_equal(found[layer], array.astype(jnp.dtype(held)))


@pytest.mark.parametrize("small_bytes", [0, 1 << 24])
def test_shards_go_into_the_memory_that_they_belong_into(small_bytes, tmp_path, monkeypatch):
    unpack("llama", tmp_path)
    config, device = config_from_huggingface(tmp_path), jax.devices()[0]
    expected = read_params(tmp_path, config)
    monkeypatch.setattr(shards, "_SMALL_BYTES", small_bytes)
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    params = read_params(tmp_path, config, jax.tree.map(lambda leaf: host, parameter_shapes(config)))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params)} == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("stored", "held"), [(np.float64, "float32"), (np.float64, "bfloat16"), (np.float32, "float16")]
)
def test_what_is_stored_wider_is_rounded_before_it_travels(stored, held, tmp_path, monkeypatch, rng):
    arrays = write_random(tmp_path, rng, lambda name: stored)
    config = config_from_huggingface(tmp_path)
    expected = read_params(tmp_path, config, dtype=held)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    read_chunk, travelling = shards.ShardReader._read_chunk, set()

    def recorded(reader, job):
        parts = read_chunk(reader, job)
        travelling.update(part.dtype.name for part in parts)
        return parts

    monkeypatch.setattr(shards.ShardReader, "_read_chunk", recorded)
    params = read_params(tmp_path, config, dtype=held)
    assert travelling == {held}
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    embedding = arrays["model.embed_tokens.weight"]
    np.testing.assert_array_equal(params["embedding"]["embedding"], embedding.astype(jnp.dtype(held)))


def test_programs_are_compiled_once(tmp_path, monkeypatch):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    read_params(tmp_path, config)
    num_compiled = shards._compile.cache_info().misses
    read_params(tmp_path, config)
    assert shards._compile.cache_info().misses == num_compiled > 0


def test_the_host_holds_few_bytes_that_are_not_on_their_way(tmp_path, monkeypatch):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    monkeypatch.setattr(shards, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(shards, "_BYTES_AHEAD", 500)
    read_chunk, lock, num_read, placed, most = shards.ShardReader._read_chunk, threading.Lock(), 0, 0, 0

    def counted(reader, job):
        nonlocal num_read, most
        parts = read_chunk(reader, job)
        with lock:
            num_read += job.num_bytes
            most = max(most, num_read - placed)
        return parts

    def progress(num_bytes, total):
        nonlocal placed
        with lock:
            placed = num_bytes
        assert 0 < num_bytes <= total

    monkeypatch.setattr(shards.ShardReader, "_read_chunk", counted)
    read_params(tmp_path, config, progress=progress)
    assert num_read == placed > 8000, "all bytes are reported"
    assert most < 1500, "what is read ahead, the chunk that is being placed, and one that is larger than that"


def test_a_chunk_that_cannot_be_read_ends_the_loading(tmp_path, monkeypatch):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    monkeypatch.setattr(shards, "_SMALL_BYTES", 0)
    read_chunk, calls = shards.ShardReader._read_chunk, iter(range(1000))

    def failing(reader, job):
        if next(calls) == 3:
            raise ValueError("model.safetensors ends at byte 7")
        return read_chunk(reader, job)

    monkeypatch.setattr(shards.ShardReader, "_read_chunk", failing)
    with pytest.raises(ValueError, match="ends at byte 7"):
        read_params(tmp_path, config)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_params")]


def test_shardings_of_another_model_are_refused(tmp_path):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda leaf: device, parameter_shapes(config))
    del shardings["head"]
    with pytest.raises(ValueError, match=r"differ in 1 paths, head\.kernel among them"):
        read_params(tmp_path, config, shardings)
