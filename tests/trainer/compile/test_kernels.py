"""Kernels of a lowered program, compiled ahead of it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels import CausalMask, dot_product_attention
from tests.gpu_compiler import needs_gpu_compiler
from trainer.compile.kernels import PROGRAM_NAME, find_kernels
from trainer.compile.stages import compile_lowering, count_compilations, lower_in_stages, watch_compilations
from trainer.compile.topology import parse_topology

NEEDS_JAX_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need JAX 0.11")


def lower_attention(num_layers: int):
    """A gradient through layers of one attention each, for an H200 that isn't there."""
    [device] = parse_topology("h200:1").devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    attend = functools.partial(dot_product_attention, mask=CausalMask(), implementation="mosaic_gpu", device=device)

    def loss(x):
        for _ in range(num_layers):
            x = attend(x, x, x)
        return x.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16, sharding=sharding)
    return lower_in_stages(jax.jit(jax.grad(loss)), x)


@needs_gpu_compiler
@NEEDS_JAX_0_11
def test_a_kernel_of_many_layers_is_found_once():
    assert len(find_kernels(lower_attention(num_layers=2).lowered)) == 2  # one forward, one backward


@needs_gpu_compiler
@NEEDS_JAX_0_11
def test_kernels_are_compiled_as_a_part_of_their_program(monkeypatch):
    compiled = []
    monkeypatch.setattr("trainer.compile.stages.PROGRAM_NAME", "")
    with watch_compilations(lambda name, seconds: compiled.append((name, seconds))):
        _, report = compile_lowering(lower_attention(num_layers=1), name="gradient")
    names = [name for name, _ in compiled]
    assert names == [PROGRAM_NAME, PROGRAM_NAME, "loss"]
    assert report.compile_s > max(seconds for _, seconds in compiled)
    monkeypatch.undo()
    with count_compilations() as counts:
        compile_lowering(lower_attention(num_layers=1), name="gradient")
    assert counts == {"loss": 1}


def test_other_programs_have_none():
    lowering = lower_in_stages(jax.jit(jnp.sin), 1.0)
    assert lowering.device is None
    assert find_kernels(lowering.lowered) == []
