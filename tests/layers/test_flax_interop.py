"""attention_fn inside Flax's own modules, unmodified, against Flax's own dense attention."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, LocalMask, PrefixMask
from kernels.backends import BACKENDS
from layers import attention_fn as make_attention_fn

# The reference compiles fastest; that backends agree with it is tests/kernels' business.
attention_fn = functools.partial(make_attention_fn, implementation="reference")
FEATURES, NUM_HEADS, LENGTH = 16, 4, 12


def nnx_module(function=nnx.dot_product_attention, **changes):
    arguments = {"num_heads": NUM_HEADS, "in_features": FEATURES, "decode": False, "attention_fn": function}
    return nnx.MultiHeadAttention(**(arguments | changes), rngs=nnx.Rngs(0))


def linen_module(function=nn.dot_product_attention, **changes):
    return nn.MultiHeadDotProductAttention(num_heads=NUM_HEADS, attention_fn=function, **changes)


def nnx_outputs_and_gradients(function, inputs, call=None, **changes):
    def loss(module, inputs):
        outputs = module(inputs, **(call or {}))
        return jnp.square(outputs).sum(), outputs

    differentiate = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, outputs), gradients = differentiate(nnx_module(function, **changes), inputs)
    return outputs, gradients


def linen_outputs_and_gradients(function, inputs, call=None, **changes):
    module = linen_module(function, **changes)
    variables = linen_module().init(jax.random.key(0), inputs)

    def loss(variables, inputs):
        outputs = module.apply(variables, inputs, **(call or {}))
        return jnp.square(outputs).sum(), outputs

    differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, outputs), gradients = differentiate(variables, inputs)
    return outputs, gradients


FLAX_DENSE = {
    nnx_outputs_and_gradients: nnx.dot_product_attention,
    linen_outputs_and_gradients: nn.dot_product_attention,
}
both_flaxes = pytest.mark.parametrize("run", list(FLAX_DENSE), ids=["nnx", "linen"])


def assert_same(ours, flax):
    # A key's bias adds the same to all of a row's logits, so its gradient is zero but for rounding, of a few 1e-5.
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(flax))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6 * largest), ours, flax)


@pytest.fixture
def inputs(rng):
    return jnp.asarray(rng.standard_normal((2, LENGTH, FEATURES)), jnp.float32)


@both_flaxes
@pytest.mark.parametrize(
    "mask", [None, CausalMask(), CausalMask() & LocalMask(6, 0), CausalMask() | PrefixMask(5)], ids=repr
)
def test_mask_object_does_what_the_dense_mask_does(run, inputs, mask):
    indices = np.arange(LENGTH)
    dense = None if mask is None else jnp.asarray(mask(indices[:, None], indices[None, :]))[None, None]
    ours = run(attention_fn(mask), inputs)
    assert_same(ours, run(FLAX_DENSE[run], inputs, {"mask": dense}))


@both_flaxes
def test_key_padding_is_honoured_under_jit(run, rng, inputs):
    lengths = jnp.asarray(rng.integers(1, LENGTH - 1, 2))

    def with_padding(function, inputs):
        key_padding = jnp.arange(LENGTH) < lengths[:, None]
        return run(function, inputs, {"mask": key_padding[:, None, None, :]})

    ours = jax.jit(lambda inputs: with_padding(attention_fn(), inputs))(inputs)
    assert_same(ours, with_padding(FLAX_DENSE[run], inputs))
    assert np.abs(ours[0] - run(attention_fn(), inputs)[0]).max() > 1e-3


@both_flaxes
def test_concrete_dense_mask_is_honoured(run, inputs):
    causal = nn.make_causal_mask(jnp.ones((2, LENGTH)))
    ours = run(attention_fn(), inputs, {"mask": causal})
    assert_same(ours, run(FLAX_DENSE[run], inputs, {"mask": causal}))
    assert_same(ours, run(attention_fn(CausalMask()), inputs))


@both_flaxes
def test_concrete_dense_mask_combines_with_the_mask_object(run, inputs):
    indices = np.arange(LENGTH)
    window = np.abs(indices[:, None] - indices) <= 3
    both = window & (indices[:, None] >= indices)
    ours = run(attention_fn(CausalMask()), inputs, {"mask": window[None, None]})
    assert_same(ours, run(FLAX_DENSE[run], inputs, {"mask": jnp.asarray(both)[None, None]}))


@both_flaxes
def test_concrete_dense_mask_may_differ_between_heads(run, rng, inputs):
    per_head = rng.random((1, NUM_HEADS, LENGTH, LENGTH)) < 0.5
    per_head[..., 0] = True
    ours = run(attention_fn(), inputs, {"mask": jnp.asarray(per_head)})
    assert_same(ours, run(FLAX_DENSE[run], inputs, {"mask": jnp.asarray(per_head)}))


@both_flaxes
def test_traced_dense_mask_is_refused(run, inputs):
    with pytest.raises(ValueError, match=r"traced dense mask of shape \(2, 1, 12, 12\).*describe it by a mask object"):
        jax.jit(lambda inputs: run(attention_fn(), inputs, {"mask": nn.make_causal_mask(inputs[..., 0])}))(inputs)


@both_flaxes
def test_dense_mask_that_differs_within_the_batch_is_refused(run, rng, inputs):
    mask = rng.random((2, 1, LENGTH, LENGTH)) < 0.5
    with pytest.raises(
        ValueError, match=r"differs within the batch.*padding over keys alone, of shape \[batch, 1, 1, kv"
    ):
        run(attention_fn(), inputs, {"mask": mask})


@both_flaxes
def test_any_number_of_batch_dims(run, rng):
    for batch in ((), (2, 3)):
        inputs = jnp.asarray(rng.standard_normal((*batch, LENGTH, FEATURES)), jnp.float32)
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[(None,) * (len(batch) + 1)]
        assert_same(run(attention_fn(CausalMask()), inputs), run(FLAX_DENSE[run], inputs, {"mask": causal}))


@both_flaxes
def test_half_precision_modules(run, inputs):
    ours, flax = (run(function, inputs, dtype=jnp.bfloat16)[0] for function in (attention_fn(), FLAX_DENSE[run]))
    assert ours.dtype == flax.dtype == jnp.bfloat16
    np.testing.assert_allclose(ours.astype(np.float32), flax.astype(np.float32), atol=0.05)


@both_flaxes
def test_active_dropout_is_refused_and_inactive_is_not(run, inputs):
    dropout_rng = {} if run is nnx_outputs_and_gradients else {"dropout_rng": jax.random.key(0)}
    with pytest.raises(ValueError, match=r"dropout_rate=0.1 with deterministic=False.*set dropout_rate=0.0"):
        run(attention_fn(), inputs, {"deterministic": False, **dropout_rng}, dropout_rate=0.1)
    ours = run(attention_fn(), inputs, {"deterministic": True}, dropout_rate=0.1)
    assert_same(ours[0], run(FLAX_DENSE[run], inputs)[0])


@both_flaxes
def test_sown_weights_and_precision_are_refused(run, inputs):
    with pytest.raises(
        ValueError, match=r"module=<MultiHead.*>: sow_weights=True asks for the attention weights, a T×T array"
    ):
        run(attention_fn(), inputs, {"sow_weights": True})
    with pytest.raises(ValueError, match=r"precision='TF32_TF32_F32'.*leave precision=None in the module"):
        run(attention_fn(), inputs, precision="TF32_TF32_F32")


def test_linen_einsums_are_refused(inputs):
    einsums = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum}
    with pytest.raises(ValueError, match=r"can't honour qk_attn_weights_einsum=.*no einsum to replace"):
        linen_outputs_and_gradients(attention_fn(), inputs, **einsums)


def test_bias_is_refused():
    query = jnp.ones((1, 8, 2, 4))
    with pytest.raises(
        ValueError, match=r"can't honour bias=<ArrayImpl of shape \(1, 2, 8, 8\)>.*the kernels take no bias"
    ):
        attention_fn()(query, query, query, bias=jnp.zeros((1, 2, 8, 8)))


def test_nnx_is_causal_and_grouped_queries(inputs):
    arguments = {"call": {"is_causal": True}, "num_kv_heads": 2}
    ours = nnx_outputs_and_gradients(attention_fn(), inputs, **arguments)
    assert_same(ours, nnx_outputs_and_gradients(nnx.dot_product_attention, inputs, **arguments))
    assert_same(ours, nnx_outputs_and_gradients(attention_fn(CausalMask()), inputs, num_kv_heads=2))


def test_nnx_decodes_as_it_does_without_a_cache(inputs):
    module = nnx_module(attention_fn())
    module.init_cache(inputs.shape)
    outputs = jnp.concatenate([module(inputs[:, t : t + 1], decode=True) for t in range(LENGTH)], axis=1)
    np.testing.assert_allclose(outputs, nnx_module(attention_fn(CausalMask()))(inputs), rtol=1e-3, atol=1e-5)


def test_linen_decodes_as_it_does_without_a_cache(inputs):
    module = linen_module(attention_fn(), decode=True)
    variables = module.init(jax.random.key(0), inputs)
    outputs = []
    for t in range(LENGTH):
        step, cache = module.apply(variables, inputs[:, t : t + 1], mutable=["cache"])
        variables = {"params": variables["params"], **cache}
        outputs.append(step)
    whole = linen_module(attention_fn(CausalMask())).apply({"params": variables["params"]}, inputs)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, rtol=1e-3, atol=1e-5)


def test_decoding_with_a_mask_on_positions_is_refused(inputs):
    module = nnx_module(attention_fn(CausalMask()))
    module.init_cache(inputs.shape)
    with pytest.raises(ValueError, match=r"one query against 12 keys.*decode with attention_fn\(mask=None\)"):
        module(inputs[:, :1], decode=True)


@pytest.mark.parametrize("function", [nnx.dot_product_attention, nn.dot_product_attention], ids=["nnx", "linen"])
def test_signature_lists_every_argument_of_flax(function):
    ours = inspect.signature(attention_fn()).parameters
    assert set(inspect.signature(function).parameters) <= set(ours), "linen drops what the signature doesn't list"


def test_scale_and_soft_cap_are_finite_numbers_of_any_type():
    assert attention_fn(scale=jnp.float32(0.5)) == attention_fn(scale=0.5)
    with pytest.raises(ValueError, match="scale=inf must be finite"):
        attention_fn(scale=np.inf)
    with pytest.raises(ValueError, match=r"logits_soft_cap is traced .* must be a Python number"):
        jax.eval_shape(lambda cap: attention_fn(logits_soft_cap=cap)(*[jnp.ones((1, 4, 2, 8))] * 3), 30.0)


def test_equal_arguments_make_equal_functions():
    assert attention_fn(CausalMask()) == attention_fn(CausalMask())
    assert hash(attention_fn(CausalMask())) == hash(attention_fn(CausalMask()))
    assert attention_fn(CausalMask()) != attention_fn(CausalMask(), logits_soft_cap=30.0)


def test_soft_cap_scale_and_implementation_reach_the_kernel(inputs):
    plain = nnx_module(attention_fn())(inputs)
    for changed in (attention_fn(logits_soft_cap=0.1), attention_fn(scale=5.0)):
        assert jnp.abs(nnx_module(changed)(inputs) - plain).max() > 1e-4
    with pytest.raises(ValueError, match="implementation='fastest' is no backend of attention"):
        nnx_module(attention_fn(implementation="fastest"))(inputs)


def test_a_dense_mask_in_the_wrong_place_is_refused():
    with pytest.raises(
        ValueError, match=r"takes a kernels mask such as CausalMask\(\), got ndarray; a dense mask goes to"
    ):
        attention_fn(np.ones((4, 4), bool))


def attended(function, *shapes, **arguments):
    """The output's shape and type, of arrays without numbers."""
    arrays = (shape if hasattr(shape, "dtype") else jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return jax.eval_shape(functools.partial(function, **arguments), *arrays)


X = (2, 3, 8, 2, 4)  # two batch dims


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            (X, (3, 2, 8, 2, 4), (3, 2, 8, 2, 4)),
            r"batch dims of query, key and value must match: query \(2, 3, 8, 2, 4\)",
        ),
        (((6, 8, 2, 4), X, X), "must have the same rank, of 3 or more"),
        ((X, (6, 8, 2, 4), (6, 8, 2, 4)), "must have the same rank, of 3 or more"),
        ((X, (2, 4, 8, 2, 4), (2, 4, 8, 2, 4)), "batch dims of query, key and value must match"),
        ((X, X, (3, 2, 8, 2, 4)), "batch dims of query, key and value must match"),
        ((X, X, (1, 1, 8, 2, 4)), "batch dims of query, key and value must match"),
        ((X, X, (2, 3, 7, 2, 4)), "key and value lengths must match"),
        ((X, (2, 3, 8, 2, 5), X), "query and key depths must match"),
        ((X, (2, 3, 8, 3, 4), (2, 3, 8, 3, 4)), "query heads must be a multiple of that of key and value heads"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused_as_flax_refuses_them(shapes, message):
    with pytest.raises((ValueError, TypeError, AssertionError)):
        attended(nnx.dot_product_attention, *shapes, dropout_rate=0.1, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        attended(attention_fn(), *shapes)


def test_what_flax_takes_and_the_kernels_do_not_is_refused():
    with pytest.raises(ValueError, match="key and value heads must match"):
        attended(attention_fn(), X, X, (2, 3, 8, 1, 4))
    with pytest.raises(ValueError, match="must have the same rank, of 3 or more"):
        attended(attention_fn(), *[(8, 4)] * 3)


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 1, 4, 8), (3, 1, 1, 8, 8), (2, 2, 1, 1, 8), (4, 8, 8), (2, 3, 2, 8, 1, 8), (7, 8), (9,), (2, 1, 8, 8)],
)
@pytest.mark.parametrize("fill", [True, False])
def test_a_dense_mask_of_other_sizes_is_refused_though_it_is_uniform(shape, fill):
    with pytest.raises(
        ValueError, match=r"broadcasts to \[\*batch, num_heads, q_length, kv_length\] = \[2, 3, 2, 8, 8\]"
    ):
        attended(attention_fn(), X, X, X, mask=np.full(shape, fill))


