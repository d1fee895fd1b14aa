"""Preparations for decoding with a GPT: empty caches, and parameters laid out layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kernels import SlabCache, slab_capacity
from layers.config import GPTConfig
from layers.layer_stacks import with_matrices_in


def init_caches(
    config: GPTConfig, num_sequences: int, length: int, *, tokens_per_step: int = 1
) -> tuple[SlabCache, ...]:
    """Empty caches for `GPT.prefill` and `GPT.decode`, one for each layer.

    Args:
      config: of the GPT.
      num_sequences: sequences to decode side by side.
      length: tokens that each of them may grow to. A layer whose mask looks only so far back keeps that many.
      tokens_per_step: tokens of a sequence that `decode` is given at a time; with a tree, all of the tree's.
    """
    return tuple(
        SlabCache.empty(
            num_sequences,
            slab_capacity(layer.mask, length, tokens_per_step),
            layer.num_kv_heads,
            layer.head_dim,
            dtype=config.compute_dtype,
        )
        for layer in map(config.layer, range(config.num_layers))
    )


def unrolled_config(config: GPTConfig) -> GPTConfig:
    """Config of the same GPT with every layer by itself; see `unroll_params`."""

    def each_layers(pattern: tuple) -> tuple:
        return tuple(pattern[layer % len(pattern)] for layer in range(config.num_layers)) if pattern else ()

    masks, overrides = each_layers(config.masks), each_layers(config.layer_overrides)
    return dataclasses.replace(config, masks=masks, layer_overrides=overrides, scan_layers=False)


def unroll_params(config: GPTConfig, params: Any) -> Any:
    """Lays a model out for `GPT.prefill` and `GPT.decode`: each layer by itself, matrices in the compute dtype.

    The model computes the same. But a step of decoding reads every matrix for the sake of a few tokens, and would spend
    its time on taking them out of their stacks and casting them.

    Args:
      config: of a GPT.
      params: its parameters, a nested dict by the names of its attributes, as `nnx.to_pure_dict` makes it.

    Returns:
      The parameters of the GPT of `unrolled_config(config)`.
    """
    pattern_length = config.pattern_length
    blocks = {}
    for layer in range(config.num_layers):
        repeat, pattern_index = divmod(layer, pattern_length)
        blocks[layer] = jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat][None], params["blocks"][pattern_index])
    return with_matrices_in(jnp.dtype(config.compute_dtype), params | {"blocks": blocks})
