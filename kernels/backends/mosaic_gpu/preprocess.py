"""The inputs of a backward of heads up to 128 wide: columns of offsets, and the zeros that a dQ is added to.

One kernel writes both. XLA's own zeros have programs of 512 numbers, and starting these programs takes longer than
writing the zeros. Here other programs compute the columns meanwhile. FlashAttention-3 has such a kernel, too, which
also computes delta.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward_passes import BackwardArrays
from kernels.backends.mosaic_gpu.offset_columns import NUM_COLUMNS, lse_is_offset, offset_columns
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper
from kernels.hopper.registers import WGMMA_ROWS, load_vector, store_matrix
from kernels.tracing.number_types import types_of_32_bits

# Of a program (docs/hopper_kernels.md).
_NUM_ZEROS = 1024
_ZEROS_OF_A_STORE = 4


def with_offsets(arrays: BackwardArrays, call: AttentionCall, machine: Hopper, *, adds_to_dq: bool) -> BackwardArrays:
    """The arrays with columns of offsets in place of delta and, where it is one, lse; with a dQ of zeros to add to."""
    offset_lse, loaded_lse = (arrays.lse, None) if lse_is_offset(call) else (None, arrays.lse)
    columns, *zeros = preprocess(arrays.delta, offset_lse, arrays.query.shape if adds_to_dq else None, call, machine)
    d_query = jax.new_ref(*zeros) if adds_to_dq else None
    return arrays._replace(lse=loaded_lse, delta=None, offsets=columns, d_query=d_query)


@types_of_32_bits()
def preprocess(
    delta: Float[Array, "B N T"],
    lse: Float[Array, "B N T"] | None,
    zeros_shape: tuple[int, ...] | None,
    call: AttentionCall,
    machine: Hopper,
) -> list[Array]:
    """The `offset_columns` of T queries, a multiple of 64, `[B, N, T, 16]`, and if a shape is given float32 zeros.

    The number of zeros is a multiple of 512.

    The zeros come of a kernel that reads delta, and so stay within the call, as those of `memory.zeroed_ref` do.
    """
    num_rows, num_zeros = delta.size, 0 if zeros_shape is None else math.prod(zeros_shape)
    zeros_of_program = math.gcd(num_zeros, _NUM_ZEROS)
    num_row_programs, num_zero_programs = num_rows // WGMMA_ROWS, num_zeros // zeros_of_program
    out_type = [
        jax.ShapeDtypeStruct((num_rows, NUM_COLUMNS), call.dtype),
        jax.ShapeDtypeStruct((num_zero_programs, zeros_of_program), jnp.float32),
    ]
    shapes = [(*delta.shape, NUM_COLUMNS), zeros_shape]
    num_outputs = 1 if zeros_shape is None else 2
    given = [numbers.reshape(-1) for numbers in (delta, lse) if numbers is not None]

    def kernel(*refs):
        given_refs, (columns_ref, *zeros_refs) = refs[:-num_outputs], refs[-num_outputs:]
        machine.begin_kernel("attention_preprocess", delta)
        program = jax.lax.axis_index("program")

        # First those that wait for what they load.
        @pl.when(program < num_row_programs)
        def write_columns():
            rows = pl.ds(program * WGMMA_ROWS, WGMMA_ROWS)
            loaded = [load_vector(ref.at[rows], rows=True, shared=False) for ref in given_refs]
            store_matrix(columns_ref.at[rows], offset_columns(*loaded, call=call))

        for zeros_ref in zeros_refs:

            @pl.when(program >= num_row_programs)
            def write_zeros(zeros_ref=zeros_ref):
                layout = plgpu.Layout.WG_STRIDED((zeros_of_program,), _ZEROS_OF_A_STORE)
                zeros = plgpu.layout_cast(jnp.zeros((zeros_of_program,), jnp.float32), layout)
                zeros_ref.at[program - num_row_programs][...] = zeros

    outputs = plgpu.kernel(
        kernel,
        out_type=out_type[:num_outputs],
        grid=(num_row_programs + num_zero_programs,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=machine.interpret,
    )(*given)
    return [x.reshape(shape) for x, shape in zip(outputs, shapes, strict=False)]
