"""Masks as data through the layers: trees equal their branches, and bounds equal the masks that they describe."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kernels import (
    Bounds,
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    block_bounds,
    tree_bounds_of_parents,
    window_bounds,
)
from kernels.context import shard_sequence
from layers import GPT, ActivationSharding, Attention, GPTConfig, attention_fn

WINDOW = CausalMask() & LocalMask(5, 0)
CONFIG = GPTConfig(
    vocab_size=32,
    num_layers=4,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    masks=(CausalMask(), WINDOW, ChunkedCausalMask(8)),
    sinks=True,
    implementation="reference",
    compute_dtype="float32",
)


@pytest.fixture
def config():
    with jax.enable_x64(True):
        yield dataclasses.replace(CONFIG, compute_dtype="float64", param_dtype="float64")


def make_model(config, rng, activation_sharding=None):
    make = lambda: GPT(config, rngs=nnx.Rngs(0), activation_sharding=activation_sharding)  # noqa: E731
    graphdef, state = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state))


def assert_same(actual, expected, tolerance):
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * float(jnp.abs(theirs).max()))


class Tree:
    """Two trees with nodes below nodes, their tokens in depth-first order, and their branches as rows of their own."""

    # A prompt with two completions, of which the first goes on in two ways; then a prompt with one completion.
    parents = np.array([-1, 0, 1, 1, 0, -1, 5])

    def __init__(self, rng):
        self.lengths = rng.integers(2, 9, len(self.parents))
        self.length = int(self.lengths.sum()) + 3  # padding
        self.tokens = rng.integers(0, CONFIG.vocab_size, self.length)
        first = np.cumsum(self.lengths) - self.lengths
        ways = [[*range(first[node], first[node] + self.lengths[node])] for node in range(len(self.parents))]
        for node, parent in enumerate(self.parents):
            ways[node] = (ways[parent] if parent >= 0 else []) + ways[node]
        self.branches = [ways[leaf] for leaf in (2, 3, 4, 6)]
        self.weights = rng.normal(0, 1, self.length)  # policy gradients have a sign
        self.positions, self.before = np.arange(3).repeat(self.length)[: self.length], np.full(self.length, -1)
        for branch in self.branches:
            self.positions[branch] = np.arange(len(branch))
            self.before[branch[1:]] = branch[:-1]

    def loss(self, model):
        """Each token's loss from the hidden state of the token before it in its branch."""
        bounds = tree_bounds_of_parents(self.parents, self.lengths, self.length)
        hidden = model(self.tokens[None], None, self.positions[None], bounds=bounds)
        log_p = jax.nn.log_softmax(model.logits(hidden))[0]
        losses = -log_p[self.before, self.tokens] * self.weights
        return jnp.where(self.before >= 0, losses, 0).sum()

    def loss_of_branches(self, model):
        """The same of the branches, without a shared token's second loss."""
        rows = np.full((len(self.branches), max(map(len, self.branches))), -1)
        for row, branch in zip(rows, self.branches, strict=True):
            row[: len(branch)] = branch
        _, first = np.unique(rows[:, 1:], return_index=True)
        is_counted = np.isin(np.arange(rows[:, 1:].size), first).reshape(rows[:, 1:].shape) & (rows[:, 1:] >= 0)
        log_p = jax.nn.log_softmax(model.logits(model(self.tokens[rows])))[:, :-1]
        losses = -jnp.take_along_axis(log_p, self.tokens[rows[:, 1:], None], -1)[..., 0] * self.weights[rows[:, 1:]]
        return jnp.where(is_counted, losses, 0).sum()


