"""The workloads of decoding: sequences that each hold a prompt and gain tokens one by one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import CausalMask, LocalMask, Mask


@dataclass(frozen=True)
class DecodeWorkload:
    """One combination of the benchmark's sizes.

    Attributes:
      num_sequences: that are decoded in parallel.
      prompt: tokens that each holds at the start.
      num_generated: tokens that each gains, one per step.
      window: tokens that each sees, its own among them; None for all of them.
      num_layers, num_heads, num_kv_heads, head_dim: of the model whose attention this is.
    """

    num_sequences: int
    prompt: int
    num_generated: int
    window: int | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def mask(self) -> Mask:
        """The mask of the attention."""
        return CausalMask() if self.window is None else LocalMask(self.window - 1, 0)

    @property
    def length(self) -> int:
        """Tokens of each sequence at the end."""
        return self.prompt + self.num_generated

    @property
    def bytes_per_step(self) -> float:
        """Bytes of the keys and values that the sequences see, which a step has to read; the mean over all steps."""
        seen = np.arange(self.prompt, self.length) + 1
        seen = seen if self.window is None else np.minimum(seen, self.window)
        width = self.num_kv_heads * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize
        return float(seen.mean()) * self.num_sequences * self.num_layers * width

    def tokens(self, rng: np.random.Generator) -> dict[str, jax.Array]:
        """Random new tokens of every step; all layers write the same."""
        heads = {"query": self.num_heads, "key": self.num_kv_heads, "value": self.num_kv_heads}
        return {
            name: normal(rng, (self.num_generated, self.num_sequences, 1, count, self.head_dim), self.dtype)
            for name, count in heads.items()
        }

    def describe(self) -> dict[str, Any]:
        """The workload as JSON."""
        return dataclasses.asdict(self)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, drawn on the device."""
    return jax.random.normal(jax.random.key(int(rng.integers(1 << 31))), shape, jnp.dtype(dtype))
