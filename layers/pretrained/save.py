"""A GPT's parameters into a folder that transformers loads."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from layers.config import GPTConfig
from layers.pretrained.families import MODULES, find_family
from layers.pretrained.family import Family, Inexpressible
from layers.pretrained.folder import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME, inside, read_json
from layers.pretrained.safetensors_file import DTYPES, Tensor, whole
from layers.pretrained.table import Source, find_sources, flat, parameter_shapes

TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files of a tokenizer, as far as a folder has them."""

GENERATION_NAME = "generation_config.json"

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRITTEN_DTYPES = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
_SCALED = ("llama3", "yarn")  # to a length that config.json has
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def family_of(config: GPTConfig, model_type: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family that a model is saved as.

    Args:
      config: of the model.
      model_type: transformers' name of the family; None: the first that can express the model.

    Returns:
      The family and its config.json.

    Raises:
      ValueError: no family, or not this one, can express the model; the message lists the settings
        that the two nearest, or this one, have with other values.
    """
    if model_type is not None:
        family = find_family(model_type, "the argument model_type")
        return family, _express(family, config)
    known = [find_family(name, "families") for name in MODULES]
    refused: list[Inexpressible] = []
    for family in known:
        if family.section is None and family.has_experts == (config.moe is not None):
            try:
                return family, _express(family, config)
            except Inexpressible as reason:
                refused.append(reason)
    nearest = sorted(refused, key=lambda reason: len(reason.differences))[:2]
    raise ValueError(
        "no family of transformers that is known here computes what this model does; the nearest:\n  "
        + "\n  ".join(map(str, nearest))
    )


def _express(family: Family, config: GPTConfig) -> dict[str, Any]:
    written = family.write_config(config)
    try:
        find_sources(family, config, _shapes_of(config))
    except ValueError as error:
        raise Inexpressible(family.model_type, [str(error)]) from None
    return written


def write_huggingface(
    directory: str | os.PathLike[str],
    config: GPTConfig,
    params: Any,
    *,
    dtype: jnp.dtype | str | None = None,
    shard_size: float = 5e9,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    model_type: str | None = None,
    context_length: int | None = None,
) -> None:
    """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    It is written under a temporary name beside `directory`, and renamed when it is complete. The host holds one tensor
    at a time.

    Args:
      directory: the folder to make.
      config: of the model.
      params: its parameters, a nested dict as `nnx.to_pure_dict` makes it, of arrays that this process can read whole,
        or of `Tensor`s, which are read a layer at a time.
      dtype: of the tensors; None: each parameter's own.
      shard_size: bytes of a file at most, unless one tensor has more.
      tokenizer_dir: a folder whose tokenizer, and generation config if none is given, are copied.
      generation_config: defaults of transformers' `generate`.
      model_type: the family to save it as, by transformers' name; None: the first that can express the model.
      context_length: tokens that the model was trained on at most, for those who ask config.json; None: left out,
        unless the rotary embedding is scaled. Where it is, config.json has at least what llama3 scales it to, and
        just what yarn and longrope do: some versions of transformers compute the embedding from that.

    Raises:
      ValueError: the folder exists, no family can express the model, or the parameters aren't the config's.

    Example:
      >>> from flax import nnx
      >>> from layers import GPT
      >>> sizes = dict(vocab_size=256, num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128)
      >>> model = GPT(GPTConfig(**sizes, mlp="swiglu"), rngs=nnx.Rngs(0))
      >>> write_huggingface("tiny-llama", model.config, nnx.to_pure_dict(nnx.state(model)), dtype="bfloat16")
      >>> sorted(os.listdir("tiny-llama"))
      ['config.json', 'model.safetensors']
    """
    target = Path(directory)
    check_new(target)
    family, written = family_of(config, model_type)
    arrays = flat(params)
    shapes = _shapes_of(config)
    if wrong := sorted(path for path in shapes.keys() | arrays.keys() if shapes.get(path) != _shape(arrays.get(path))):
        raise ValueError(f"the parameters aren't those of the config; {wrong[0]}, for example, is misshapen or missing")
    if tokenizer_dir is not None and generation_config is None and (Path(tokenizer_dir) / GENERATION_NAME).exists():
        generation_config = read_json(inside(tokenizer_dir, GENERATION_NAME))
    dtypes = {path: jnp.dtype(leaf.dtype if dtype is None else dtype) for path, leaf in arrays.items()}
    if unwritten := sorted({str(each) for each in dtypes.values() if each not in _WRITTEN_DTYPES}):
        raise ValueError(
            f"tensors are written in {', '.join(map(str, _WRITTEN_DTYPES))}, not {', '.join(unwritten)}; give a dtype"
        )
    written = _more_keys(config, dtypes, generation_config, context_length) | written
    tensors = _written_tensors(find_sources(family, config, shapes), arrays, dtypes)
    with whole_folder(target) as parts:
        write_json(parts / CONFIG_NAME, written)
        if generation_config is not None:
            write_json(parts / GENERATION_NAME, dict(generation_config))
        if tokenizer_dir is not None:
            for name in TOKENIZER_NAMES:
                if (Path(tokenizer_dir) / name).exists():
                    shutil.copyfile(inside(tokenizer_dir, name), parts / name)
        _write_tensors(parts, tensors, arrays, shard_size)


def check_new(target: Path) -> None:
    """Raises ValueError if a folder exists already, or can't be made."""
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists already; name a folder that is to be made, or remove that one")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent} is not a folder; make it, or choose another folder")


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written; after an error, nothing is left of it."""
    parts = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    os.mkdir(parts)  # with the permissions that the umask leaves; a temporary folder would be its owner's alone
    try:
        yield parts
        os.rename(parts, target)
    except BaseException:
        shutil.rmtree(parts, ignore_errors=True)
        raise


def _more_keys(
    config: GPTConfig,
    dtypes: Mapping[str, np.dtype],
    generation_config: Mapping[str, Any] | None,
    context_length: int | None,
) -> dict[str, Any]:
    widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
    keys: dict[str, Any] = {"torch_dtype": widest.name}
    keys |= {name: (generation_config or {}).get(name) for name in _SPECIAL_TOKENS}
    scalings = {layer.rope_scaling for layer in config.layer_counts}
    scaled = {each.kind: round(each.original_context_length * each.factor) for each in scalings if each.kind in _SCALED}
    if "yarn" in scaled:
        return keys | {"max_position_embeddings": scaled["yarn"]}
    lengths = [*scaled.values(), *([] if context_length is None else [context_length])]
    return keys | {"max_position_embeddings": max(lengths)} if lengths else keys


class _WrittenTensor(NamedTuple):
    """A tensor to write: the parameters that it is made of, and its position in their stacked dims."""

    source: Source
    position: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, arrays: Mapping[str, Any]) -> np.ndarray:
        """The tensor."""
        parts = [take(arrays[path], self.position) for path in self.source.paths]
        return self.source.row.into_file([part.astype(self.dtype, copy=False) for part in parts])


def _written_tensors(
    sources: Mapping[str, Source], arrays: Mapping[str, Any], dtypes: Mapping[str, np.dtype]
) -> dict[str, _WrittenTensor]:
    tensors = {}
    for path, source in sources.items():
        if source.which == 0:
            shape, stacked = source.row.shape_in_file(source.shapes), arrays[path].shape[: source.row.num_stacked]
            for position in np.ndindex(*stacked):
                tensors[source.tensor_name(position)] = _WrittenTensor(source, position, shape, dtypes[path])
    return tensors


def _write_tensors(
    folder: Path, tensors: Mapping[str, _WrittenTensor], arrays: Mapping[str, Any], shard_size: float
) -> None:
    files: list[dict[str, _WrittenTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.num_bytes > shard_size:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.num_bytes
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    names = [WEIGHTS_NAME] if len(files) == 1 else names
    for file_name, contents in zip(names, files, strict=True):
        write_file(folder / file_name, contents, arrays)
    if len(files) > 1:
        weight_map = {name: file_name for file_name, contents in zip(names, files, strict=True) for name in contents}
        total_size = sum(tensor.num_bytes for tensor in tensors.values())
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


class WritableTensor(Protocol):
    """A tensor of a safetensors file to write."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def make(self, arrays: Mapping[str, Any]) -> np.ndarray: ...


