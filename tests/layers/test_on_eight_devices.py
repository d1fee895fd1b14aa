"""Layers on a mesh of eight CPU devices compute what they compute on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kernels import BlockwiseTuning, CausalMask, LocalMask, MultiHeadMask, PrefixMask, dot_product_attention
from layers import GPT, MLP, ActivationSharding, Attention, GPTConfig

pytestmark = pytest.mark.usefixtures("eight_devices")

BATCH, LENGTH, WIDTH = 4, 64, 32
AXES = ("data", "fsdp", "tensor", "context")

# Compiles fastest. Without it the default backend runs, on queries whose positions are known at run time only.
REFERENCE = {"implementation": "reference"}


def make_mesh(sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 4, devices=devices)


def packed_documents(rng):
    """Two documents a row, cut where no shard boundary is."""
    first = rng.integers(3, LENGTH - 3, (BATCH, 1))
    indices = np.arange(LENGTH)[None]
    segment_ids = np.where(indices < first, 1, 2).astype(np.int32)
    return segment_ids, np.where(indices < first, indices, indices - first).astype(np.int32)


def check_module(make_module, sizes, inputs, rng):
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
            placement = NamedSharding(sharding.mesh, PartitionSpec(("data", "fsdp"), "context"))
        arrays = [jax.device_put(x, placement) if placement else jnp.asarray(x) for x in inputs]

        def loss(parameters, *arrays, graphdef=graphdef):
            outputs = nnx.merge(graphdef, parameters)(*arrays)
            return jnp.square(outputs.astype(jnp.float32)).sum(), outputs

        (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters, *arrays)
        results.append((outputs, gradients))
    check_alike(*results)


def check_alike(expected, found):
    for actual, desired in zip(*map(jax.tree.leaves, jax.device_get((found, expected))), strict=True):
        assert np.abs(actual - desired).max() < 1e-4 * np.abs(desired).max()


@pytest.mark.parametrize(
    ("sizes", "has_documents", "options"),
    # Mesh sizes over (data, fsdp, tensor, context), then what the layer is given.
    [
        ((1, 1, 1, 1), True, REFERENCE | {"mask": CausalMask()}),
        ((1, 1, 1, 8), True, {"mask": CausalMask() & LocalMask(9, 0)}),
        ((1, 1, 1, 8), False, REFERENCE | {"mask": CausalMask() & LocalMask(9, 0)}),
        # Not the same wherever a document begins.
        ((1, 2, 1, 4), True, REFERENCE | {"mask": CausalMask() | PrefixMask(5)}),
        ((1, 1, 2, 4), True, REFERENCE | {"mask": CausalMask(), "sinks": True, "qk_norm": "per_head"}),
        ((2, 2, 2, 1), True, REFERENCE | {"mask": CausalMask(), "sinks": True, "logits_soft_cap": 2.0}),
        (
            (2, 1, 1, 4),
            True,
            REFERENCE | {"mask": MultiHeadMask([CausalMask(), CausalMask() & LocalMask(3, 0)] * 2)},
        ),
    ],
)
def test_attention(sizes, has_documents, options, rng):
    def make_attention(activation_sharding):
        options_of_all = {"num_kv_heads": 2, "compute_dtype": "float32", "rngs": nnx.Rngs(0)}
        return Attention(WIDTH, 4, activation_sharding=activation_sharding, **options_of_all, **options)

    inputs = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    check_module(make_attention, sizes, (inputs, *(packed_documents(rng) if has_documents else ())), rng)


def test_tokens_know_their_positions_within_a_shard_map():
    sharding = ActivationSharding(make_mesh((1, 2, 2, 2)))
    assert sharding.token_order(8).tolist() == [[*range(8)]]
    assert sharding.whole_length(8) == 8

    def indices(tokens):
        assert sharding.whole_length(tokens.shape[1]) == 8
        return sharding.token_order(tokens.shape[1])

    tokens = PartitionSpec(None, "context")
    mapped = jax.shard_map(indices, mesh=sharding.mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    assert jax.jit(mapped)(jnp.zeros((1, 8))).tolist() == [[*range(8)]]


@pytest.mark.parametrize("hidden_width", [64, 65])
def test_mlp(hidden_width, rng):
    """65 hidden features don't divide into `tensor`; 64 do, with tokens of the same axis."""

    def make_mlp(activation_sharding):
        options = {"kind": "swiglu", "use_bias": True, "compute_dtype": "float32", "rngs": nnx.Rngs(0)}
        return MLP(WIDTH, hidden_width, activation_sharding=activation_sharding, **options)

    inputs = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    check_module(make_mlp, (2, 1, 2, 2), (inputs,), rng)


def test_gpt(rng):
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

    check_module(make_gpt, (1, 2, 2, 2), (tokens, *packed_documents(rng)), rng)


def test_kernels_under_a_shard_map_as_it_comes(rng):
    """It checks what varies. Batch and heads are split, sinks replicated."""
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
    check_alike(*(run((query, key, value, sinks), function) for function in (attend, split)))


def test_no_remat_policy_sends_keys_round_a_ring_twice_in_the_forward_direction():
    sharding = ActivationSharding(make_mesh((1, 1, 1, 4)), exchange="ring")

    def count_hops(remat):
        """The hops of a ring in the program of a GPT's gradient, its loops counted once."""
        sizes = {"vocab_size": 64, "num_layers": 2, "width": WIDTH, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        config = GPTConfig(**sizes, mlp_width=64, remat=remat, compute_dtype="float32", **REFERENCE)
        make = lambda: GPT(config, rngs=nnx.Rngs(0), activation_sharding=sharding)  # noqa: E731
        graphdef, state = nnx.split(nnx.eval_shape(make))
        loss = lambda state, tokens: nnx.merge(graphdef, state)(tokens).sum()  # noqa: E731
        tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
        return str(jax.make_jaxpr(jax.grad(loss))(state, tokens)).count("ppermute[")

    hops = {remat: count_hops(remat) for remat in ("none", "full", "save_attention", "offload_inputs")}
    assert hops["none"] > 0
    assert set(hops.values()) == {hops["none"]}
