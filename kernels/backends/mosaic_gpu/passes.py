"""The two halves: padding, and what each pass is handed."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward_passes import BackwardArrays, padded_head_dims
from kernels.backends.mosaic_gpu.block_range import union_of_ranges
from kernels.backends.mosaic_gpu.forward_pass import forward
from kernels.backends.mosaic_gpu.key_value_pass import key_value_pass
from kernels.backends.mosaic_gpu.machine import Hopper, Interpreter
from kernels.backends.mosaic_gpu.memory import WGMMA_ROWS, padded_head_dim
from kernels.backends.mosaic_gpu.query_pass import query_pass
from kernels.backends.mosaic_gpu.softmax import LOG2_E
from kernels.backends.mosaic_gpu.tile_mask import TokenArrays
from kernels.backends.mosaic_gpu.tuning import MosaicForwardTuning, MosaicGpuTuning
from kernels.backends.mosaic_gpu.wide_key_value_pass import wide_key_value_pass
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.plan import Rows, make_rows

# exp2(a logit − it) = 0.
_HUGE_LSE = 1e30


def run_forward(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of a call whose mask all heads share, under a tuning with nothing left open."""
    how = tuning.forward_tiles
    assert how is not None
    # A block's last warpgroups may have no rows. (Pallas's interpreter reads nothing past an array's end.)
    block_q = how.block_q if tuning.interpret else WGMMA_ROWS
    head_dims = padded_head_dim(call.head_dim), padded_head_dim(call.value_dim)
    output, lse = forward(
        *_matrices(inputs, block_q, how.block_kv, *head_dims),
        sinks=None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
        tokens=TokenArrays.of(inputs, how.block_q, how.block_kv),
        rows=_rows_of_warpgroups(inputs, call, how),
        call=call,
        tuning=how,
        machine=_machine(tuning),
    )
    return output[:, : call.q_len, :, : call.value_dim], lse[:, :, : call.q_len].swapaxes(1, 2)


def _rows_of_warpgroups(inputs: AttentionInputs, call: AttentionCall, tuning: MosaicForwardTuning) -> Rows:
    """Intervals for each warpgroup, or where they aren't all intervals, lists for each block."""
    blocks = make_rows(inputs, call, tuning.block_q, tuning.block_kv)
    if blocks.tiles is not None:
        return blocks
    own = make_rows(inputs, call, WGMMA_ROWS, tuning.block_kv)
    if own.tiles is not None:
        own = Rows(jnp.repeat(blocks.bounds, tuning.num_warpgroups, axis=1), None)
    return union_of_ranges(own, tuning.num_warpgroups)


def run_backward(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning, cotangent: Cotangent
) -> Gradients:
    """The gradients of query, key and value of such a call."""
    how = tuning.backward_tiles
    assert how is not None
    lse, delta = cotangent.by_head()

    def run(kernel, block_q: int, block_kv: int, *, transposed: bool):
        head_dim, value_dim = padded_head_dims(call, how)
        query, key, value = _matrices(inputs, block_q, block_kv, head_dim, value_dim)
        row_padding = [(0, 0), (0, 0), (0, -call.q_len % block_q)]
        in_log2 = jnp.where(lse != -jnp.inf, lse * LOG2_E, _HUGE_LSE)
        arrays = BackwardArrays(
            query,
            key,
            value,
            _padded(cotangent.d_output, block_q, value_dim),
            jnp.pad(in_log2, row_padding, constant_values=_HUGE_LSE),
            jnp.pad(delta, row_padding),
            offsets=None,
            rows=make_rows(inputs, call, block_q, block_kv, transposed=transposed),
            tokens=TokenArrays.of(inputs, block_q, block_kv),
        )
        return kernel(arrays, call, how, _machine(tuning))

    key_values = (
        wide_key_value_pass
        if how.one_gradient_per_warpgroup
        else functools.partial(key_value_pass, fused=tuning.backward == "fused")
    )
    d_key, d_value, d_query = run(key_values, how.block_q, how.block_kv, transposed=True)
    if d_query is None:
        d_query = run(query_pass, how.block_q_dq, how.block_kv_dq, transposed=False)
    else:
        d_query = (d_query * call.scale).astype(call.dtype)
    d_key, d_value = d_key[:, : call.kv_len, :, : call.head_dim], d_value[:, : call.kv_len, :, : call.value_dim]
    return d_query[:, : call.q_len, :, : call.head_dim], d_key, d_value


def _matrices(
    inputs: AttentionInputs, block_q: int, block_kv: int, head_dim: int, value_dim: int
) -> tuple[Array, Array, Array]:
    """Query, key and value, padded to whole blocks and to these head dims."""
    query, key = _padded(inputs.query, block_q, head_dim), _padded(inputs.key, block_kv, head_dim)
    return query, key, _padded(inputs.value, block_kv, value_dim)


def _padded(x: Float[Array, "B L N H"], block: int, width: int) -> Float[Array, "B L2 N H2"]:
    """Fills the last block of the length, and the head dim up to `width`, with zeros."""
    length, head_dim = x.shape[1], x.shape[3]
    padding = [(0, 0), (0, -length % block), (0, 0), (0, width - head_dim)]
    return x if not any(after for _, after in padding) else jnp.pad(x, padding)


def _machine(tuning: MosaicGpuTuning) -> Hopper:
    if tuning.interpret:
        return Interpreter(plgpu.InterpretGPUParams())  # type: ignore[attr-defined]  # new in JAX 0.11
    return Hopper()