def write_file(path: Path, contents: Mapping[str, WritableTensor], arrays: Mapping[str, Any]) -> None:
    """Writes a safetensors file, a tensor at a time.

    Args:
      path: of the file, which must not exist.
      contents: the tensors by their names.
      arrays: that they are made of.
    """
    with open(path, "xb") as file:
        file.write(_header(contents))
        for tensor in contents.values():
            file.write(np.ascontiguousarray(tensor.make(arrays)).reshape(-1).view(np.uint8).data)
        _sync(file)


def _header(contents: Mapping[str, WritableTensor]) -> bytes:
    # transformers asks for the format; readers want the data to begin at a multiple of 8.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in contents.items():
        offsets = [offset, offset := offset + tensor.num_bytes]
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def take(array: Any, position: tuple[int, ...]) -> np.ndarray:
    """An array at a position of its leading dims."""
    if isinstance(array, Tensor):
        rest = tuple(array.shape[len(position) :])
        return array.read((*(slice(index, index + 1) for index in position), *whole(rest))).reshape(rest)
    if isinstance(array, np.ndarray) or [device.platform for device in array.devices()] == ["cpu"]:
        return np.asarray(array)[position]  # a view
    # Traced, so that one program serves all layers.
    return np.asarray(_take_traced(array, np.array(position, np.int32)) if position else array)


@jax.jit
def _take_traced(array: jax.Array, position: jax.Array) -> jax.Array:
    return array[tuple(position)]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a new file of JSON."""
    with open(path, "xb") as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _shapes_of(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in flat(parameter_shapes(config)).items()}


def _shape(array: Any) -> tuple[int, ...] | None:
    return None if array is None else tuple(array.shape)
