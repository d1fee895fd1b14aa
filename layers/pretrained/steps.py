"""The invertible steps between a file's tensors and a GPT's parameters, each of them able to give just a slice.

Every step is a view: a tensor made of another one. Reading a slice of a view reads the slice of the file that it comes
from. Nothing is computed, so that all bits survive, and the way back is the same step inverted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from layers.pretrained.safetensors_file import Index, Tensor, whole

Join = Literal["concatenated", "interleaved"]


@dataclass(frozen=True)
class Pattern:
    """How the dims of a file's tensor become those of a parameter, by their names.

    Dims in parentheses are merged into one. "(N H) W -> W N H" takes a matrix whose rows are N heads of H features
    apart, and puts its columns first.

    Example:
      >>> pattern = Pattern("(N H) W -> W N H")
      >>> pattern.shape_in_file((64, 4, 16))
      (64, 64)
      >>> pattern.into_file(np.zeros((64, 4, 8))).shape
      (32, 64)
    """

    text: str

    @functools.cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """For each dim of the file's tensor, the dims that are merged into it."""
        dims: list[tuple[str, ...]] = []
        for position, part in enumerate(self.text.split("->")[0].replace("(", ")").split(")")):
            dims += [tuple(part.split())] if position % 2 else [(name,) for name in part.split()]
        return tuple(dims)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The parameter's dims."""
        return tuple(self.text.split("->")[1].split())

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """For each dim of the parameter, its index among the unmerged dims of the file's tensor."""
        in_file = [name for group in self.groups for name in group]
        return tuple(in_file.index(name) for name in self.names)

    def shape_in_file(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the file's tensor, for a parameter's."""
        sizes = dict(zip(self.names, shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def into_file(self, array: np.ndarray) -> np.ndarray:
        """The file's tensor of a parameter."""
        return array.transpose(np.argsort(self.order)).reshape(self.shape_in_file(array.shape))

    def read(self, tensor: Tensor, shape: Sequence[int], index: Index) -> np.ndarray:
        """A slice of the parameter, from the slice of the file's tensor that holds it.

        Its dims are in the file's order: `order` transposes them to the parameter's.
        """
        sizes = dict(zip(self.names, shape, strict=True))
        wanted = dict(zip(self.names, index, strict=True))
        source, block_shape, cut = [], [], []
        for outer, *inner in self.groups:
            # The outermost of merged dims is cut in the file, the others in memory.
            step = math.prod(sizes[name] for name in inner)
            source.append(slice(wanted[outer].start * step, wanted[outer].stop * step))
            block_shape += [wanted[outer].stop - wanted[outer].start, *(sizes[name] for name in inner)]
            cut += [slice(None), *(wanted[name] for name in inner)]
        return tensor.read(tuple(source)).reshape(block_shape)[tuple(cut)]


@dataclass(frozen=True)
class Part:
    """Every `step`-th entry of a tensor along one dim: one of several that a file keeps as one.

    Args:
      tensor: the file's.
      axis: the dim.
      start: the first entry.
      size: how many.
      step: 1 for parts that follow each other, the number of parts for interleaved ones.
    """

    tensor: Tensor
    axis: int
    start: int
    size: int
    step: int

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tensor.shape[: self.axis], self.size, *self.tensor.shape[self.axis + 1 :])

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice of the part."""
        wanted = index[self.axis]
        if wanted.stop == wanted.start:
            return self.tensor.read(index)
        first = self.start + wanted.start * self.step
        last = self.start + (wanted.stop - 1) * self.step
        block = self.tensor.read((*index[: self.axis], slice(first, last + 1), *index[self.axis + 1 :]))
        return block[(slice(None),) * self.axis + (slice(None, None, self.step),)]


@dataclass(frozen=True)
class TensorRow:
    """One row of a family's table.

    Args:
      theirs: name of the file's tensor; {layer} and {expert} stand for numbers.
      ours: path of the parameter, or of the several that the tensor joins; `blocks.*` stands for a stack of layers. A
        parameter's leading dims are the stack's layers, and its experts where `theirs` names one.
      pattern: how dims correspond, those of a stack left out.
      join: how several parameters lie in one tensor.
      axis: the tensor's dim along which they do.
    """

    theirs: str
    ours: str | tuple[str, ...]
    pattern: str
    join: Join = "concatenated"
    axis: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def num_stacked(self) -> int:
        """Leading dims of the parameter that are spread over tensors."""
        return self.theirs.count("{")

    @property
    def order(self) -> tuple[int, ...]:
        """The transposition that makes a parameter of what `read` returns."""
        return Pattern(self.pattern).order

    def shape_in_file(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The tensor's shape, for those of its parameters, stacked dims left out."""
        parts = [Pattern(self.pattern).shape_in_file(shape) for shape in shapes]
        joined = sum(part[self.axis] for part in parts) if parts[0] else 0
        return (*parts[0][: self.axis], joined, *parts[0][self.axis + 1 :]) if parts[0] else ()

    def read(self, tensor: Tensor, which: int, shapes: Sequence[Sequence[int]], index: Index) -> np.ndarray:
        """A slice of one of the parameters that a tensor joins, with its dims in the file's order; see `order`.

        Args:
          which: of the parameters.
          shapes: all their shapes, stacked dims left out.
        """
        pattern = Pattern(self.pattern)
        if len(self.paths) > 1:
            sizes = [pattern.shape_in_file(shape)[self.axis] for shape in shapes]
            concatenated = self.join == "concatenated"
            start, step = (sum(sizes[:which]), 1) if concatenated else (which, len(sizes))
            # Packed blocks give a part of themselves for less than unpacking the whole.
            divide = getattr(tensor, "part", None) or functools.partial(Part, tensor)
            tensor = divide(self.axis, start, sizes[which], step)
        return pattern.read(tensor, shapes[which], index)

    def into_file(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The file's tensor of its parameters, stacked dims left out."""
        parts = [Pattern(self.pattern).into_file(array) for array in arrays]
        if len(parts) == 1:
            return parts[0]
        if self.join == "concatenated":
            return np.concatenate(parts, self.axis)
        joined = np.stack(parts, self.axis + 1)
        shape = parts[0].shape
        return joined.reshape(*shape[: self.axis], shape[self.axis] * len(parts), *shape[self.axis + 1 :])


def read_whole(tensor: Tensor) -> np.ndarray:
    """Reads all of a tensor."""
    return tensor.read(whole(tensor.shape))
