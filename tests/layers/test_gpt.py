"""GPT: the scan, rematerialisation, packing, causality, and what is promised to the trainer."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from kernels import CausalMask, ChunkedCausalMask, LocalMask, PrefixMask
from layers import GPT, ActivationSharding, GPTConfig
from layers.remat import REMAT_POLICIES

WINDOW = CausalMask() & LocalMask(5, 0)
# 5 layers over a pattern of 2: two repeats in the scan and one layer left over. The reference compiles fastest; that
# backends agree with it is tests/kernels' business.
CONFIG = GPTConfig(
    vocab_size=64,
    num_layers=5,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    mlp="swiglu",
    tie_embeddings=False,
    masks=(WINDOW, CausalMask()),
    qk_norm="per_head",
    sinks=True,
    implementation="reference",
    compute_dtype="float32",
)


@pytest.fixture
def model(rng):
    return make_model(CONFIG, rng)


def make_model(config, rng):
    """A GPT whose parameters are large enough for every one of them to show."""
    graphdef, state = abstract(config)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state))


def abstract(config, activation_sharding=None):
    return nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0), activation_sharding=activation_sharding)))


@nnx.jit
def run(model, tokens, segment_ids=None, positions=None):
    return model(tokens, segment_ids, positions)


def loss_and_gradients(model, tokens, *ids_and_positions):
    def loss(model):
        return jnp.square(model.logits(model(tokens, *ids_and_positions))).mean()

    return nnx.jit(nnx.value_and_grad(loss))(model)


def test_a_window_that_no_position_reaches_trains_as_none(rng):
    small = dataclasses.replace(
        CONFIG, num_layers=1, masks=(CausalMask(),), mlp="gelu", qk_norm="none", sinks=False, rope_base=None,
        remat="none", scan_layers=False,
    )  # fmt: skip
    tokens = rng.integers(0, 64, (1, 12)).astype(np.int32)
    expected = loss_and_gradients(make_model(small, np.random.default_rng(7)), tokens)
    mask = (LocalMask(2**31 - 1, 0), ChunkedCausalMask(10**30), CausalMask() & PrefixMask(2**31))[rng.integers(3)]
    config = dataclasses.replace(small, masks=(mask,))
    config.check_looks_back_only()
    actual = loss_and_gradients(make_model(config, np.random.default_rng(7)), tokens)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def parameters(model):
    """Parameters by path, as the trainer's rules see them."""
    paths = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))[0]
    return {".".join(str(key.key) for key in path): leaf for path, leaf in paths}


def test_unrolled_layers_are_the_same_as_the_scan(rng, packed):
    model = make_model(dataclasses.replace(CONFIG, num_layers=3), rng)
    inputs = (packed.tokens, packed.segment_ids, packed.positions)
    loss, gradients = loss_and_gradients(model, *inputs)
    unrolled = with_config(model, scan_layers=False, remat="save_matmuls")
    unrolled_loss, unrolled_gradients = loss_and_gradients(unrolled, *inputs)
    np.testing.assert_allclose(unrolled_loss, loss, rtol=1e-5)
    for path, gradient in parameters(gradients).items():
        largest = float(jnp.abs(gradient).max())
        np.testing.assert_allclose(parameters(unrolled_gradients)[path], gradient, atol=1e-4 * largest, err_msg=path)


