"""Weight initialisers."""

from __future__ import annotations

from flax import nnx


def small_init(width: int, *, num_layers: int | None = None) -> nnx.Initializer:
    """Normal with deviation √(2 / 5·width): GPT-2's 0.02 near its width, larger in narrower networks.

    Args:
      width: features of the residual stream.
      num_layers: given for a matrix that adds to the residual stream, which starts smaller by
        √(2 · num_layers), the root of the number of additions, as in GPT-2; None for the others.

    Source: Nguyen and Salazar, arXiv:1910.05895.
    """
    deviation = (2 / (5 * width)) ** 0.5
    return nnx.initializers.normal(deviation if num_layers is None else deviation / (2 * num_layers) ** 0.5)
