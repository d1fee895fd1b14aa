"""Hugging Face folders into configs, parameters and models, without a conversion step."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from layers.config import GPTConfig
from layers.pretrained.families import find_family
from layers.pretrained.folder import CONFIG_NAME, open_tensors, read_config
from layers.pretrained.safetensors_file import Index, Tensor
from layers.pretrained.table import (
    Source,
    check_tensors,
    find_sources,
    flat,
    parameter_shapes,
    positions,
    tensor_shapes,
    without_copied_head,
)

if TYPE_CHECKING:
    from layers.gpt import GPT

Progress = Callable[[int, int], None]
Bounds = tuple[tuple[int, int], ...]
"""A shard's start and stop in each dim; Python 3.11 can't hash slices."""

# Bytes of a shard that are on the host at a time, if one tensor's part of it isn't larger.
_CHUNK_BYTES = 1 << 27
# A shard of fewer bytes is made on the host, which spares compiling.
_SMALL_BYTES = 1 << 24


def config_from_huggingface(directory: str | os.PathLike[str]) -> GPTConfig:
    """The config of a Hugging Face folder's model, read from its config.json alone.

    Args:
      directory: the folder.

    Returns:
      What the model computes. How it runs (dtypes, backends, rematerialisation) has `GPTConfig`'s defaults.

    Raises:
      ValueError: there is no such file, or it describes no model of the families that are known.

    Example:
      >>> from pathlib import Path
      >>> sizes = '"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128'
      >>> text = f'{{"model_type": "qwen2", "num_attention_heads": 4, {sizes}}}'
      >>> num_characters = Path("config.json").write_text(text)
      >>> config_from_huggingface(".").attention_bias
      True
    """
    values, place = read_config(directory), str(os.path.join(directory, CONFIG_NAME))
    return find_family(values.get("model_type"), place).read_config(values, place)


def read_params(
    directory: str | os.PathLike[str],
    config: GPTConfig,
    shardings: Any = None,
    *,
    dtype: jnp.dtype | str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads a Hugging Face folder's weights, each slice straight into its shard.

    Every process reads what its own devices hold. At any time the host holds a few hundred megabytes of what is on its
    way, or one tensor if that is larger.

    Args:
      directory: the folder.
      config: of the model: the folder's own, with changes that leave parameters as they are.
      shardings: a nested dict of shardings, like the parameters'; None: everything on the first device.
      dtype: of the parameters; None: `config.param_dtype`.
      progress: told after each piece how many of the folder's bytes that this process needs have been read, and how
        many there are.

    Returns:
      The parameters, a nested dict as `nnx.to_pure_dict` makes it.

    Raises:
      ValueError: the folder is damaged, or its tensors aren't the model's; the message has all their names.
    """
    values, place = read_config(directory), str(os.path.join(directory, CONFIG_NAME))
    family = find_family(values.get("model_type"), place)
    tree = parameter_shapes(config)
    shapes = {path: leaf.shape for path, leaf in flat(tree).items()}
    dtype = jnp.dtype(config.param_dtype if dtype is None else dtype)
    placement = _placement(shapes, shardings)
    with open_tensors(directory) as found:
        tensors: dict[str, Tensor] = dict(found)
        if family.adapt is not None:
            tensors = family.adapt(tensors)
        tensors = without_copied_head(family, config, tensors)
        sources = find_sources(family, config, shapes)
        check_tensors(family, tensor_shapes(sources, shapes), tensors, os.fspath(directory))
        reader = _ShardReader(tensors, dtype, progress)
        reader.plan(sources, shapes, placement)
        arrays = {path: reader.read(sources[path], shape, placement[path]) for path, shape in shapes.items()}
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[path] for path in flat(tree)])


def load_gpt(directory: str | os.PathLike[str], *, mesh: Mesh | None = None, **changes: Any) -> GPT:
    """A pretrained model, ready to call.

    Args:
      directory: a Hugging Face folder.
      mesh: devices to spread it over, a mesh as `ActivationSharding` takes it; None: the first device.
      **changes: fields of `GPTConfig` to set, such as `compute_dtype`.

    Raises:
      ValueError: as `config_from_huggingface`, `read_params` and `ActivationSharding`.

    Example:
      >>> from flax import nnx
      >>> from layers import GPT
      >>> from layers.pretrained import write_huggingface
      >>> sizes = dict(vocab_size=256, num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128)
      >>> model = GPT(GPTConfig(**sizes, mlp="swiglu"), rngs=nnx.Rngs(0))
      >>> write_huggingface("tiny-llama", model.config, nnx.to_pure_dict(nnx.state(model)))
      >>> model = load_gpt("tiny-llama", param_dtype="bfloat16")
      >>> model.logits(model(jnp.zeros((1, 16), jnp.int32))).shape
      (1, 16, 256)
    """
    from flax import nnx

    from layers.activation_sharding import ActivationSharding
    from layers.gpt import GPT

    config = dataclasses.replace(config_from_huggingface(directory), **changes)
    sharding = None if mesh is None else ActivationSharding(mesh)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0), activation_sharding=sharding))
    shardings = None if mesh is None else jax.tree.map(functools.partial(_spread, mesh), parameter_shapes(config))
    params = read_params(directory, config, shardings)
    graphdef, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