def test_what_layers_share_is_computed_once():
    """The rotary angles, and each stack's matrices in the compute dtype: not in every layer, nor again going back."""
    config = dataclasses.replace(CONFIG, num_layers=4, masks=(CausalMask(),), compute_dtype="bfloat16", remat="full")
    for scan_layers in (True, False):
        jaxpr = gradient_jaxpr(dataclasses.replace(config, scan_layers=scan_layers), None)
        assert count_equations(jaxpr, "cos") == count_equations(jaxpr, "sin") == 1
        casts = [
            equation.invars[0].aval.shape
            for equation in all_equations(jaxpr)
            if equation.primitive.name == "convert_element_type"
            and (equation.invars[0].aval.dtype, equation.params["new_dtype"]) == (jnp.float32, jnp.bfloat16)
        ]
        kernels = [
            path
            for path in parameters(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
            if path.startswith("blocks") and "kernel" in path
        ]
        assert len([shape for shape in casts if shape[:1] == (4,)]) == len(kernels)
        assert not set(casts) & {(16, 4, 4), (16, 2, 4), (4, 4, 16), (16, 24), (24, 16)}, "a layer's own cast"


def with_config(model, **changes):
    """The same parameters under a changed config."""
    graphdef, _ = abstract(dataclasses.replace(model.config, **changes))
    return nnx.merge(graphdef, nnx.state(model))


def all_equations(jaxpr):
    """The equations of a jaxpr and of all that it calls, a scan's body once."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for sub in jax.tree.leaves(value, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from all_equations(sub)


def count_equations(jaxpr, name):
    """How many of them are of one primitive."""
    return sum(equation.primitive.name == name for equation in all_equations(jaxpr))


def gradient_jaxpr(config, activation_sharding):
    graphdef, state = abstract(config, activation_sharding)
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    loss = lambda state, tokens: nnx.merge(graphdef, state)(tokens).sum()  # noqa: E731
    return jax.make_jaxpr(jax.grad(loss))(state, tokens).jaxpr


@pytest.mark.parametrize("on_mesh", [False, True], ids=["alone", "on a mesh"])
def test_remat_policies_recompute_what_they_say(on_mesh):
    axes = ("data", "fsdp", "tensor", "context")
    mesh = jax.make_mesh((1,) * 4, axes, (AxisType.Auto,) * 4, devices=jax.devices()[:1])
    sharding = ActivationSharding(mesh) if on_mesh else None
    config = dataclasses.replace(CONFIG, num_layers=1, masks=(CausalMask(),), implementation="blockwise", sinks=False)
    num = {
        remat: (count_equations(jaxpr, "while"), count_equations(jaxpr, "dot_general"))
        for remat in REMAT_POLICIES
        for jaxpr in [gradient_jaxpr(dataclasses.replace(config, remat=remat), sharding)]
    }
    none_loops, none_matmuls = num["none"]
    # The kernel's loops over FULL and PARTIAL tiles, forward and backward; "full" runs the forward's twice.
    forward_loops = none_loops // 2
    assert num["full"][0] == none_loops + forward_loops
    assert num["save_attention"][0] == none_loops
    assert num["save_matmuls"] == (none_loops, none_matmuls)
    assert num["save_attention"][1] > none_matmuls
    assert num["offload_attention"] == num["save_attention"]
    assert num["offload_inputs"] == num["full"]


@pytest.mark.parametrize("num_layers", [1, 4], ids=["layer by itself", "loop"])
def test_what_is_offloaded_waits_in_the_hosts_memory(num_layers):
    """A policy sends the activations that it names to the host, and they are fetched again once."""
    config = dataclasses.replace(CONFIG, num_layers=num_layers, masks=(CausalMask(),), implementation="blockwise")
    hidden, output, lse = (1, 32, 16), (1, 32, 4, 4), (1, 32, 4)
    for scan_layers in {True, num_layers > 1}:
        of_policy = {"full": [], "offload_inputs": [hidden], "offload_attention": [hidden, output, lse]}
        for remat, expected in of_policy.items():
            jaxpr = gradient_jaxpr(dataclasses.replace(config, remat=remat, scan_layers=scan_layers), None)
            sent, fetched = moved(jaxpr, jax.memory.Space.Host), moved(jaxpr, jax.memory.Space.Device)
            times = 1 if scan_layers else num_layers
            assert sorted(sent) == sorted(expected * times)
            assert sorted(fetched) == sorted(expected * times)


def moved(jaxpr, space):
    """Shapes of what is moved into a memory."""
    return [
        equation.outvars[0].aval.shape
        for equation in all_equations(jaxpr)
        if equation.primitive.name == "device_put" and equation.outvars[0].aval.memory_space == space
    ]


@pytest.mark.parametrize(
    ("num_layers", "barriers"),
    [(5, [False, False, True]), (4, [False, False]), (3, [True, True, True])],
    ids=["loop and a layer left over", "loop", "loop of one repeat and a layer left over"],
)
def test_recomputation_has_a_barrier_only_where_no_loop_keeps_it_apart(num_layers, barriers):
    graphdef, state = abstract(dataclasses.replace(CONFIG, num_layers=num_layers))
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, tokens).jaxpr
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    equations = [eqn for sub in (*bodies, jaxpr) for eqn in sub.eqns]
    assert [eqn.params["prevent_cse"] for eqn in equations if "prevent_cse" in eqn.params] == barriers


def test_compile_does_not_grow_with_depth():
    def size_of_program(num_layers):
        config = dataclasses.replace(CONFIG, num_layers=num_layers)
        graphdef, state = abstract(config)
        loss = lambda state, tokens: nnx.merge(graphdef, state)(tokens).sum()  # noqa: E731
        lowered = jax.jit(jax.grad(loss)).lower(state, jax.ShapeDtypeStruct((1, 32), jnp.int32))
        # Only the layer counts in the shapes differ.
        return len(re.findall(r"(?m)^\s*%", lowered.as_text()))

    shallow, deep, one_more = size_of_program(6), size_of_program(24), size_of_program(25)
    assert deep == shallow
    assert one_more > deep


def test_unrolled_layers_are_lowered_once_for_each_mask():
    def num_matmuls(num_layers):
        graphdef, state = abstract(dataclasses.replace(CONFIG, num_layers=num_layers, scan_layers=False))
        loss = lambda state, tokens: nnx.merge(graphdef, state)(tokens).sum()  # noqa: E731
        lowered = jax.jit(jax.grad(loss)).lower(state, jax.ShapeDtypeStruct((1, 32), jnp.int32))
        return lowered.as_text().count("stablehlo.dot_general")

    assert num_matmuls(6) == num_matmuls(2) > 0


def test_parameters_have_the_promised_paths_and_shapes(model):
    block = {
        "attention.query.kernel": (16, 4, 4),
        "attention.key.kernel": (16, 2, 4),
        "attention.value.kernel": (16, 2, 4),
        "attention.output.kernel": (4, 4, 16),
        "attention.query_norm.scale": (4,),
        "attention.key_norm.scale": (4,),
        "attention.sinks": (4,),
        "attention_norm.scale": (16,),
        "mlp_norm.scale": (16,),
        "mlp.up.kernel": (16, 24),
        "mlp.gate.kernel": (16, 24),
        "mlp.down.kernel": (24, 16),
    }
    expected = {"embedding.embedding": (64, 16), "head.kernel": (16, 64), "final_norm.scale": (16,)}
    for pattern_index, num_layers in enumerate((3, 2)):
        expected |= {f"blocks.{pattern_index}.{path}": (num_layers, *shape) for path, shape in block.items()}
    assert {path: leaf.shape for path, leaf in parameters(model).items()} == expected
    assert set(jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))) == set()


def test_initial_values():
    config = dataclasses.replace(CONFIG, width=64, mlp_width=256, head_dim=32)
    initial = parameters(nnx.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))())
    for path, leaf in initial.items():
        if path.endswith("scale"):
            expected_mean, expected_deviation = 1.0, 0.0
        elif path.endswith("sinks"):
            expected_mean, expected_deviation = 0.0, 0.0
        else:
            adds_to_the_residual = path.endswith(("output.kernel", "down.kernel"))
            # √(2 / 5·64), and five layers add to the residual stream twice each.
            expected_mean, expected_deviation = 0.0, 0.0791 / (10**0.5 if adds_to_the_residual else 1)
        assert float(leaf.mean()) == pytest.approx(expected_mean, abs=5e-3), path
        assert float(leaf.std()) == pytest.approx(expected_deviation, rel=0.05), path
    up = initial["blocks.0.mlp.up.kernel"]
    assert float(jnp.abs(up[0] - up[1]).max()) > 0, "the layers of a stack start alike"


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_logits_are_float32_sums_of_the_compute_dtype(rng, tie_embeddings):
    model = make_model(dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings, compute_dtype="bfloat16"), rng)
    hidden = jnp.asarray(rng.standard_normal((2, 5, 16)), jnp.bfloat16)
    assert model.head_kernel.shape == (16, 64)
    assert model.head_kernel.dtype == jnp.float32

    kernel = np.asarray(model.head_kernel.astype(jnp.bfloat16), np.float64)
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.asarray(hidden, np.float64) @ kernel, atol=1e-4)
