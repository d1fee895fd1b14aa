"""Hugging Face folders into configs, parameters and models, without a conversion step."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from layers.config import GPTConfig
from layers.pretrained.families import find_family
from layers.pretrained.family import Family
from layers.pretrained.folder import CONFIG_NAME, open_tensors, read_config
from layers.pretrained.safetensors_file import Tensor
from layers.pretrained.shards import Parameter, Progress, ShardReader
from layers.pretrained.table import (
    Source,
    check_tensors,
    find_sources,
    flat,
    parameter_shapes,
    tensor_shapes,
    without_copied_head,
)

if TYPE_CHECKING:
    from layers.gpt import GPT


def config_from_huggingface(directory: str | os.PathLike[str]) -> GPTConfig:
    """The config of a Hugging Face folder's model, read from its config.json alone.

    Args:
      directory: the folder.

    Returns:
      The fields that the computation depends on. The others (dtypes, backends, rematerialisation) have
      `GPTConfig`'s defaults.

    Raises:
      ValueError: there is no such file, or it describes no model of the families that are known.

    Example:
      >>> from pathlib import Path
      >>> sizes = '"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128'
      >>> text = f'{{"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 4, {sizes}}}'
      >>> num_characters = Path("config.json").write_text(text)
      >>> config_from_huggingface(".").attention_bias
      True
    """
    family, values, path = _read_family(directory)
    return family.read_config(values, path)


def read_params(
    directory: str | os.PathLike[str],
    config: GPTConfig,
    shardings: Any = None,
    *,
    dtype: jnp.dtype | str | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads a Hugging Face folder's weights, each slice straight into its shard.

    Every process reads the shards of its own devices, and bytes that several of them share only once. The host holds a
    few hundred megabytes of tensors at any time.

    Args:
      directory: the folder.
      config: of the model: the folder's own, with changes that leave parameters as they are.
      shardings: a nested dict of shardings, like the parameters'; None: everything on the first device.
      dtype: of the parameters, one or a nested dict of one for each; None: `config.param_dtype`.
      progress: called after each chunk with the bytes that this process has read so far, and the total that it needs.

    Returns:
      The parameters, a nested dict as `nnx.to_pure_dict` makes it.

    Raises:
      ValueError: the folder is damaged, or its tensors aren't the model's; the message has all their names.
    """
    family, _, _ = _read_family(directory)
    tree = parameter_shapes(config)
    shapes = {path: leaf.shape for path, leaf in flat(tree).items()}
    dtype = config.param_dtype if dtype is None else dtype
    dtypes = flat(dtype) if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
    placement = _placement(shapes, shardings)
    with open_tensors(directory) as found:
        tensors: dict[str, Tensor] = dict(found)
        if family.adapt is not None:
            tensors = family.adapt(tensors)
        tensors = without_copied_head(family, config, tensors)
        sources = find_sources(family, config, shapes)
        check_tensors(family, tensor_shapes(sources, shapes), tensors, os.fspath(directory))
        parameters = [
            Parameter(
                source,
                shapes[path],
                placement[path],
                _stored_dtype(source, shapes[path], tensors),
                jnp.dtype(dtypes[path]),
            )
            for path, source in sources.items()
        ]
        arrays = ShardReader(tensors, progress).read(parameters)
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


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


def _read_family(directory: str | os.PathLike[str]) -> tuple[Family, dict[str, Any], str]:
    """The family of a folder's model, the values of its config.json, and where they come from."""
    values, path = read_config(directory), str(os.path.join(directory, CONFIG_NAME))
    try:
        return find_family(values.get("model_type"), path), values, path
    except ValueError as error:
        if "auto_map" not in values:
            raise
        raise ValueError(f"{error}; code of the folder's own, which its auto_map names, is never run") from None


def _stored_dtype(source: Source, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> np.dtype:
    names = map(source.tensor_name, np.ndindex(*shape[: source.row.num_stacked]))
    dtypes = {tensors[name].dtype for name in names}
    # Two different 16-bit types don't hold each other's values; float32 holds both.
    return dtypes.pop() if len(dtypes) == 1 else max(*dtypes, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)


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


def _spread(mesh: Mesh, leaf: jax.ShapeDtypeStruct) -> Sharding:
    """Split over all devices along the longest dim that their number divides; where none is, whole on each."""
    dims = [dim for dim, size in enumerate(leaf.shape) if size % mesh.size == 0]
    spec: list[Any] = [None] * len(leaf.shape)
    if dims:
        spec[max(dims, key=lambda dim: leaf.shape[dim])] = mesh.axis_names
    return NamedSharding(mesh, PartitionSpec(*spec))