class _ShardReader:
    """Makes arrays of tensors, and counts what it has read.

    Args:
      tensors: the folder's.
      dtype: of the arrays.
      progress: as in `read_params`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: jnp.dtype, progress: Progress | None):
        self.tensors = tensors
        self.dtype = dtype
        self.progress = progress
        self.num_read = 0
        self.num_bytes = 0

    def plan(
        self,
        sources: Mapping[str, Source],
        shapes: Mapping[str, tuple[int, ...]],
        placement: Mapping[str, Sharding],
    ) -> None:
        """Adds up the bytes that are going to be read."""
        for path, shape in shapes.items():
            itemsize = self._stored_dtype(sources[path]).itemsize
            for bounds in _devices_of(placement[path], shape):
                self.num_bytes += itemsize * math.prod(stop - start for start, stop in bounds)

    def read(self, source: Source, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
        """One parameter: each distinct shard is read once, and put on all devices that hold it."""
        shards: dict[jax.Device, jax.Array] = {}
        for bounds, devices in _devices_of(sharding, shape).items():
            index = tuple(slice(start, stop) for start, stop in bounds)
            targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
            shards |= dict(zip(devices, self._read_shard(source, index, targets), strict=True))
        arrays = [shards[device] for device in sharding.addressable_devices_indices_map(shape)]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _read_shard(self, source: Source, index: Index, targets: Sequence[Sharding]) -> list[jax.Array]:
        num_stacked = source.row.num_stacked
        stacked, rest = index[:num_stacked], index[num_stacked:]
        sizes = [part.stop - part.start for part in index]
        block_bytes = self._stored_dtype(source).itemsize * math.prod(sizes[num_stacked:])
        names = [source.tensor_name(position) for position in positions(stacked)]
        order = (0, *(1 + dim for dim in source.row.order))
        if len(names) * block_bytes <= _SMALL_BYTES:
            blocks = self._read_blocks(source, names, rest).transpose(order).reshape(sizes)
            return [jax.device_put(blocks.astype(self.dtype, copy=False), target) for target in targets]
        # The shard grows on its device, so that the host holds a few layers at a time. It is transposed there, too:
        # NumPy would take longer for that than for reading.
        shards = [_zeros(tuple(sizes), self.dtype, target) for target in targets]
        blocks_at_once = max(1, _CHUNK_BYTES // max(block_bytes, 1))
        for first in range(0, len(names), blocks_at_once):
            blocks = self._read_blocks(source, names[first : first + blocks_at_once], rest)
            if blocks.dtype.itemsize > self.dtype.itemsize:
                blocks = blocks.astype(self.dtype)
            # While these were being read, those before them went to the devices.
            jax.block_until_ready(shards)
            shards = [
                _write(shard, jax.device_put(blocks, target), first, order)
                for shard, target in zip(shards, targets, strict=True)
            ]
        return shards

    def _read_blocks(self, source: Source, names: Sequence[str], rest: Index) -> np.ndarray:
        blocks = []
        for name in names:
            blocks.append(source.row.read(self.tensors[name], source.which, source.shapes, rest))
            self.num_read += blocks[-1].nbytes
            if self.progress is not None:
                self.progress(self.num_read, self.num_bytes)
        return blocks[0][None] if len(blocks) == 1 else np.stack(blocks)

    def _stored_dtype(self, source: Source) -> np.dtype:
        return self.tensors[source.tensor_name(())].dtype


def _placement(shapes: Mapping[str, tuple[int, ...]], shardings: Any) -> dict[str, Sharding]:
    if shardings is None:
        return dict.fromkeys(shapes, SingleDeviceSharding(jax.local_devices()[0]))
    placement = flat(shardings)
    if placement.keys() != shapes.keys():
        differing = sorted(placement.keys() ^ shapes.keys())
        raise ValueError(
            f"shardings and parameters differ in {len(differing)} paths, {differing[0]} among them; "
            "give one sharding for each parameter"
        )
    return placement


def _devices_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[jax.Device]]:
    """The distinct shards that this process holds, and the devices that hold each."""
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = (part.indices(size) for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(tuple((start, stop) for start, stop, _ in bounds), []).append(device)
    return devices


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, target: Sharding) -> jax.Array:
    return jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=target)()


@functools.partial(jax.jit, donate_argnums=0, static_argnames="order")
def _write(shard: jax.Array, blocks: jax.Array, first: jax.Array | int, order: tuple[int, ...]) -> jax.Array:
    blocks = blocks.transpose(order).astype(shard.dtype)
    stack = shard.reshape(-1, *blocks.shape[1:])
    return jax.lax.dynamic_update_slice_in_dim(stack, blocks, first, axis=0).reshape(shard.shape)


def _spread(mesh: Mesh, leaf: jax.ShapeDtypeStruct) -> Sharding:
    """Split over all devices along the longest dim that their number divides; where none is, whole on each."""
    dims = [dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0]
    spec: list[Any] = [None] * len(leaf.shape)
    if dims:
        spec[max(dims, key=lambda dim: leaf.shape[dim])] = mesh.axis_names
    return NamedSharding(mesh, PartitionSpec(*spec))
