"""Other attentions under JAX, each as a function of (query, key, value, sinks, segment_ids, problem).

They're called as their own documentation says, with the tiles that were the fastest on an H200. One that can't serve a
case raises with the reason; one that isn't installed raises ImportError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.attention.cases import Problem
from kernels import Target

_HOPPER = 9.0


def _window(problem: Problem, *, windows: bool = True, documents: bool = False) -> tuple[bool, int | None]:
    """The mask as (is it causal, how many tokens it looks back).

    Raises:
      ValueError: a mask that isn't full, causal or (if `windows`) a causal window, packed documents, or sinks.
    """
    case = problem.case
    window = case.mask.window
    if window is None or (window[1] != 0 and not case.mask.allows_all):
        raise ValueError(f"has full masks, causal masks and causal windows only, not {case.mask!r}")
    if window[0] is not None and not windows:
        raise ValueError(f"has no windows such as {case.mask!r}")
    if problem.segment_ids is not None and not documents:
        raise ValueError("has no segment ids for packed documents")
    if case.has_sinks:
        raise ValueError("has no attention sinks")
    return window[1] == 0, window[0]


def _needs_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise ValueError(f"runs on gpu, not on {jax.default_backend()}")


def _needs_hopper() -> None:
    """The package of FlashAttention-3 runs FlashAttention-2 on other GPUs."""
    _needs_gpu()
    target = Target.of()
    if target.compute_capability != _HOPPER:
        capability = f"compute capability {target.compute_capability}"
        raise ValueError(
            f"is for Hopper GPUs (compute capability {_HOPPER}), not for {target.device_kind} ({capability})"
        )


def _xla(query, key, value, sinks, segment_ids, problem: Problem):
    """XLA's own attention, which builds the T×T logits."""
    is_causal, left = _window(problem)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        local_window_size=None if left is None else (left, 0),
        implementation="xla",
    )


def _pallas_mosaic(query, key, value, sinks, segment_ids, problem: Problem):
    """JAX's own Mosaic GPU attention; its backward is for full masks."""
    _needs_gpu()
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    is_causal, _ = _window(problem, windows=False)
    # It takes the value's head dim for the key's, unchecked (jax/experimental/pallas/ops/gpu/attention_mgpu.py).
    if problem.case.output_dim != problem.case.head_dim:
        raise ValueError(f"has one head dim, not {problem.case.head_dim} with values of {problem.case.output_dim}")
    wide = 64 if problem.case.head_dim > 64 else 128
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=128,
        max_concurrent_steps=2,
        causal=is_causal,
        compute_wgs_bwd=2,
        block_q_dkv=64,
        block_kv_dkv=wide,
        block_q_dq=64,
        block_kv_dq=wide,
    )
    return attention_mgpu.attention(query * jnp.asarray(problem.case.head_dim**-0.5, query.dtype), key, value, config)


def _pallas_triton(query, key, value, sinks, segment_ids, problem: Problem):
    """JAX's own Pallas Triton attention; it has no grouped heads, so keys and values are repeated."""
    _needs_gpu()
    from jax.experimental.pallas.ops.gpu import attention

    is_causal, _ = _window(problem, windows=False, documents=True)
    group_size = problem.case.num_heads // problem.case.num_kv_heads
    key, value = (jnp.repeat(x, group_size, axis=2) for x in (key, value))
    block = 128 if problem.case.head_dim <= 64 else 64
    sizes = attention.BlockSizes(
        block_q=128, block_k=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    return attention.mha(
        query,
        key,
        value,
        segment_ids,
        sm_scale=problem.case.head_dim**-0.5,
        causal=is_causal,
        block_sizes=sizes,
        num_warps=4 if problem.case.head_dim <= 64 else 8,
    )


def _tokamax(query, key, value, sinks, segment_ids, problem: Problem, *, implementation: str):
    _needs_gpu()
    import tokamax

    is_causal, left = _window(problem)
    return tokamax.dot_product_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        local_window_size=None if left is None else (left, 0),
        implementation=implementation,
    )


def _fa3(query, key, value, sinks, segment_ids, problem: Problem):
    """FlashAttention-3, of the package dew-flash-attn-cu13, which says itself what shapes and dtypes it takes."""
    _needs_hopper()
    try:
        from dew_flash_attn import flash_mha, flash_mha_varlen
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("fa3 needs dew-flash-attn-cu13: pip install -e '.[peers]' in the clone") from error

    window = problem.case.mask.window
    if window is None or any(side is not None and side < 0 for side in window):
        raise ValueError(f"has full masks, causal masks and windows around each query only, not {problem.case.mask!r}")
    how = {
        "is_causal": window == (None, 0),
        "window_size": tuple(-1 if side is None else side for side in window),
        "sinks": sinks,
    }
    if problem.segment_ids is None:
        return flash_mha(query, key, value, **how)
    # Its callers know their documents on the host: the segment ids on the device are no input of it.
    offsets = _document_offsets(problem.segment_ids)
    one_row = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    output = flash_mha_varlen(*one_row, offsets, int(np.diff(offsets).max()), **how)
    return output.reshape(problem.arrays["d_output"].shape)


def _document_offsets(segment_ids: jax.Array) -> np.ndarray:
    """Starts of documents in a batch of sequences laid end to end, and last the number of tokens; int32."""
    ids = np.asarray(segment_ids)
    begins = np.ones(ids.shape, bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return np.append(np.flatnonzero(begins), ids.size).astype(np.int32)


PEERS: dict[str, Callable] = {
    "xla": _xla,
    "pallas_mosaic": _pallas_mosaic,
    "pallas_triton": _pallas_triton,
    "tokamax_mosaic": functools.partial(_tokamax, implementation="mosaic"),
    "tokamax_triton": functools.partial(_tokamax, implementation="triton"),
    "fa3": _fa3,
}
