"""Kernels of a lowered program, compiled ahead of it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels import CausalMask, LocalMask, MosaicGpuTuning, Target, dot_product_attention
from kernels.backends import mosaic_gpu
from kernels.call import make_call
from tests.compilations import count_compilations
from tests.gpu_compiler import needs_gpu_compiler
from trainer.compile.kernels import PROGRAM_NAME, compile_kernels, find_kernels
from trainer.compile.stages import compile_lowering, lower_in_stages
from trainer.compile.topology import parse_topology


def lower_attention(num_layers: int):
    """A gradient through layers of one attention each, for an H200 that isn't there."""
    [device] = parse_topology("h200:1").devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    fused = MosaicGpuTuning(backward="fused")  # one kernel
    attend = functools.partial(dot_product_attention, mask=CausalMask(), implementation=fused, device=device)

    def loss(x):
        for _ in range(num_layers):
            x = attend(x, x, x)
        return x.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16, sharding=sharding)
    return lower_in_stages(jax.jit(jax.grad(loss)), x)


@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_a_kernel_of_many_layers_is_found_once():
    assert len(find_kernels(lower_attention(num_layers=2).lowered)) == 2  # one forward, one backward


@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_kernels_are_compiled_ahead_of_their_program():
    with count_compilations() as counts:
        compile_lowering(lower_attention(num_layers=1), name="gradient")
    assert counts == {PROGRAM_NAME: 2, "loss": 1}


@pytest.mark.jax_0_11
def test_each_distinct_kernel_is_compiled_once(monkeypatch):
    """Also where no compiler for GPUs is installed: lowering needs none."""
    target = Target("gpu", "NVIDIA H200", 9.0, 132)
    array = jnp.ones((1, 512, 2, 64), jnp.bfloat16)
    names = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions", "scale")
    nothing = dict.fromkeys((*names, "logits_soft_cap", "sinks"))
    inputs, call = make_call(array, array, array, CausalMask(), **nothing, return_lse=False)
    call = call._replace(target=target)

    def layers(inputs):
        for mask in (CausalMask(), LocalMask(99, 0), CausalMask()):
            changed = call._replace(mask=mask)
            output, _ = mosaic_gpu.fwd(inputs, changed, mosaic_gpu.resolve(None, changed))
            inputs = inputs._replace(query=output)
        return inputs.query

    lowered = jax.jit(layers).trace(inputs).lower(lowering_platforms=("cuda",))
    compiled = []
    monkeypatch.setattr("trainer.compile.kernels._compile", lambda device, kernel: compiled.append(kernel))
    compile_kernels(lowered, jax.devices()[0])
    assert len(compiled) == 2
    assert all(isinstance(kernel["kernel_hash"], bytes) for kernel in compiled)

    def fail(device, kernel):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr("trainer.compile.kernels._compile", fail)
    with pytest.raises(RuntimeError, match="no ptxas"):
        compile_kernels(lowered, jax.devices()[0])


def test_other_programs_have_none():
    lowering = lower_in_stages(jax.jit(jnp.sin), 1.0)
    assert lowering.device is None
    assert find_kernels(lowering.lowered) == []
