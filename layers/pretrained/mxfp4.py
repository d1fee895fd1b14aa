"""MXFP4 weights as gpt-oss stores them: 4-bit floats, two to a byte, and a scale for each 32 of them.

A value is one of 16 (E2M1) times 2 ** (scale - 127), which bfloat16 holds exactly.

Source: OCP Microscaling Formats v1.0; transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from layers.pretrained.safetensors_file import Index, Tensor
from layers.pretrained.steps import Part

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCK = 32
_LOOKUPS_AT_ONCE = 1 << 16  # their indices stay in a core's cache
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class UnpackedTensor:
    """A stack of matrices [expert, in, out] whose columns are packed along `in`.

    Args:
      blocks: bytes, [expert, out, in / 32, 16]; of a byte's two values the low four bits come first.
      scales: exponents, [expert, out, in / 32].
    """

    blocks: Tensor
    scales: Tensor

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_out, num_blocks, _ = self.blocks.shape
        return (num_experts, num_blocks * _BLOCK, num_out)

    def read(self, index: Index) -> np.ndarray:
        """Reads the blocks that hold a slice, an expert at a time, and unpacks them.

        Returns:
          A view with `out` before `in` in memory, as the file has them.
        """
        experts, inputs, outputs = index
        held = slice(inputs.start // _BLOCK, math.ceil(inputs.stop / _BLOCK))
        num_rows, num_bytes = outputs.stop - outputs.start, (held.stop - held.start) * _BLOCK // 2
        pairs = np.empty((experts.stop - experts.start, num_rows, num_bytes), np.uint32)
        for unpacked, number in zip(pairs, range(experts.start, experts.stop), strict=True):
            expert = slice(number, number + 1)
            blocks = self.blocks.read((expert, outputs, held, slice(0, _BLOCK // 2)))[0]
            _unpack(blocks, self.scales.read((expert, outputs, held))[0], unpacked)
        columns = pairs.view(self.dtype).swapaxes(1, 2)
        return columns[:, inputs.start - held.start * _BLOCK : inputs.stop - held.start * _BLOCK]

    def part(self, axis: int, start: int, size: int, step: int) -> UnpackedTensor:
        """A part as `steps.Part` makes it, of packed blocks: only one of the joined matrices is unpacked."""
        assert axis == 2, "matrices are joined along their columns"
        return UnpackedTensor(Part(self.blocks, 1, start, size, step), Part(self.scales, 1, start, size, step))


def _unpack(blocks: np.ndarray, scales: np.ndarray, pairs: np.ndarray) -> None:
    """Looks up the two values of every byte: blocks [out, in / 32, 16] and scales [out, in / 32] to [out, in / 2]."""
    rows_at_once = max(1, _LOOKUPS_AT_ONCE // max(1, pairs.shape[1]))
    for first in range(0, len(pairs), rows_at_once):
        rows = slice(first, first + rows_at_once)
        indices = blocks[rows].astype(np.intp)
        indices += scales[rows, :, None].astype(np.intp) << 8
        # All indices are in bounds. The default mode, which checks them, writes to a copy of `out` first.
        np.take(_pairs_of_values(), indices.reshape(len(indices), -1), out=pairs[rows], mode="clip")


@functools.cache
def _pairs_of_values() -> np.ndarray:
    """The two bfloat16 values of each scale and byte, in one word at scale * 256 + byte."""
    with np.errstate(over="ignore"):
        values = np.ldexp(_VALUES, np.arange(256)[:, None] - 127).astype(jnp.bfloat16)
    byte = np.arange(256)
    return np.stack([values[:, byte & 15], values[:, byte >> 4]], -1).view(np.uint32).reshape(-1)


def with_unpacked_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replaces each pair of blocks and scales by one tensor of bfloat16; ValueError if they don't fit together."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(_BLOCKS)]:
        whole = name.removesuffix(_BLOCKS)
        blocks, scales = found.pop(name), found.pop(whole + _SCALES, None)
        if scales is None or whole in found:
            raise ValueError(f"the folder has {name}, but not exactly one {whole + _SCALES} and no {whole} beside it")
        wanted = blocks.shape[:3]
        if len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2 or scales.shape != wanted:
            raise ValueError(
                f"{name} has the shape {blocks.shape} and {whole + _SCALES} {scales.shape}; "
                "expected [E, N, B, 16] and [E, N, B]"
            )
        if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
            raise ValueError(f"{name} and {whole + _SCALES} are {blocks.dtype} and {scales.dtype}; expected bytes")
        found[whole] = UnpackedTensor(blocks, scales)
    return found