@pytest.mark.parametrize(
    "changes",
    [
        {"remat": "full"},
        {"remat": "none", "scan_layers": False, "implementation": "blockwise"},
    ],
    ids=["scan", "layer by layer"],
)
def test_a_tree_is_its_branches(rng, config, changes):
    tree, model = Tree(rng), make_model(dataclasses.replace(config, **changes), rng)
    of_tree = nnx.jit(nnx.value_and_grad(tree.loss))(model)
    of_branches = nnx.jit(nnx.value_and_grad(tree.loss_of_branches))(model)
    assert_same(of_tree, of_branches, 1e-12)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_each_layer_gets_the_bounds_of_its_entry_in_the_pattern(rng, config, scan_layers):
    """The layers are alike but for the bounds, and one is left over."""
    config = dataclasses.replace(config, num_layers=4, scan_layers=scan_layers, masks=(CausalMask(),) * 3)
    tokens = rng.integers(0, 32, (2, 19))
    bounds = [window_bounds(np.array([5, 5]), 19), None, window_bounds(2, 19)]
    static = dataclasses.replace(config, masks=(WINDOW, CausalMask(), CausalMask() & LocalMask(2, 0)))
    model = make_model(config, rng)
    expected_model = nnx.merge(nnx.split(make_model(static, rng))[0], nnx.state(model))

    def loss(model, bounds):
        return jnp.square(model(tokens, bounds=bounds)).sum()

    run = nnx.jit(nnx.value_and_grad(loss))
    assert_same(run(model, bounds), run(expected_model, None), 1e-12)
    one = bounds[2]
    np.testing.assert_array_equal(*(nnx.jit(GPT.__call__)(model, tokens, bounds=each) for each in (one, [one] * 3)))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([Bounds()] * 2, "bounds has 2 entries for layers that repeat after 3; give one for each"),
        ([None, None, CausalMask()], "bounds must be kernels.Bounds, got CausalMask"),
        (Bounds(k_end=np.ones(7, int)), r"bounds.k_end must be integers \[1, 8\] or \[8\], got int64\(7,\)"),
    ],
)
def test_a_model_refuses(rng, bounds, message):
    model = make_model(CONFIG, rng)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: model(jnp.zeros((1, 8), jnp.int32), bounds=bounds))


def test_bounds_that_the_caller_gave_for_queries_stay(rng):
    """On positions, a mask that looks back adds its own bound of each key's queries."""
    given = Bounds(q_start=rng.integers(0, 20, 20).astype("int64"))
    layer = Attention(
        16, 2, mask=WINDOW, rope_base=None, compute_dtype="float32", implementation="reference", rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(rng.standard_normal((1, 20, 16)), jnp.float32)
    at_zero = jnp.zeros((1, 20), jnp.int32)  # every key is in every window
    causal = Attention(
        16, 2, mask=FullMask(), rope_base=None, compute_dtype="float32", implementation="reference", rngs=nnx.Rngs(0)
    )
    expected = causal(x, bounds=given._replace(q_start=np.maximum(given.q_start, np.arange(20))))
    np.testing.assert_allclose(layer(x, positions=at_zero, bounds=given), expected, atol=1e-6)


AXES = ("data", "fsdp", "tensor", "context")


def sharding_of(**sizes):
    sizes = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: int(np.prod(sizes))]
    return ActivationSharding(jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 4, devices=devices))


@pytest.mark.usefixtures("eight_devices")
def test_a_mesh_that_splits_no_sequence_gives_the_same(rng):
    config = dataclasses.replace(CONFIG, masks=(FullMask(),))
    ids = rng.integers(-2, 3, (4, 5)).repeat(4, axis=1)
    tokens = rng.integers(0, 32, ids.shape).astype(np.int32)
    seed = int(rng.integers(2**31))
    results = []
    for sharding in (None, sharding_of(data=2, fsdp=2, tensor=2)):
        model = make_model(config, np.random.default_rng(seed), sharding)
        bounds = block_bounds(ids, left=5)
        if sharding is not None:
            spec = NamedSharding(sharding.mesh, PartitionSpec(("data", "fsdp")))
            tokens, bounds = jax.device_put((tokens, bounds), spec)

        def loss(model, tokens, bounds):
            return jnp.square(model(tokens, bounds=bounds)).sum()

        results.append(jax.device_get(nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(model, tokens, bounds))))
    assert_same(*results[::-1], 1e-4)


