"""Spans of the sequence, of which the queries or the keys of a rank's kernel consist, and indices among their tokens.

Dimensions: B batch, n spans, L any number of indices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["starts"], meta_fields=["length"])
@dataclass(frozen=True)
class Spans:
    """Spans of consecutive tokens, in the order of the sequence.

    Attributes:
      starts: the index in the sequence of each span's first token.
      length: of every span, in tokens.
    """

    starts: Int[Array, "B n"]
    length: int

    def num_before(self, index: Int[Array, "B L"]) -> Int[Array, "B L"]:
        """The number of these tokens that come before an index in the sequence.

        For a bound it is the index among these tokens, since they are in the order of the sequence: it parts the tokens
        as the bound does.

        >>> Spans(jnp.array([[0, 6]]), 2).num_before(jnp.array([[1, 2, 5, 7, 9]])).tolist()
        [[1, 2, 2, 3, 4]]
        """
        # No gathers, which are slow on TPUs. XLA makes no array of L × n numbers.
        in_span = jnp.clip(index[..., None] - self.starts[:, None], 0, self.length)
        return in_span.sum(-1, dtype=jnp.int32)
