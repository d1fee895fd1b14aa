"""The mixture of experts in float64 against a loop over experts that sends every token through each of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from kernels import Target
from kernels.experts import choose_grouped_matmul, copy_rows, group_rows
from layers import MoEConfig, experts
from layers.moe import MoE, RouterSums

WIDTH = 12


def make_moe(rng, config, *, kind="swiglu", compute_dtype="float64"):
    """A layer with random parameters, and these by name."""
    moe = MoE(WIDTH, config, kind=kind, compute_dtype=compute_dtype, param_dtype="float64", rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(moe)
    params = nnx.to_pure_dict(state)
    return graphdef, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.7, leaf.shape)), params)


def apply_moe(graphdef, params, inputs, counted=None):
    return nnx.merge(graphdef, params)(inputs, counted)


def choose(logits, num_chosen):
    """Which experts each token goes to, [N, E] of bools: those of the highest logits, of equal ones the first."""
    chosen = np.zeros(logits.shape, bool)
    for token, of_token in enumerate(np.asarray(logits)):
        for expert in sorted(range(len(of_token)), key=lambda e: (-of_token[e], e))[:num_chosen]:
            chosen[token, expert] = True
    return chosen


def gated(kind, gate, up):
    if kind == "swiglu":
        return gate / (1 + jnp.exp(-gate)) * up
    if kind == "geglu":
        return gate / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)


def router_logits(params, inputs):
    return inputs.reshape(-1, WIDTH) @ params["router"]["kernel"] + params["router"].get("bias", 0)


def oracle(params, inputs, config, kind, chosen):
    """The output of each token, from all experts' outputs for all tokens."""
    tokens, logits = inputs.reshape(-1, WIDTH), router_logits(params, inputs)
    powers = jnp.exp(logits - logits.max(1, keepdims=True))
    weights = powers / jnp.where(chosen | (not config.normalize_top_k), powers, 0).sum(1, keepdims=True)

    def linear(name, x):
        matrix = params["experts"][name]
        outputs = jnp.einsum("...i,eio->e...o" if x.ndim == 2 else "e...i,eio->e...o", x, matrix["kernel"])
        return outputs + (matrix["bias"][:, None] if config.expert_bias else 0)

    up = linear("up", tokens)
    hidden = gated("geglu", up, 1) if kind == "gelu" else gated(kind, linear("gate", tokens), up)
    outputs = jnp.einsum("ne,enw->nw", jnp.where(chosen, weights, 0), linear("down", hidden))
    return outputs.reshape(inputs.shape)


def choose_as_router(params, inputs, config):
    return choose(router_logits(params, inputs), config.num_experts_per_token)


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), actual, expected)


def assert_matches_oracle(graphdef, params, inputs, config, kind, rng):
    cotangent, chosen = jnp.asarray(rng.standard_normal(inputs.shape)), choose_as_router(params, inputs, config)

    def with_gradients(function):
        outputs, vjp = jax.vjp(function, params, inputs)
        return outputs, vjp(cotangent)

    actual, expected = jax.jit(
        lambda: (
            with_gradients(lambda params, inputs: apply_moe(graphdef, params, inputs)[0]),
            with_gradients(lambda params, inputs: oracle(params, inputs, config, kind, chosen)),
        )
    )()
    assert actual[0].dtype == jnp.float64
    assert_same(actual, expected)
    return actual


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("swiglu", {}),
        ("swiglu", {"normalize_top_k": False}),
        ("clamped_swiglu", {"router_bias": True, "expert_bias": True}),
        ("geglu", {"expert_bias": True, "normalize_top_k": False}),
        ("gelu", {"router_bias": True}),
    ],
)
def test_values_and_gradients_are_those_of_a_loop_over_experts(rng, float64, kind, changes):
    num_experts = int(rng.integers(2, 9))
    config = MoEConfig(num_experts, int(rng.integers(1, num_experts + 1)), int(rng.integers(1, 20)), **changes)
    graphdef, params = make_moe(rng, config, kind=kind)
    # Large enough for the clamps to bite.
    inputs = jnp.asarray(rng.normal(0, 4, (int(rng.integers(1, 4)), int(rng.integers(1, 12)), WIDTH)))
    assert_matches_oracle(graphdef, params, inputs, config, kind, rng)


def test_all_tokens_at_one_expert_and_experts_without_tokens(rng, float64):
    config = MoEConfig(num_experts=6, num_experts_per_token=1, expert_width=5, router_bias=True, expert_bias=True)
    graphdef, params = make_moe(rng, config)
    favourite = int(rng.integers(6))
    params["router"]["bias"] = params["router"]["bias"].at[favourite].add(1e3)
    inputs = jnp.asarray(rng.standard_normal((2, 7, WIDTH)))
    assert choose_as_router(params, inputs, config).sum(0).tolist() == np.eye(6, dtype=int)[favourite].dot(14).tolist()
    _, (gradient, _) = assert_matches_oracle(graphdef, params, inputs, config, "swiglu", rng)
    of_others = jax.tree.map(lambda leaf: np.abs(np.delete(leaf, favourite, axis=0)).max(), gradient["experts"])
    assert set(jax.tree.leaves(of_others)) == {0.0}


