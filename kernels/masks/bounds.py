"""Masks as data: for each token the interval of tokens that it may meet, in arrays that change from batch to batch.

Source: the bounds' names are tokamax's, and so is the idea to skip tiles by their least and greatest bounds.

Dimensions: B batch, T query length, S key/value length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BoundName = Literal["k_start", "k_end", "q_start", "q_end"]

OF_QUERIES: tuple[BoundName, BoundName] = ("k_start", "k_end")
OF_KEYS: tuple[BoundName, BoundName] = ("q_start", "q_end")


class Bounds(NamedTuple):
    """The keys that each query may attend to, and the queries that may attend to each key.

    A pair is allowed where `k_start[q] ≤ k < k_end[q]` and `q_start[k] ≤ q < q_end[k]`, q and k being indices in the
    sequence, whatever the positions are. A bound that is None allows all. Bounds may be traced.

    Attributes:
      k_start, k_end: integers `[B, T]` or `[T]`.
      q_start, q_end: integers `[B, S]` or `[S]`.

    >>> Bounds(k_start=jnp.array([0, 0, 2, 2])).allowed(4, 4).astype(int).tolist()
    [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    """

    k_start: Int[Array, "*B T"] | None = None
    k_end: Int[Array, "*B T"] | None = None
    q_start: Int[Array, "*B S"] | None = None
    q_end: Int[Array, "*B S"] | None = None

    @property
    def given(self) -> tuple[BoundName, ...]:
        """Names of the bounds that aren't None."""
        return tuple(name for name, bound in self._asdict().items() if bound is not None)  # type: ignore[misc]

    def map(self, of_queries: Callable[[Any], Any], of_keys: Callable[[Any], Any]) -> Bounds:
        """A function of each bound that is given: one of the queries' bounds, and one of the keys'."""
        return Bounds(
            **{name: (of_queries if name in OF_QUERIES else of_keys)(getattr(self, name)) for name in self.given}
        )

    def allowed(self, q_len: int, kv_len: int) -> Bool[Array, "*B T S"]:
        """True for each pair that the bounds allow, of sequences of these lengths."""
        q, k = jnp.arange(q_len, dtype=jnp.int32)[:, None], jnp.arange(kv_len, dtype=jnp.int32)
        allowed = jnp.ones((q_len, kv_len), bool)
        for name in self.given:
            bound = getattr(self, name)
            index, limit = (k, bound[..., None]) if name in OF_QUERIES else (q, bound[..., None, :])
            allowed = allowed & is_within(name, index, limit)
        return allowed


def is_within(name: BoundName, index: Any, bound: Any) -> Any:
    """True where an index keeps a bound, elementwise, also within kernels."""
    return index >= bound if name.endswith("start") else index < bound
