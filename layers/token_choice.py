"""From logits to the next token: temperature, top-k and top-p, each a pure function of logits.

A token that is ruled out gets the logit −∞. Numbers may be traced, so that another temperature is not another program.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


@dataclass(frozen=True)
class TokenChoice:
    """How a sampled text's next token is chosen."""

    temperature: float = 0.8
    """Logits are divided by it; less makes likely tokens likelier. 0 always takes the likeliest."""
    top_k: int | None = None
    """Choose among this many of the likeliest tokens only; None: among all."""
    top_p: float | None = None
    """Choose among the fewest likeliest tokens whose probabilities reach this sum (arXiv:1904.09751); None: all."""

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be finite and not negative; 0 takes the likeliest")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; None chooses among all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be more than 0 and at most 1; None chooses among all tokens")


def choose_tokens(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    *,
    temperature: float | Float[Array, ""] | None,
    top_k: int | Int[Array, ""] | None = None,
    top_p: float | Float[Array, ""] | None = None,
) -> Int[Array, " B"]:
    """Draws a token for each sequence.

    Args:
      logits: of the next token.
      keys: a random key for each sequence, which sees no other's.
      temperature: logits are divided by it; None takes the likeliest token (the first of several).
      top_k, top_p: as for `keep_top_k` and, after it, `keep_top_p`; None rules nothing out.

    >>> choose_tokens(jnp.array([[0.0, 2.0, 1.0]]), jax.random.split(jax.random.key(0), 1), temperature=None).tolist()
    [1]
    """
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def keep_top_k(logits: Float[Array, "*batch V"], k: int | Int[Array, ""]) -> Float[Array, "*batch V"]:
    """Rules out all but the k likeliest tokens; of equally likely ones the first are kept.

    Source: Fan et al., Hierarchical Neural Story Generation, arXiv:1805.04833.

    >>> keep_top_k(jnp.array([1.0, 3.0, 2.0]), 2).tolist()
    [-inf, 3.0, 2.0]
    """
    order = _likeliest_first(logits)
    return _rule_out_all_but(logits, jnp.broadcast_to(jnp.arange(logits.shape[-1]) < k, logits.shape), order)


def keep_top_p(logits: Float[Array, "*batch V"], p: float | Float[Array, ""]) -> Float[Array, "*batch V"]:
    """Rules out all but the fewest likeliest tokens whose probabilities reach the sum p, always keeping one.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv:1904.09751.

    >>> (keep_top_p(jnp.log(jnp.array([0.2, 0.5, 0.3])), 0.6) > -jnp.inf).tolist()
    [False, True, True]
    """
    order = _likeliest_first(logits)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    return _rule_out_all_but(logits, (before < p) | (jnp.arange(logits.shape[-1]) == 0), order)


def _likeliest_first(logits: Float[Array, "*batch V"]) -> Int[Array, "*batch V"]:
    return jnp.argsort(logits, axis=-1, stable=True, descending=True)


def _rule_out_all_but(
    logits: Float[Array, "*batch V"], kept_in_order: Bool[Array, "*batch V"], order: Int[Array, "*batch V"]
) -> Float[Array, "*batch V"]:
    kept = jnp.take_along_axis(kept_in_order, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, logits, -jnp.inf)