def test_of_experts_that_tie_the_first_are_chosen(rng, float64):
    config = MoEConfig(num_experts=5, num_experts_per_token=2, expert_width=4)
    graphdef, params = make_moe(rng, config)
    inputs = jnp.asarray(rng.standard_normal((1, 6, WIDTH)))
    params["router"]["kernel"] = jnp.zeros_like(params["router"]["kernel"])
    assert jax.jit(apply_moe, static_argnums=0)(graphdef, params, inputs)[1].choices.tolist() == [6, 6, 0, 0, 0]
    # Two pairs of equal experts, and one that equals the first pair.
    half = rng.standard_normal((WIDTH, 2))
    params["router"]["kernel"] = jnp.asarray(np.concatenate([half, half, half[:, :1]], axis=1))
    assert_matches_oracle(graphdef, params, inputs, config, "swiglu", rng)


def losses_by_numpy(logits, num_chosen, counted):
    """Load-balance loss and router z-loss of one layer, each a mean over tokens."""
    logits, num_experts = np.asarray(logits)[counted], logits.shape[1]
    log_partitions = np.log(np.exp(logits).sum(1))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    load = choose(logits, num_chosen).mean(0)
    return num_experts * (load * probabilities.mean(0)).sum(), (log_partitions**2).mean()


def test_router_losses_are_numpys_and_leave_padding_out(rng, float64):
    config = MoEConfig(num_experts=7, num_experts_per_token=3, expert_width=4, router_bias=True)
    graphdef, params = make_moe(rng, config)
    inputs = jnp.asarray(rng.standard_normal((2, 9, WIDTH)))
    counted = jnp.asarray(rng.random((2, 9)) < 0.6).at[0, 0].set(True)
    logits = np.asarray(router_logits(params, inputs))

    @jax.jit
    def losses(inputs):
        _, sums = apply_moe(graphdef, params, inputs, counted)
        count = counted.sum()
        return sums.load_balance(num_tokens=count) / count, sums.z_loss() / count

    assert_same(losses(inputs), losses_by_numpy(logits, 3, np.asarray(counted).ravel()))
    gradient = jax.jit(jax.grad(lambda inputs: sum(losses(inputs))))(inputs)
    assert (np.abs(gradient).max(-1) > 0).tolist() == counted.tolist()
    # By hand, with constant loads: the gradient of softmax's sums and of log-sum-exp's squares, each token by itself.
    num_tokens = int(counted.sum())
    powers = np.exp(logits)
    probabilities, log_partitions = powers / powers.sum(1, keepdims=True), np.log(powers.sum(1, keepdims=True))
    load = choose(logits, 3)[np.asarray(counted).ravel()].mean(0)
    slopes = probabilities * (7 * (load - probabilities @ load[:, None]) + 2 * log_partitions) / num_tokens
    slopes *= np.asarray(counted).reshape(-1, 1)
    assert_same(gradient.reshape(-1, WIDTH), slopes @ np.asarray(params["router"]["kernel"]).T)


def test_a_batchs_load_balance_loss_is_the_sum_of_its_parts(rng, float64):
    stacks = [
        RouterSums(jnp.asarray(rng.integers(0, 9, (3, 4))), jnp.asarray(rng.random((3, 4))), jnp.asarray(rng.random(3)))
        for _ in range(2)
    ]
    whole = jax.tree.map(jnp.add, *stacks)
    expected = np.mean(4 * (np.asarray(whole.choices) / 11 * np.asarray(whole.probabilities)).sum(1))
    assert_same(whole.load_balance(num_tokens=11), expected)
    assert_same(sum(part.load_balance(whole.choices, num_tokens=11) for part in stacks), expected)


