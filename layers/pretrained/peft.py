"""Adapters as folders that `peft` loads: adapter_config.json and adapter_model.safetensors, beside a base's folder.

A matrix of a file maps inputs, its second dim, to outputs. Its `lora_A.weight` is [rank, inputs], and its
`lora_B.weight` [outputs, rank]. Norms and embeddings that train are whole, as `modules_to_save`.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layers.config import GPTConfig
from layers.lora_config import LoRAConfig
from layers.pretrained.families import find_family
from layers.pretrained.family import Family
from layers.pretrained.folder import inside, read_config, read_json
from layers.pretrained.safetensors_file import SafetensorsFile
from layers.pretrained.save import check_new, take, whole_folder, write_file, write_json
from layers.pretrained.steps import Pattern, read_whole
from layers.pretrained.table import Source, find_sources, flat, grouped

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
# What a folder of ours says; another value computes something else.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def base_of(folder: Path) -> Path | None:
    """The base that a folder of adapters names; None: the folder holds no adapters.

    Raises:
      ValueError: the folder names none.
    """
    if not os.path.isfile(folder / ADAPTER_CONFIG_NAME):
        return None
    named = read_json(inside(folder, ADAPTER_CONFIG_NAME)).get("base_model_name_or_path")
    if not isinstance(named, str) or not (base := folder / Path(named).expanduser()).is_dir():
        raise ValueError(
            f"{folder / ADAPTER_CONFIG_NAME} has base_model_name_or_path={named!r:.200}; expected a folder on this "
            "machine; download the base, and write its path there"
        )
    return base


def model_folder(folder: Path) -> Path:
    """The folder of a model's weights: the base, if a folder holds adapters, or the folder itself."""
    return base_of(folder) or folder


