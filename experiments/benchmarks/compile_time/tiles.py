"""How many tiles the compiled attention visits: what shows that a quick compile isn't one of a lesser program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.compile_time.masks import Source
from kernels.backends.splash import dense, passes, upstream_lazy
from kernels.backends.splash.launch import PassMask
from kernels.backends.splash.tuning import resolve
from kernels.call import AttentionCall, make_call
from kernels.masks import Mask

_SOURCES: dict[Source, passes.MaskSource] = {
    "ours": passes.planned_mask,
    "upstream_lazy": functools.partial(upstream_lazy.upstream_mask, upstream_lazy.lazy_mask),
    "dense": functools.partial(upstream_lazy.upstream_mask, dense.dense_mask),
}


def count_visited_tiles(
    source: Source, mask: Mask, shapes: tuple[jax.ShapeDtypeStruct, ...], device: Any
) -> dict[str, int]:
    """Tiles that each pass of TPU splash attention visits, over all heads, as told by the `MaskInfo` that it is given.

    Args:
      source: where the kernel has its mask from.
      mask: of all heads.
      shapes: of query, key and value, batch 1.
      device: a TPU, which needn't be attached.

    Returns:
      By pass: "forward", "d_key_value" and, unless the backward is fused, "d_query".
    """
    call = _call(mask, shapes, device)
    tuning = resolve(None, call)
    walks = {"forward": passes.forward_pass(call, tuning), "d_key_value": passes.d_key_value_pass(call, tuning)}
    if tuning.backward == "split":
        walks["d_query"] = passes.d_query_pass(call, tuning)
    return {name: _visited(_SOURCES[source](call, walk, passes.Tokens())) for name, walk in walks.items()}


def _visited(mask: PassMask) -> int:
    per_table = (np.asarray(mask.info.block_mask) > 0).sum(axis=(1, 2))
    return int(per_table[list(mask.mask_of_head)].sum())


def _call(mask: Mask, shapes: tuple[jax.ShapeDtypeStruct, ...], device: Any) -> AttentionCall:
    calls: list[AttentionCall] = []
    absent = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions", "scale")
    options = dict.fromkeys((*absent, "logits_soft_cap", "sinks"), None)

    def describe(query, key, value):
        inputs, call = make_call(query, key, value, mask, **options, return_lse=False, device=device)
        calls.append(call)
        return inputs.query

    jax.eval_shape(describe, *shapes)
    return calls[0]
