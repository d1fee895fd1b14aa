"""The backward: pads the arrays, and runs its passes."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.backends.mosaic_gpu.backward_dkv import backward_dkv
from kernels.backends.mosaic_gpu.backward_dkv_by_gradient import backward_dkv_by_gradient
from kernels.backends.mosaic_gpu.backward_dq import backward_dq
from kernels.backends.mosaic_gpu.backward_passes import BackwardArrays, padded_head_dims
from kernels.backends.mosaic_gpu.padding import pad_matrices, pad_matrix
from kernels.backends.mosaic_gpu.tile_mask import TokenArrays
from kernels.backends.mosaic_gpu.tuning import MosaicGpuTuning
from kernels.backends.mosaic_gpu.warpgroup_tiles import BlockRows
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.hopper.machine import machine_of


def run_backward(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning, cotangent: Cotangent
) -> Gradients:
    """The gradients of query, key and value. See `run_forward`."""
    how, machine = tuning.backward_tiles, machine_of(interpret=tuning.interpret)
    assert how is not None
    fused = tuning.backward == "fused"
    lse, delta = cotangent.by_head()

    def run(kernel, block_q: int, block_kv: int, *, transposed: bool):
        head_dim, value_dim = padded_head_dims(call, how)
        q_multiple, kv_multiple = machine.length_multiple(block_q), machine.length_multiple(block_kv)
        query, key, value = pad_matrices(inputs, q_multiple, kv_multiple, head_dim, value_dim)
        row_padding = [(0, 0), (0, 0), (0, -call.q_len % block_q)]
        arrays = BackwardArrays(
            query,
            key,
            value,
            pad_matrix(cotangent.d_output, q_multiple, value_dim),
            jnp.pad(lse, row_padding, constant_values=-jnp.inf),
            jnp.pad(delta, row_padding),
            offsets=None,
            rows=BlockRows.of(inputs, call, block_q, block_kv, transposed=transposed, waits_in_each_step=fused),
            tokens=TokenArrays.of(inputs, block_q, block_kv),
            num_blocks_in_use=_num_blocks_in_use(inputs, block_kv) if transposed else None,
        )
        return kernel(arrays, call, how, machine)

    key_values = (
        backward_dkv_by_gradient if how.one_gradient_per_warpgroup else functools.partial(backward_dkv, fused=fused)
    )
    d_key, d_value, d_query = run(key_values, how.block_q, how.block_kv, transposed=True)
    if d_query is None:
        d_query = run(backward_dq, how.block_q_dq, how.block_kv_dq, transposed=False)
    else:
        d_query = (d_query * call.scale).astype(call.dtype)
    d_key, d_value = d_key[:, : call.kv_len, :, : call.head_dim], d_value[:, : call.kv_len, :, : call.value_dim]
    return d_query[:, : call.q_len, :, : call.head_dim], d_key, d_value


def _num_blocks_in_use(inputs: AttentionInputs, block_kv: int) -> Int[Array, " 1"] | None:
    """The blocks of each head that hold some of a row's keys; None: all do."""
    if inputs.num_keys is None:
        return None
    return -(-inputs.num_keys.max(keepdims=True)[0] // block_kv)
