"""Matmuls of tokens and features that a few devices split: values, gradients, and whom the kernels can't serve."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.collectives import all_gather_matmul, choose_collectives, matmul_reduce_scatter
from tests.fresh_inputs import run_on_fresh_inputs
from tests.gpu_compiler import needs_gpu_compiler
from tests.kernels.tokens_on_devices import draw
from trainer.compile.hlo import parse_module
from trainer.compile.topology import parse_topology

# Of the roundings on the way to a value or a gradient, at most 45 in four layers, most cancel. In float32 a sum rounds,
# too, with each of its terms.
ROUNDINGS = {"bfloat16": 7, "float16": 7, "float32": 10}


def is_right(draw):
    return draw["is_exact"] and draw["difference"] < ROUNDINGS[draw["dtype"]]


@pytest.mark.usefixtures("eight_devices")
def test_xla_computes_what_numpy_does(rng):
    for num_ranks, dtype in zip((2, 3, 4), map(str, rng.permutation([*ROUNDINGS])), strict=True):
        found = draw(rng, num_ranks, dtype, "xla")
        assert is_right(found), found


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize("preallocates", ["true", "false"])
def test_kernels_compute_what_numpy_does(preallocates):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": preallocates, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
    # A draw compiles for 20 s or so, and a test may take 300 s.
    done = run_on_fresh_inputs(Path(__file__).parent / "tokens_on_devices.py", 8, environment=os.environ | memory)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["collectives"] for each in found] == ["mosaic_gpu"] * 8
    assert [each for each in found if not is_right(each)] == []


@pytest.mark.sample(1)
@needs_gpu_compiler
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "part", "features"),
    [
        (2, "bfloat16", (1, 16384, 2048), (1024, 1024, 1024)),
        (2, "float16", (3, 128, 192), (64, 320)),
        (4, "bfloat16", (1, 8192, 2048), (512, 512, 512)),
        (3, "float16", (2, 128, 192), (64, 320)),
    ],
)
def test_kernels_compile(num_ranks, dtype, part, features):
    batch, length, width = part
    mesh = mesh_of(parse_topology(f"h200:{num_ranks}").devices())
    chosen = choose_collectives(mesh, "tensor", part, features, dtype, "mosaic_gpu")
    assert chosen == ("mosaic_gpu", None, 132)

    def there_and_back(tokens, matrices, back):
        products = all_gather_matmul(tokens, matrices, "tensor", chosen)
        return matmul_reduce_scatter(products[-1], back, "tensor", chosen)

    specs = P(None, "tensor"), (P(None, "tensor"),) * len(features), P("tensor")
    mapped = jax.shard_map(there_and_back, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    shapes = (
        (batch, num_ranks * length, width),
        tuple((width, num_ranks * size) for size in features),
        (num_ranks * features[-1], width),
    )
    arrays = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
    gradient = jax.jit(jax.grad(lambda *arrays: mapped(*arrays).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    compiled = gradient.lower(*arrays).compile()
    # The sum's value isn't asked for: no kernel multiplies back. The others are one there, and two for the gradients.
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 3


@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_no_kernel_is_called_on_a_slice_of_a_larger_array():
    """XLA would tell it of other memory on the other GPU."""
    part, features, num_layers = (1, 256, 128), (64, 192), 3
    batch, length, width = part
    mesh = mesh_of(parse_topology("h200:2").devices())
    chosen = choose_collectives(mesh, "tensor", part, features, "bfloat16")

    def layers(tokens, matrices, back):
        def layer(tokens, parameters):
            matrices, back = parameters
            products = all_gather_matmul(tokens, matrices, "tensor", chosen)
            return matmul_reduce_scatter(products[0], back, "tensor", chosen), products[1]

        return jax.lax.scan(layer, tokens, (matrices, back))

    of_layers = P(None, None, "tensor")
    specs = P(None, "tensor"), (of_layers, of_layers), P(None, "tensor")
    out_specs = specs[0], P(None, None, None, "tensor")
    mapped = jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def with_gradient(*arrays):
        outputs, vjp = jax.vjp(mapped, *arrays)
        return outputs, vjp(outputs)

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))

    arrays = (
        array(specs[0], batch, 2 * length, width),
        tuple(array(of_layers, num_layers, width, 2 * size) for size in features),
        array(specs[2], num_layers, 2 * features[0], width),
    )
    module = parse_module(jax.jit(with_gradient).lower(*arrays).compile().as_text())
    bodies = {
        called
        for each in module.computations.values()
        for i in each.instructions.values()
        if i.opcode == "while"
        for called in i.called()
    }
    where = [
        name
        for name, computation in module.computations.items()
        for instruction in computation.instructions.values()
        if instruction.opcode == "custom-call" and instruction.attribute("custom_call_target") == "mosaic_gpu_v2"
    ]
    # Two of the forward scan and two of the backward scan, each in the body of a loop.
    assert len(where) == 4
    assert set(where) <= bodies


def mesh_of(devices):
    return Mesh(np.array(devices).reshape(1, -1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def gpu(index, *, capability="9.0", process=0):
    """As much of a device as the choice looks at."""
    return SimpleNamespace(
        id=index,
        platform="gpu",
        device_kind="NVIDIA X",
        compute_capability=capability,
        core_count=132,
        process_index=process,
    )


def two(**changes):
    return [gpu(0, **changes), gpu(1, **changes)]


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("devices", "changes", "reason"),
    [
        ([gpu(i) for i in range(8)], {}, "2 to 4 devices, all of them along tensor, not for .*8"),
        (two(capability="8.0"), {}, r"Hopper GPUs \(compute capability 9.0\), not for 8.0"),
        ([gpu(0), gpu(1, process=1)], {}, "GPUs of one process"),
        ([gpu(2), gpu(3)], {}, r"first 2 GPUs in their order, not for \[2, 3\]"),
        ([gpu(1), gpu(0)], {}, r"first 2 GPUs in their order, not for \[1, 0\]"),
        (two(), {"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        (two(), {"part": (1, 192, 64)}, "tokens in multiples of 128, not 192"),
        (two(), {"part": (1, 128, 96)}, "features in multiples of 64, not 96"),
        (two(), {"features": (64, 32)}, "features in multiples of 64, not 32"),
    ],
)
def test_kernels_say_whom_they_cannot_serve(devices, changes, reason):
    mesh = SimpleNamespace(
        size=len(devices), shape={"data": 1, "tensor": len(devices)}, devices=np.array(devices).reshape(1, -1)
    )
    call = {"part": (1, 128, 64), "features": (64, 64), "dtype": "bfloat16"} | changes
    chosen = choose_collectives(mesh, "tensor", **call)
    assert chosen.name == "xla"
    with pytest.raises(ValueError, match=rf"can't serve: it .*{reason}.*use 'xla', or None for the fastest"):
        choose_collectives(mesh, "tensor", **call, named="mosaic_gpu")
    assert choose_collectives(mesh, "tensor", **call, named="xla") == ("xla", None, None)


@pytest.mark.jax_0_11
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_kernels_are_taken_on_up_to_four_gpus(num_ranks):
    devices = np.array([gpu(i) for i in range(num_ranks)]).reshape(1, num_ranks)
    mesh = SimpleNamespace(size=num_ranks, shape={"data": 1, "tensor": num_ranks}, devices=devices)
    chosen = choose_collectives(mesh, "tensor", (1, 128, 64), (64,), "bfloat16")
    if num_ranks <= 4:
        assert chosen == ("mosaic_gpu", None, 132)
    else:
        assert chosen.passed_over.startswith("is for meshes of 2 to 4 devices, all of them along tensor, not for")


@pytest.mark.jax_0_11
def test_kernels_are_not_for_calls_within_another_map():
    """Mosaic would be given a mesh without device ids."""
    mesh, seen = mesh_of(jax.devices()[:1]), []
    two_gpus = SimpleNamespace(size=2, shape={"data": 1, "tensor": 2}, devices=np.array(two()).reshape(1, 2))

    def on_device(x):
        seen.append(choose_collectives(two_gpus, "tensor", (1, 128, 64), (64,), "bfloat16").passed_over)
        return x

    assert choose_collectives(two_gpus, "tensor", (1, 128, 64), (64,), "bfloat16").passed_over is None
    jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"})(jnp.ones(1))
    assert seen == ["is for calls within a jax.shard_map of all axes, or of none, not of data"]


@pytest.mark.jax_0_11
@pytest.mark.parametrize(("value", "is_served"), [("", False), ("=true", False), ("=1", False), ("=false", True)])
def test_kernels_are_not_for_collectives_that_start_beside_them(value, is_served, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--a=1 --xla_gpu_enable_latency_hiding_scheduler{value} --b")
    mesh = SimpleNamespace(size=2, shape={"data": 1, "tensor": 2}, devices=np.array(two()).reshape(1, 2))
    reason = choose_collectives(mesh, "tensor", (1, 128, 64), (64,), "bfloat16").passed_over
    assert (reason is None) == is_served
    assert is_served or "latency-hiding scheduler" in reason


def test_an_abstract_mesh_has_no_gpus_that_could_be_reached():
    mesh = AbstractMesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    chosen = choose_collectives(mesh, "tensor", (1, 128, 64), (64,), "bfloat16")
    assert chosen == ("xla", "is for GPUs that are known, not for an abstract mesh", None)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="collectives='nccl' is not one of mosaic_gpu, xla, or None"):
        choose_collectives(mesh_of(jax.devices()[:1]), "tensor", (1, 128, 64), (64,), "bfloat16", "nccl")
