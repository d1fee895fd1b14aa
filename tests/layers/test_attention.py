"""layers.Attention against the oracle, dense attention written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, FullMask, LocalMask, MultiHeadMask, PrefixMask, SlabCache, TritonDecodeTuning
from layers import Attention, GPTConfig
from layers import attention as attention_module
from tests.layers import decoder_oracle

WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, LENGTH = 16, 4, 2, 8, 32


def make_layer(**changes):
    # The reference compiles fastest; that backends agree with it is tests/kernels' business.
    arguments = {"num_kv_heads": NUM_KV_HEADS, "compute_dtype": "float32", "implementation": "reference"}
    arguments["rngs"] = nnx.Rngs(0)
    arguments |= {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM}
    return Attention(WIDTH, **(arguments | changes))


def randomize(layer, rng):
    """Gives every parameter a value at which a missing term would show."""
    state = nnx.state(layer)
    nnx.update(layer, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.5, 0.5, leaf.shape), leaf.dtype), state))


@pytest.mark.parametrize(
    "changes",
    [
        {"implementation": None},
        {"mask": CausalMask() & LocalMask(3, 0), "qk_norm": "per_head"},
        {"mask": CausalMask() | PrefixMask(4), "sinks": True},
        {"mask": FullMask(), "logits_soft_cap": 2.0, "rope_base": None},
        {"mask": MultiHeadMask([CausalMask(), LocalMask(2, 2), PrefixMask(3) | CausalMask(), FullMask()])},
    ],
    ids=["causal", "window and QK-norm", "prefix and sinks", "soft cap", "heads differ"],
)
def test_documents_are_those_of_the_oracle(rng, packed, changes):
    layer = make_layer(**changes)
    randomize(layer, rng)
    inputs = rng.normal(0, 0.5, (2, LENGTH, WIDTH)).astype(np.float32)
    outputs = nnx.jit(lambda layer, *inputs: layer(*inputs))(layer, inputs, packed.segment_ids, packed.positions)
    fields = {name: value for name, value in changes.items() if name not in ("mask", "implementation")}
    sizes = {"width": WIDTH, "num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    config = GPTConfig(**sizes, masks=(changes.get("mask", CausalMask()),), **fields)
    params = jax.device_get(nnx.to_pure_dict(nnx.state(layer)))
    for row, lengths in enumerate(packed.lengths):
        for document, length in enumerate(lengths, start=1):
            where = packed.segment_ids[row] == document
            expected = decoder_oracle.attention(config, 0, params, inputs[row][where].astype(np.float64), length)
            np.testing.assert_allclose(outputs[row][where], expected, atol=2e-5 * np.abs(expected).max())


def test_without_ids_and_positions_a_row_is_one_document(rng):
    layer = make_layer(mask=CausalMask() | PrefixMask(4))
    inputs = rng.standard_normal((1, LENGTH, WIDTH)).astype(np.float32)
    explicit = layer(inputs, jnp.ones((1, LENGTH), jnp.int32), jnp.arange(LENGTH)[None])
    np.testing.assert_allclose(layer(inputs), explicit, atol=1e-6)


def test_without_a_mask_everyone_sees_everyone(rng):
    inputs = rng.standard_normal((1, LENGTH, WIDTH)).astype(np.float32)
    layer, of_full_mask = make_layer(mask=None), make_layer(mask=FullMask())
    np.testing.assert_array_equal(layer(inputs), of_full_mask(inputs))


@pytest.mark.parametrize(("mask", "expected"), [(CausalMask() & LocalMask(7, 0), False), (PrefixMask(4), True)])
def test_positions_reach_the_kernel_only_where_the_mask_needs_them(monkeypatch, packed, mask, expected):
    seen = []

    def spy(query, *args, query_positions, key_value_positions, **kwargs):
        seen.append((query_positions is not None, key_value_positions is not None))
        return query

    monkeypatch.setattr(attention_module, "dot_product_attention", spy)
    make_layer(mask=mask)(jnp.ones((2, LENGTH, WIDTH)), packed.segment_ids, packed.positions)
    assert seen == [(expected, expected)]


def test_a_call_and_decoding_each_get_their_own_backend(monkeypatch):
    seen = []

    def spy(name):
        def attend(query, *args, implementation, **kwargs):
            seen.append((name, implementation))
            return query

        return attend

    for name in ("dot_product_attention", "decode_attention"):
        monkeypatch.setattr(attention_module, name, spy(name))
    tuning = TritonDecodeTuning(num_programs=132)
    layer = make_layer(implementation="blockwise", decode_implementation=tuning)
    inputs = jnp.ones((2, 4, WIDTH))
    cache = SlabCache.empty(2, LENGTH, NUM_KV_HEADS, layer.head_dim, dtype="float32")
    rotation = layer.make_rotation(4, None)
    layer(inputs)
    _, cache = layer.prefill(inputs, cache, rotation)
    layer.decode(inputs, cache, rotation)
    training = ("dot_product_attention", "blockwise")
    assert seen == [training, training, ("decode_attention", tuning)]


def test_computes_in_the_compute_dtype_and_stores_in_the_parameter_dtype():
    layer = make_layer(compute_dtype="bfloat16", param_dtype="float32", qk_norm="per_head", sinks=True)
    assert layer(jnp.ones((1, 8, WIDTH), jnp.float32)).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("float32")}


def test_works_inside_another_model(rng):
    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.attention = Attention(WIDTH, NUM_HEADS, mask=FullMask(), compute_dtype="float32", rngs=rngs)
            self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, inputs):
            return self.head(self.attention(inputs).mean(1))

    inputs = rng.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
    gradients = nnx.jit(nnx.grad(lambda model: jnp.square(model(inputs)).sum()))(Classifier(nnx.Rngs(0)))
    assert all(jnp.abs(gradient).max() > 0 for gradient in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"mask": MultiHeadMask([CausalMask()] * 2)}, "MultiHeadMask has 2 masks for num_heads=4"),
        ({"implementation": "fastest"}, "implementation='fastest' is no backend of attention"),
        ({"decode_implementation": "reference"}, "decode_implementation='reference' is no backend of decoding"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap=inf must be finite"),
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"num_heads": -4, "head_dim": None}, "num_heads=-4 must be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
        ({"num_kv_heads": -2}, "num_kv_heads=-2 must be at least 1"),
        ({"head_dim": -16}, "head_dim=-16 must be at least 1"),
        ({"mask": "causal"}, "mask must be a kernels.Mask such as CausalMask"),
        ({"query_scale": float("nan")}, "query_scale=nan must be finite"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**changes)(jnp.ones((1, 8, WIDTH)))


def test_refuses_a_width_that_heads_do_not_divide():
    with pytest.raises(
        ValueError, match="width=30 is not a multiple of num_heads=4; change one of them, or give head_dim"
    ):
        Attention(30, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("is_causal", r"use mask=CausalMask\(\)"),
        ("local_window_size", r"use mask=LocalMask\(left, right\)"),
        ("bias", "the kernels take no bias"),
        ("query_seq_lengths", r"give the call segment_ids=segment_ids_of_lengths\(lengths, T\)"),
        ("attention_mask", r"give the call segment_ids=segment_ids_of_lengths\(lengths, T\)"),
    ],
)
def test_arguments_of_others_are_told_what_to_use_instead(argument, instead):
    with pytest.raises(TypeError, match=rf"^Attention\(\) takes no {argument}: {instead}"):
        Attention(16, 2, **{argument: True}, rngs=nnx.Rngs(0))
    layer = nnx.eval_shape(lambda: Attention(16, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=rf"^Attention\(\) takes no {argument}: {instead}"):
        layer(jnp.ones((1, 4, 16)), **{argument: True})
    with pytest.raises(TypeError, match=r"takes no mask: give the mask, from kernels, to the layer when it is made"):
        layer(jnp.ones((1, 4, 16)), mask=jnp.ones((4, 4)))
