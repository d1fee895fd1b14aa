"""Compares attention split over eight devices with one device's; run as a program by test_activation_sharding.py.

Prints a JSON object: for each case the largest difference of outputs and of gradients, relative to the largest value.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kernels import BlockwiseTuning, CausalMask, LocalMask, MultiHeadMask, PrefixMask, dot_product_attention
from layers import GPT, MLP, ActivationSharding, Attention, GPTConfig

BATCH, LENGTH, WIDTH = 4, 64, 32
AXES = ("data", "fsdp", "tensor", "context")

# Compiles fastest. Without it the default backend runs, on queries whose positions are known at run time only.
REFERENCE = {"implementation": "reference"}

# Mesh sizes over (data, fsdp, tensor, context), then what the layer is given.
ATTENTION_CASES = {
    "all axes of size 1": ((1, 1, 1, 1), REFERENCE | {"mask": CausalMask()}),
    "context": ((1, 1, 1, 8), {"mask": CausalMask() & LocalMask(9, 0)}),
    "context, a mask that isn't translation invariant": ((1, 2, 1, 4), {"mask": CausalMask() | PrefixMask(5)}),
    "context and tensor, sinks and QK-norm": (
        (1, 1, 2, 4),
        REFERENCE | {"mask": CausalMask(), "sinks": True, "qk_norm": "per_head"},
    ),
    "data, fsdp and tensor, soft cap": (
        (2, 2, 2, 1),
        REFERENCE | {"mask": CausalMask(), "sinks": True, "logits_soft_cap": 2.0},
    ),
    "context, heads differ": (
        (2, 1, 1, 4),
        REFERENCE | {"mask": MultiHeadMask([CausalMask(), CausalMask() & LocalMask(3, 0)] * 2)},
    ),
}


def make_mesh(sizes):
    num_devices = int(np.prod(sizes))
    return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 4, devices=jax.devices()[:num_devices])


def packed_documents(rng):
    """Two documents a row, cut where no shard boundary is."""
    first = rng.integers(3, LENGTH - 3, (BATCH, 1))
    places = np.arange(LENGTH)[None]
    segment_ids = np.where(places < first, 1, 2).astype(np.int32)
    return segment_ids, np.where(places < first, places, places - first).astype(np.int32)


def differences(make_module, sizes, inputs, rng):
    """Runs one device's module and the mesh's on the same parameters and inputs."""
    results = []
    parameters = None
    sharding = ActivationSharding(make_mesh(sizes))
    for activation_sharding in (None, sharding):
        graphdef, state = nnx.split(nnx.eval_shape(lambda s=activation_sharding: make_module(s)))
        if parameters is None:
            parameters = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), state)
        placement = None
        if activation_sharding is not None:
            spec = PartitionSpec(("data", "fsdp"), "context")
            placement = NamedSharding(sharding.mesh, spec)
        arrays = [jax.device_put(x, placement) if placement else jnp.asarray(x) for x in inputs]

        def loss(parameters, *arrays, graphdef=graphdef):
            outputs = nnx.merge(graphdef, parameters)(*arrays)
            return jnp.square(outputs.astype(jnp.float32)).sum(), outputs

        (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters, *arrays)
        results.append((jax.device_get(outputs), jax.device_get(gradients)))

    return compared(*results)


def differences_under_shard_map(rng):
    """The kernels inside `jax.shard_map` as it comes, checking what varies: batch and heads split, sinks replicated."""
    mesh = make_mesh((2, 2, 2, 1))
    query, key, value = (jnp.asarray(rng.standard_normal((BATCH, LENGTH, n, 8)), jnp.float32) for n in (4, 2, 2))
    heads, tokens = PartitionSpec(("data", "fsdp"), None, "tensor"), PartitionSpec(("data", "fsdp"))
    sinks, segment_ids = jnp.asarray(rng.standard_normal(4), jnp.float32), jnp.asarray(packed_documents(rng)[0])

    def attend(query, key, value, sinks, segment_ids):
        return dot_product_attention(
            query,
            key,
            value,
            CausalMask(),
            sinks=sinks,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            implementation=BlockwiseTuning(16, 16),
        )

    split = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, heads, heads, PartitionSpec("tensor"), tokens), out_specs=heads
    )

    def loss(arrays, attend):
        outputs = attend(*arrays, segment_ids)
        return jnp.square(outputs).sum(), outputs

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), expected_gradients = jax.device_get(run((query, key, value, sinks), attend))
    (_, outputs), gradients = jax.device_get(run((query, key, value, sinks), split))
    return compared((expected, expected_gradients), (outputs, gradients))


def count_hops(remat: str) -> int:
    """The hops of a ring in the program of a GPT's gradient, its loops counted once."""
    sharding = ActivationSharding(make_mesh((1, 1, 1, 4)), exchange="ring")
    sizes = {"vocab_size": 64, "num_layers": 2, "width": WIDTH, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = GPTConfig(**sizes, mlp_width=64, remat=remat, compute_dtype="float32")
    make = lambda: GPT(config, rngs=nnx.Rngs(0), activation_sharding=sharding)  # noqa: E731
    graphdef, state = nnx.split(nnx.eval_shape(make))
    loss = lambda state, tokens: nnx.merge(graphdef, state)(tokens).sum()  # noqa: E731
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return str(jax.make_jaxpr(jax.grad(loss))(state, tokens)).count("ppermute[")


def compared(expected, actual):
    """The largest relative difference of outputs and of gradients."""
    relative = lambda a, b: float(np.abs(a - b).max() / np.abs(a).max())  # noqa: E731
    return {
        "outputs": relative(expected[0], actual[0]),
        "gradients": float(np.max(jax.tree.leaves(jax.tree.map(relative, expected[1], actual[1])))),
    }


def main(seed: int) -> None:
    rng = np.random.default_rng(seed)
    segment_ids, positions = packed_documents(rng)
    found = {}
    for name, (sizes, changes) in ATTENTION_CASES.items():
        inputs = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)

        def make_attention(activation_sharding, changes=changes):
            return Attention(
                WIDTH,
                4,
                num_kv_heads=2,
                compute_dtype="float32",
                activation_sharding=activation_sharding,
                rngs=nnx.Rngs(0),
                **changes,
            )

        found[name] = differences(make_attention, sizes, (inputs, segment_ids, positions), rng)
        if name == "context":
            found[name + ", whole rows"] = differences(make_attention, sizes, (inputs,), rng)

    # 65 hidden features don't divide into `tensor`; 64 do, with tokens of the same axis.
    for hidden_width in (64, 65):

        def make_mlp(activation_sharding, hidden_width=hidden_width):
            return MLP(
                WIDTH,
                hidden_width,
                kind="swiglu",
                use_bias=True,
                compute_dtype="float32",
                activation_sharding=activation_sharding,
                rngs=nnx.Rngs(0),
            )

        inputs = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
        found[f"MLP, {hidden_width}"] = differences(make_mlp, (2, 1, 2, 2), (inputs,), rng)

    config = GPTConfig(
        vocab_size=64,
        num_layers=2,
        width=WIDTH,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=64,
        masks=(CausalMask() & LocalMask(9, 0),),
        remat="save_attention",
        compute_dtype="float32",
    )
    tokens = rng.integers(0, 64, (BATCH, LENGTH)).astype(np.int32)

    def make_gpt(activation_sharding):
        return GPT(config, rngs=nnx.Rngs(0), activation_sharding=activation_sharding)

    found["shard_map"] = differences_under_shard_map(rng)
    found["GPT"] = differences(make_gpt, (1, 2, 2, 2), (tokens, segment_ids, positions), rng)
    hops = {remat: count_hops(remat) for remat in ("none", "full", "save_attention", "offload_inputs")}
    print(json.dumps({"differences": found, "hops": hops}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