def write_peft(
    directory: str | os.PathLike[str],
    config: GPTConfig,
    lora: LoRAConfig,
    trained: Any,
    *,
    base: str | os.PathLike[str],
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads on top of its base.

    Args:
      directory: the folder to make.
      config: of the model.
      lora: which matrices have adapters.
      trained: the parameters that train, a nested dict of arrays by the model's names.
      base: the Hugging Face folder that the adapters belong to. Its family names the tensors.

    Raises:
      ValueError: the folder exists, or `peft` has no such adapters: several of our matrices are one of the family's, or
        the embedding trains and is the head, too.
    """
    target, family = Path(directory), find_family(read_config(base)["model_type"], str(base))
    check_new(target)
    if lora.embeddings and config.tie_embeddings:
        raise ValueError(
            "the embedding trains and is the head, too, and peft would train a copy for one of them; export the merged "
            "model instead"
        )
    arrays = flat(trained)
    entries = list(_entries(family, config, lora))
    written = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({entry.module for entry in entries if entry.is_adapter}),
        "modules_to_save": sorted({entry.module for entry in entries if not entry.is_adapter}),
    }
    with whole_folder(target) as parts:
        write_json(parts / ADAPTER_CONFIG_NAME, written)
        tensors = {entry.tensor: _Written(entry, entry.into_file(arrays[entry.path])) for entry in entries}
        write_file(parts / ADAPTER_WEIGHTS_NAME, tensors, {})


def read_peft(folder: str | os.PathLike[str], config: GPTConfig, lora: LoRAConfig) -> dict[str, Any]:
    """Reads the parameters that train from a folder of adapters.

    Args:
      folder: as `write_peft` or `peft` makes it.
      config: of the model.
      lora: as the folder has it, or it is refused.

    Returns:
      A nested dict of NumPy arrays. Norms and embeddings are there only if the folder has them.

    Raises:
      ValueError: the folder is damaged, or holds other adapters than `lora` says.
    """
    path = inside(folder, ADAPTER_CONFIG_NAME)
    values = read_json(path)
    wanted = {**_PLAIN, "r": lora.rank, "lora_alpha": lora.alpha}
    for name, value in wanted.items():
        if (found := values.get(name, _PLAIN.get(name))) != value and found not in (None, {}):
            remedy = {"r": "set lora.rank to that", "lora_alpha": "set lora.alpha to that"}.get(name, "it isn't known")
            raise ValueError(f"{path} has {name}={found!r:.200}; expected {value!r}; {remedy}")
    base = base_of(Path(folder))
    assert base is not None, "there is an adapter_config.json"
    family = find_family(read_config(base)["model_type"], str(base))
    with SafetensorsFile(inside(folder, ADAPTER_WEIGHTS_NAME)) as file:
        entries = list(_entries(family, config, lora))
        missing = [entry.tensor for entry in entries if entry.is_adapter and entry.tensor not in file.tensors]
        if unknown := sorted(file.tensors.keys() - {entry.tensor for entry in entries}):
            raise ValueError(f"{file.path} has tensors that lora.targets leaves out: {grouped(unknown)}; name them")
        if missing:
            raise ValueError(f"{file.path} lacks tensors that lora.targets names: {grouped(missing)}; leave them out")
        parts: dict[str, list[np.ndarray]] = {}
        for entry in entries:
            if entry.tensor in file.tensors:
                array = read_whole(file.tensors[entry.tensor]).astype(np.float32)
                parts.setdefault(entry.path, []).append(entry.from_file(array, os.fspath(file.path)))
    shapes = _shapes(config, lora)
    return _nested({path: np.stack(each).reshape(shapes[path]) for path, each in parts.items()})


class _Entry(NamedTuple):
    """A tensor of a folder of adapters."""

    path: str
    """Of the parameter."""
    position: tuple[int, ...]
    """In the parameter's stacked dims."""
    shape: tuple[int, ...]
    """The parameter's, stacked dims left out."""
    source: Source
    """Of the base's tensor."""

    @property
    def is_adapter(self) -> bool:
        """False: the tensor is one of the base's, whole."""
        return ".lora." in self.path

    @property
    def tensor(self) -> str:
        """The tensor's name in the file."""
        name = _PREFIX + self.source.tensor_name(self.position)
        if not self.is_adapter:
            return name
        return f"{name.removesuffix('.weight')}.lora_{self.path[-1].upper()}.weight"

    @property
    def module(self) -> str:
        """The end of the name of the base's module, the same in all layers."""
        name = self.source.row.theirs.partition("{layer}.")
        return (name[2] or name[0]).format(expert=self.position[-1] if self.position else 0).removesuffix(".weight")

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        """The tensor's shape."""
        if not self.is_adapter:
            return self.source.row.shape_in_file(self.source.shapes)
        if self.path.endswith(".a"):
            return self.shape[-1], math.prod(self.shape[:-1])
        return math.prod(self.shape[1:]), self.shape[0]

    def into_file(self, array: Any) -> np.ndarray:
        """The tensor, of the whole parameter."""
        part = take(array, self.position)
        if not self.is_adapter:
            return self.source.row.into_file([part])
        return part.reshape(self.shape_in_file[::-1]).T

    def from_file(self, tensor: np.ndarray, file: str) -> np.ndarray:
        """The parameter's part at the position; ValueError if the tensor has another shape."""
        if tensor.shape != self.shape_in_file:
            raise ValueError(f"{file} has {self.tensor} of shape {tensor.shape}; expected {self.shape_in_file}")
        if self.is_adapter:
            return tensor.T.reshape(self.shape)
        pattern = Pattern(self.source.row.pattern)
        sizes = dict(zip(pattern.names, self.shape, strict=True))
        in_file = tensor.reshape([sizes[name] for group in pattern.groups for name in group])
        return in_file.transpose(pattern.order)


def _entries(family: Family, config: GPTConfig, lora: LoRAConfig) -> Iterator[_Entry]:
    """The tensors of all parameters that train, in the order of their positions."""
    shapes = _shapes(config, lora)
    sources = find_sources(family, config, {path: each for path, each in shapes.items() if ".lora." not in path})
    for path, shape in shapes.items():
        if not lora.trains(path):
            continue
        kernel, is_adapter, _ = path.partition(".lora.")
        source = sources[f"{kernel}.kernel" if is_adapter else path]
        pattern = Pattern(source.row.pattern)
        outputs_first = not is_adapter or pattern.groups[-1] == pattern.names[: len(pattern.groups[-1])]
        if len(source.paths) > 1 or not outputs_first:
            raise ValueError(
                f"{family.model_type} keeps {', '.join(source.paths)} in a tensor to which peft would give another "
                "adapter; export the merged model instead"
            )
        for position in np.ndindex(*shape[: source.row.num_stacked]):
            yield _Entry(path, position, shape[source.row.num_stacked :], source)


class _Written(NamedTuple):
    """A tensor to write, made already."""

    entry: _Entry
    array: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes

    def make(self, arrays: Mapping[str, Any]) -> np.ndarray:
        return self.array


def _shapes(config: GPTConfig, lora: LoRAConfig) -> dict[str, tuple[int, ...]]:
    from layers.lora import adapted_shapes

    return {path: tuple(leaf.shape) for path, leaf in flat(adapted_shapes(config, lora)).items()}


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of dotted paths, whose stacks have numbers for keys."""
    tree: dict[Any, Any] = {}
    for path, array in arrays.items():
        *keys, last = path.split(".")
        inner = tree
        for key in keys:
            inner = inner.setdefault(int(key) if key.isdecimal() else key, {})
        inner[last] = array
    return tree