def draw_tokens(rng, length):
    """Positions that restart anywhere, and bounds that hold back some keys and some queries."""
    positions, index = rng.integers(0, length // 2, (2, length)).astype(np.int32), np.arange(length)
    return positions, Bounds(
        k_start=rng.integers(0, 1 + index, (2, length)), q_end=rng.integers(index, 1 + length, (2, length))
    )


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("exchange", ["all_gather", "ring", "all_to_all"])
def test_a_mesh_that_splits_sequences_gives_the_same(rng, exchange):
    order, inputs = shard_sequence("zigzag", 32, 4), jnp.asarray(rng.standard_normal((2, 32, 16)), jnp.float32)
    positions, bounds = draw_tokens(rng, 32)

    def attend(order, activation_sharding=None, token_order=None):
        options = {"compute_dtype": "float32", "implementation": "reference", "rngs": nnx.Rngs(0)}
        layer = Attention(16, 4, mask=WINDOW, activation_sharding=activation_sharding, **options)
        own_bounds = jax.tree.map(lambda bound: bound[..., order], bounds)
        tokens = {"positions": positions[:, order], "token_order": token_order, "bounds": own_bounds}
        return nnx.jit(lambda layer, inputs: layer(inputs, **tokens))(layer, inputs[:, order])

    sharding = dataclasses.replace(sharding_of(context=4), sequence_sharding="zigzag", exchange=exchange)
    expected = attend(np.arange(32))[:, order]
    np.testing.assert_allclose(attend(order, sharding, np.stack([order, order])), expected, atol=1e-5)
    with pytest.raises(ValueError, match="another order, and bounds but no token_order were given; pass token_order"):
        attend(order, sharding)


@pytest.mark.usefixtures("eight_devices")
def test_a_part_of_the_sequences_gives_the_same_within_a_shard_map(rng):
    seed, sharding = int(rng.integers(2**31)), sharding_of(context=2)
    tokens, (positions, bounds) = rng.integers(0, 32, (2, 32)), draw_tokens(rng, 32)

    def run(activation_sharding):
        model = make_model(CONFIG, np.random.default_rng(seed), activation_sharding)
        return lambda tokens, positions, bounds: model(tokens, None, positions, bounds=bounds)

    spec = PartitionSpec(None, "context")
    on_mesh = jax.shard_map(run(sharding), mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    results = (jax.device_get(jax.jit(each)(tokens, positions, bounds)) for each in (on_mesh, run(None)))
    assert_same(*results, 1e-4)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_flax_modules_get_bounds_by_partial(rng, batch):
    inputs = jnp.asarray(rng.standard_normal((*batch, 10, 8)), jnp.float32)
    bounds = window_bounds(rng.integers(0, 9, batch), 10)
    dense = bounds.allowed(10, 10)[..., None, :, :] & np.tri(10, dtype=bool)
    make = functools.partial(nnx.MultiHeadAttention, 2, 8, decode=False)
    module = make(rngs=nnx.Rngs(0))
    expected = module(inputs, mask=dense)

    @nnx.jit
    def attend(module, inputs, bounds):
        module.attention_fn = functools.partial(attention_fn(CausalMask(), implementation="reference"), bounds=bounds)
        outputs = module(inputs)
        module.attention_fn = nnx.dot_product_attention
        return outputs

    np.testing.assert_allclose(attend(module, inputs, bounds), expected, atol=1e-5)
    variables = nn.MultiHeadDotProductAttention(2).init(jax.random.key(0), inputs)

    @jax.jit
    def attend_in_linen(variables, inputs, bounds):
        function = functools.partial(attention_fn(CausalMask(), implementation="reference"), bounds=bounds)
        return nn.MultiHeadDotProductAttention(2, attention_fn=function).apply(variables, inputs)

    expected = nn.MultiHeadDotProductAttention(2).apply(variables, inputs, mask=dense)
    np.testing.assert_allclose(attend_in_linen(variables, inputs, bounds), expected, atol=1e-5)


def test_a_decoding_step_in_flax_refuses_bounds():
    query, key = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 9, 2, 4))
    with pytest.raises(ValueError, match=r"one query against 9 keys is a decoding step.* bounds can't be applied"):
        attention_fn()(query, key, key, bounds=Bounds(k_end=np.ones(1, int)))