@pytest.mark.parametrize("shape", [(2, 3, 2, 8, 8), (1, 1, 1, 1, 1), (8, 8), (2, 8, 1), (3, 1, 1, 8), ()])
def test_a_dense_mask_that_broadcasts_is_served(shape):
    assert attended(attention_fn(), X, X, X, mask=np.full(shape, 1.0)).shape == X


PRECISIONS = ["default", "high", "float32", *jax.lax.Precision, ("bfloat16", "highest"), [jax.lax.Precision.HIGH] * 2]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_any_precision_is_taken(precision):
    assert attended(attention_fn(), X, X, X, precision=precision).shape == X


@pytest.mark.parametrize("name", [b.name for b in BACKENDS if b.platforms == ("cpu", "gpu", "tpu")])
def test_what_computes_on_any_device_multiplies_float32_in_full(name):
    traced = jax.make_jaxpr(make_attention_fn(implementation=name))(*[jnp.ones((1, 4, 1, 8))] * 3)
    assert traced.pretty_print().count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 2


@pytest.mark.parametrize("precision", ["hihgest", "F32_F32_F32", jax.lax.DotAlgorithmPreset.TF32_TF32_F32], ids=str)
def test_an_algorithm_or_no_precision_is_refused(precision):
    with pytest.raises(ValueError, match=r"can't honour precision=.* no other algorithm.*leave precision=None"):
        attended(attention_fn(), X, X, X, precision=precision)


