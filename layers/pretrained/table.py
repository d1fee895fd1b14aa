"""A family's table, matched with a model's parameters and a folder's tensors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from layers.config import GPTConfig
from layers.pretrained.family import Family
from layers.pretrained.safetensors_file import Tensor, whole
from layers.pretrained.steps import TensorRow

Shape = tuple[int, ...]

_COMPARED_BYTES = 1 << 24
_MAX_KINDS = 100  # names of an error message; a family has fewer
_STACK = re.compile(r"^blocks\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """One parameter's row.

    Args:
      row: of the family's table.
      which: of the row's parameters.
      first_layer, layer_step: layer i of the parameter's stack is layer first_layer + i * layer_step of the model.
      shapes: of the row's parameters for one tensor, stacked dims left out.
      paths: of the row's parameters.
    """

    row: TensorRow
    which: int
    first_layer: int
    layer_step: int
    shapes: tuple[Shape, ...]
    paths: tuple[str, ...]

    def tensor_name(self, position: tuple[int, ...]) -> str:
        """The file's name of the tensor at a position of the stacked dims."""
        layer, expert = (*position, 0, 0)[:2]
        return self.row.theirs.format(layer=self.first_layer + layer * self.layer_step, expert=expert)


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: GPTConfig) -> Any:
    """The parameters of a GPT as `jax.ShapeDtypeStruct`s, a nested dict as `nnx.to_pure_dict` makes it.

    The same dict for the same config: it isn't to be changed.
    """
    from flax import nnx

    from layers.gpt import GPT

    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of a nested dict by their dotted paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def find_sources(family: Family, config: GPTConfig, shapes: Mapping[str, Shape]) -> dict[str, Source]:
    """The row of each parameter; ValueError if the family's table has none for one of them."""
    rows = {path: (row, which) for row in family.rows for which, path in enumerate(row.paths)}
    found, without = {}, []
    for path in shapes:
        stack = _STACK.match(path)
        general = _STACK.sub("blocks.*.", path)
        if general not in rows:
            without.append(path)
            continue
        row, which = rows[general]
        paths = tuple(name.replace("*", stack.group(1)) if stack else name for name in row.paths)
        if absent := [name for name in paths if name not in shapes]:
            raise ValueError(
                f"{family.model_type} keeps {', '.join(paths)} in one tensor; the model has no {absent[0]}"
            )
        rest = tuple(tuple(shapes[name][row.num_stacked :]) for name in paths)
        found[path] = Source(row, which, int(stack.group(1)) if stack else 0, config.pattern_length, rest, paths)
    if without:
        raise ValueError(f"{family.model_type} has no tensor for the model's {grouped(without)}")
    return found


def tensor_shapes(sources: Mapping[str, Source], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The names of all tensors that a model's folder has, and their shapes."""
    expected: dict[str, Shape] = {}
    for path, source in sources.items():
        shape = source.row.shape_in_file(source.shapes)
        for position in np.ndindex(*shapes[path][: source.row.num_stacked]):
            expected[source.tensor_name(position)] = shape
    return expected


def check_tensors(family: Family, expected: Mapping[str, Shape], tensors: Mapping[str, Tensor], path: str) -> None:
    """Checks that a folder has exactly the tensors that are expected, of the same shapes.

    Raises:
      ValueError: tensors are missing, unknown or misshapen; the message has them all.
    """
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected and not family.is_unused(name)]
    misshapen = [
        f"{name}{list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    integers = [name for name in expected if name in tensors and tensors[name].dtype == np.uint8]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {grouped(missing)}")
    if unknown:
        problems.append(f"{len(unknown)} unknown: {grouped(unknown)}")
    if misshapen:
        problems.append(f"{len(misshapen)} misshapen: {grouped(misshapen)}")
    if integers:
        problems.append(f"{len(integers)} of integers: {grouped(integers)}")
    if problems:
        raise ValueError(
            f"the tensors of {path} aren't those of this {family.model_type} model: {'; '.join(problems)}. "
            "If the config has changes on top of the folder's, take back those that change parameters"
        )


def without_copied_head(family: Family, config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors without a head that repeats the embedding, as some programs write it for models that tie them.

    Raises:
      ValueError: the model ties them, and they differ.
    """
    embedding, head = (
        next(row.theirs for row in family.rows if row.ours == path) for path in ("embedding.embedding", "head.kernel")
    )
    if not config.tie_embeddings or head not in tensors or embedding not in tensors:
        return dict(tensors)
    one, other = tensors[embedding], tensors[head]
    if one.shape != other.shape or not _same_bytes(one, other):
        raise ValueError(
            f"config.json ties the head to the embedding, but {head} isn't {embedding}; load the model with "
            "tie_embeddings=False, or remove that tensor"
        )
    return {name: tensor for name, tensor in tensors.items() if name != head}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    rows_at_once = max(1, _COMPARED_BYTES // max(1, math.prod(one.shape[1:]) * one.dtype.itemsize))
    for first in range(0, one.shape[0], rows_at_once):
        rows = slice(first, min(first + rows_at_once, one.shape[0]))
        index = (rows, *whole(one.shape[1:]))
        if one.read(index).tobytes() != other.read(index).tobytes():
            return False
    return True


def grouped(names: Iterable[str]) -> str:
    """Names for an error message: those that differ in numbers alone once.

    >>> grouped(["layers.0.norm", "layers.1.norm", "head"])
    'layers.0.norm (and 1 more like it), head'
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    described = [
        _printable(first) + (f" (and {len(more)} more like it)" if more else "")
        for first, *more in list(kinds.values())[:_MAX_KINDS]
    ]
    return ", ".join(described) + (f" and {len(kinds) - _MAX_KINDS:,} kinds more" if len(kinds) > _MAX_KINDS else "")


def _printable(name: str) -> str:
    # A file's names may hold what a terminal obeys.
    return f"{name if name.isprintable() else repr(name):.200}"
