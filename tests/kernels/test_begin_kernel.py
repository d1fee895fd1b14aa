"""Mosaic GPU kernels are lowered by one thread at a time."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import CausalMask, dot_product_attention
from kernels.hopper.begin_kernel import refuse_other_threads
from tests.gpu_compiler import needs_gpu_compiler
from trainer.compile.topology import parse_topology


def test_a_thread_within_jaxs_lowering_is_refused_until_it_leaves():
    is_inside, may_leave, has_left, may_end = (threading.Event() for _ in range(4))

    def wait():
        is_inside.set()
        assert may_leave.wait(60)

    lowering = {"__name__": "jax._src.pallas.mosaic_gpu.lowering", "wait": wait}
    exec("def lower():\n    wait()", lowering)

    def run():
        lowering["lower"]()
        has_left.set()
        assert may_end.wait(60)

    thread = threading.Thread(target=run)
    refuse_other_threads()
    thread.start()
    assert is_inside.wait(60)
    with pytest.raises(RuntimeError, match="one thread to lower Mosaic GPU kernels at a time, got two"):
        refuse_other_threads()
    may_leave.set()
    assert has_left.wait(60)
    refuse_other_threads()
    may_end.set()
    thread.join()


@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_another_thread_that_lowers_a_kernel_is_refused():
    device = parse_topology("h100:1").devices()[0]
    array = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    is_lowering, may_end, failures = threading.Event(), threading.Event(), []

    def attend(x):
        return dot_product_attention(x, x, x, CausalMask(), implementation="mosaic_gpu", device=device)

    def other_kernel(x):
        def body(x, output):
            @plgpu.inline_mgpu()
            def wait(context) -> None:
                is_lowering.set()
                assert may_end.wait(60)

            wait()
            output[...] = x[...]

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(1,), grid_names=("i",))(x)

    def lower_other():
        vector = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=array.sharding)
        try:
            jax.jit(other_kernel).lower(vector)
        except Exception as failure:
            failures.append(failure)
        finally:
            is_lowering.set()

    thread = threading.Thread(target=lower_other)
    thread.start()
    assert is_lowering.wait(60)
    traced = jax.jit(attend).trace(array)  # tracing is no lowering
    try:
        assert thread.is_alive(), failures
        with pytest.raises(RuntimeError, match="one thread to lower Mosaic GPU kernels at a time, got two"):
            traced.lower()
    finally:
        may_end.set()
        thread.join()
    assert not failures
    assert "mosaic_gpu_v2" in traced.lower().as_text()