def test_a_bias_in_a_masks_place_is_told_what_to_use():
    causal_bias = np.where(np.tri(8) > 0, 0, -1e9)
    with pytest.raises(ValueError, match=r"got ndarray; the kernels take no bias.*CausalMask\(\) & LocalMask"):
        attention_fn(causal_bias)
    for bias in (causal_bias, jnp.asarray(causal_bias, jnp.bfloat16)[None, None], np.full(8, -np.inf)):
        with pytest.raises(
            ValueError, match="mask holds other floats than 0 and 1, so it is a bias: the kernels take no"
        ):
            attended(attention_fn(), X, X, X, mask=bias)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("bias", "the kernels take no bias"),
        ("is_causal", r"use mask=CausalMask\(\)"),
        ("local_window_size", r"use mask=LocalMask\(left, right\)"),
        ("query_seq_lengths", r"use a boolean mask over keys, of shape \[batch, 1, 1, kv_length\]"),
        ("key_value_seq_lengths", r"use a boolean mask over keys, of shape \[batch, 1, 1, kv_length\]"),
    ],
)
def test_arguments_of_jax_nn_are_told_what_to_use_instead(argument, instead):
    with pytest.raises(TypeError, match=rf"attention_fn\(\) takes no {argument}: {instead}"):
        make_attention_fn(**{argument: 1})
    if argument not in ("bias", "is_causal"):  # Flax has these
        with pytest.raises(
            TypeError, match=rf"takes no {argument}: use (attention_fn\(mask=L|a boolean mask over keys)"
        ):
            attended(attention_fn(), X, X, X, **{argument: 1})
