"""Counts the tiles that compiled attention visits: it shows that a quickly compiled program does the same work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from experiments.benchmarks.compile_time import upstream
from kernels.backends.splash import passes
from kernels.backends.splash import tuning as splash_tuning
from kernels.backends.splash.tuning import resolve
from kernels.call import AttentionCall
from kernels.masks import Mask

_PASSES = ("forward", "d_key_value", "d_query")


def count_visited_tiles(
    source: upstream.Baseline | Literal["ours"], mask: Mask, shapes: tuple[jax.ShapeDtypeStruct, ...], device: Any
) -> dict[str, int]:
    """Tiles that each pass of TPU splash attention visits, over all heads, according to its `MaskInfo`.

    Args:
      source: where the kernel has its mask from.
      mask: of all heads.
      shapes: of query, key and value, batch 1.
      device: a TPU, which needn't be attached.

    Returns:
      By pass: "forward", "d_key_value" and, unless the backward is fused, "d_query".
    """
    calls: list[AttentionCall] = []
    jax.eval_shape(lambda q, k, v: calls.append(upstream.describe(q, k, v, mask, device)), *shapes)
    (call,) = calls
    if source != "ours":
        kernel = upstream.make_kernel(source, call)
        infos = (kernel.fwd_mask_info, kernel.dkv_mask_info, kernel.dq_mask_info)
        return {name: _visited(info, call.num_heads) for name, info in zip(_PASSES, infos, strict=True)}
    tuning = resolve(None, call)
    walks = [splash_tuning.forward_pass(call, tuning), splash_tuning.backward_dkv_pass(call, tuning)]
    if tuning.backward == "split":
        walks.append(splash_tuning.backward_dq_pass(call, tuning))
    masks = [passes.planned_mask(call, walk, passes.Tokens()) for walk in walks]
    return {
        name: _visited(mask.info, call.num_heads, mask.mask_of_head) for name, mask in zip(_PASSES, masks, strict=False)
    }


def _visited(info: MaskInfo | None, num_heads: int, table_of_head: Sequence[int] | None = None) -> int:
    """Visited tiles of all heads; upstream's have one table together or one each."""
    assert info is not None
    assert info.block_mask is not None, "a full mask, which upstream has no table for, isn't one of the benchmark's"
    per_table = (np.asarray(info.block_mask) > 0).sum(axis=(1, 2))
    if table_of_head is None:
        table_of_head = range(num_heads) if len(per_table) > 1 else (0,) * num_heads
    return int(per_table[list(table_of_head)].sum())