def test_the_router_is_wider_than_the_experts(rng):
    config = MoEConfig(num_experts=64, num_experts_per_token=1, expert_width=4)
    moe = MoE(WIDTH, config, compute_dtype="bfloat16", rngs=nnx.Rngs(0))
    inputs = jnp.asarray(rng.standard_normal((1, 220, WIDTH)), jnp.bfloat16)
    logits = np.asarray(inputs, np.float64)[0] @ np.asarray(moe.router.kernel[...], np.float64)
    second, first = np.sort(logits)[:, -2:].T
    is_clear = np.flatnonzero(first - second > 1e-5)[:200]  # to float32
    inputs, logits = inputs[:, is_clear], logits[is_clear]
    outputs, sums = nnx.jit(lambda moe, inputs: moe(inputs))(moe, inputs)
    assert (outputs.dtype, sums.probabilities.dtype) == (jnp.bfloat16, jnp.float32)
    # Rounded to bfloat16, logits of 64 experts would tie or change places for some of 200 tokens.
    assert sums.choices.tolist() == np.bincount(logits.argmax(1), minlength=64).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpus_router_is_as_exact_as_float32(dtype, rng):
    moe = MoE(512, MoEConfig(num_experts=64, num_experts_per_token=2, expert_width=8), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(rng.standard_normal((300, 512)), dtype)
    cotangent = rng.standard_normal((300, 64)).astype(np.float32)
    kernel = np.asarray(moe.router.kernel[...], np.float64)
    logits, vjp = jax.jit(lambda tokens: jax.vjp(moe._logits, tokens))(tokens)
    (of_tokens,) = vjp(jnp.asarray(cotangent))
    # TF32 would be off by 2⁻¹¹.
    rounding = 2.0**-17 if dtype == "float32" else 2.0**-8
    expected = (np.asarray(tokens, np.float64) @ kernel, 2.0**-17), (cotangent.astype(np.float64) @ kernel.T, rounding)
    for found, (exact, tolerance) in zip((logits, of_tokens), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0, atol=tolerance * abs(exact).max())


def test_a_tokens_gradient_is_summed_over_its_copies_in_float32(rng):
    # 1 + 2⁻⁹ is 1 in bfloat16: added there one by one, eight of them would be lost.
    groups = group_rows(jnp.asarray(rng.permutation(9)), 9)
    choice = choose_grouped_matmul("bfloat16", (1,), Target.of(jax.devices("cpu")[0]))
    _, vjp = jax.vjp(lambda tokens: copy_rows(tokens, groups, 9, choice), jnp.ones((1, 1), jnp.bfloat16))
    gradients = jnp.asarray([1, *[2.0**-9] * 8], jnp.bfloat16)[groups.sources][:, None]
    assert vjp(gradients)[0].item() == 1 + 2.0**-6


@pytest.mark.sample(1)
@pytest.mark.jax_0_11
@pytest.mark.parametrize("kind", ["clamped_swiglu", "gelu"])
def test_on_the_kernels_of_a_gpu_in_the_interpreter(kind, rng, monkeypatch):
    """Values and gradients in bfloat16, of the layer with its copies, activation and sums, are XLA's in float32."""
    config = MoEConfig(num_experts=3, num_experts_per_token=2, expert_width=64, expert_bias=True)
    inputs, cotangent = (jnp.asarray(rng.standard_normal((1, 40, 64)), jnp.bfloat16) for _ in range(2))

    def with_gradients(dtype, implementation=None):
        given = {"kind": kind, "compute_dtype": dtype, "implementation": implementation}
        moe = MoE(64, config, **given, rngs=nnx.Rngs(seed))
        graphdef, params = nnx.split(moe)
        run = jax.jit(lambda params, inputs: nnx.merge(graphdef, params)(inputs)[0])
        outputs, vjp = jax.vjp(run, params, inputs.astype(dtype))
        return outputs, vjp(cotangent.astype(dtype))

    seed = int(rng.integers(2**31))
    expected = with_gradients("float32")
    choose = functools.partial(choose_grouped_matmul, interpret=True)
    monkeypatch.setattr(experts, "choose_grouped_matmul", choose)
    found = with_gradients("bfloat16", "mosaic_gpu")
    for actual, alone in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        actual, alone = np.asarray(actual, np.float64), np.asarray(alone, np.float64)
        np.testing.assert_allclose(actual, alone, rtol=2**-5, atol=2**-5 * abs(alone).max())


def test_a_gradient_within_a_shard_map_that_checks_what_varies(rng, monkeypatch):
    # As on a GPU, whose router multiplies parts of 16 bits: its gradient is summed over the ranks.
    monkeypatch.setattr(MoE, "_target", Target("gpu", "NVIDIA A100", 8.0, 108))
    config = MoEConfig(num_experts=4, num_experts_per_token=2, expert_width=4)
    moe = MoE(WIDTH, config, compute_dtype="bfloat16", rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(moe)
    inputs = jnp.asarray(rng.standard_normal((2, 5, WIDTH)), jnp.bfloat16)

    def loss(params, inputs):
        outputs, sums = nnx.merge(graphdef, params)(inputs)
        return outputs.astype(jnp.float32).sum() + sums.z_loss()

    def summed(params, inputs):
        return jax.lax.psum(loss(params, inputs), "data")

    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    sharded = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    gradient, expected = (jax.jit(jax.grad(f))(params, inputs) for f in (sharded, loss))
    for actual, alone in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        # The experts' gradients are sums of bfloat16, in another order.
        np.testing.assert_allclose(actual, alone, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float32"])
def test_a_batch_without_tokens_comes_back_empty(compute_dtype, rng):
    moe = MoE(
        WIDTH,
        MoEConfig(num_experts=4, num_experts_per_token=2, expert_width=6),
        compute_dtype=compute_dtype,
        rngs=nnx.Rngs(0),
    )
    output, _ = moe(jnp.ones((0, 3, WIDTH)))
    assert output.shape == (0, 3, WIDTH)
