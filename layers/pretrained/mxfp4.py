"""MXFP4 weights as gpt-oss stores them: 4-bit floats, two to a byte, and a scale for each 32 of them.

A value is one of 16 (E2M1) times 2 ** (scale - 127), which bfloat16 holds exactly.

Source: OCP Microscaling Formats v1.0; transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from layers.pretrained.safetensors_file import Index, Tensor

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCK = 32
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
        """Reads the blocks that hold a slice, and unpacks them."""
        experts, inputs, outputs = index
        held = slice(inputs.start // _BLOCK, math.ceil(inputs.stop / _BLOCK))
        packed = self.blocks.read((experts, outputs, held, slice(0, _BLOCK // 2)))
        exponents = self.scales.read((experts, outputs, held)).astype(np.int32) - 127
        values = _VALUES[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:-1], _BLOCK)
        values = np.ldexp(values, exponents[..., None]).astype(self.dtype)
        columns = values.reshape(*values.shape[:2], values.shape[2] * _BLOCK).swapaxes(1, 2)
        return columns[:, inputs.start - held.start * _BLOCK : inputs.stop - held.start * _BLOCK]


def with_unpacked_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with one of bfloat16 in the place of each pair of blocks and scales.

    Args:
      tensors: a folder's, by their names.

    Raises:
      ValueError: blocks and scales don't fit together.
    """
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
