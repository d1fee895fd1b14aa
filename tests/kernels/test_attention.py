"""Choosing a backend, and refusing what doesn't fit."""

import contextlib
import functools
import inspect
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    LocalMask,
    MultiHeadMask,
    NumpyMask,
    SlabCache,
    SplashTuning,
    Target,
    TritonDecodeTuning,
    Tuning,
    decode_attention,
    dot_product_attention,
    segment_ids_of_lengths,
    select_backend,
)
from kernels.backends import BACKENDS, DECODE_BACKENDS, blockwise
from kernels.call import Cotangent, make_call

Q = jnp.zeros((1, 8, 4, 16))
KV = jnp.zeros((1, 8, 2, 16))


CPU, TPU = Target("cpu", "cpu"), Target("tpu", "TPU v5")
HOPPER = Target("gpu", "NVIDIA H200", 9.0)
AMPERE = Target("gpu", "NVIDIA A100-SXM4-80GB", 8.0)
OPTIONAL = (
    "query_segment_ids",
    "key_value_segment_ids",
    "query_positions",
    "key_value_positions",
    "scale",
    "logits_soft_cap",
    "sinks",
)
ARGUMENTS = dict.fromkeys(OPTIONAL) | {"return_lse": False}


def call_of(mask=None, *, dtype=jnp.float32, target=CPU, **changes):
    arrays = (Q.astype(dtype), KV.astype(dtype), KV.astype(dtype))
    call = make_call(*arrays, mask, **(ARGUMENTS | changes))[1]
    return call._replace(target=target)


def test_a_cpu_gets_blockwise_and_hears_why():
    selection = select_backend(call_of(CausalMask()))
    assert selection.name == "blockwise"
    assert selection.passed_over == (
        ("splash", "runs on tpu, not on cpu"),
        ("mosaic_gpu", "runs on gpu, not on cpu"),
        ("cudnn", "runs on gpu, not on cpu"),
        ("triton", "runs on gpu, not on cpu"),
    )


@pytest.mark.parametrize("target", [CPU, TPU, HOPPER], ids=lambda target: target.platform)
def test_the_reference_and_the_baselines_are_never_selected(target):
    assert select_backend(call_of(target=target)).name in ("splash", "mosaic_gpu", "cudnn", "blockwise")
    assert select_backend(call_of(target=target), "reference").name == "reference"


def test_a_tpu_gets_splash():
    assert select_backend(call_of(CausalMask(), target=TPU)) == ("splash", ())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(), "takes bfloat16 and float16, not float32"),
        (call_of(ChunkedCausalMask(4), dtype=jnp.bfloat16), "full, causal and causal sliding-window masks only"),
        (call_of(dtype=jnp.bfloat16, logits_soft_cap=3.0), "has no logits soft cap"),
        (call_of(dtype=jnp.bfloat16, scale=-0.5), "takes positive scales, not -0.5"),
        (call_of(dtype=jnp.bfloat16, return_lse=True), "has no differentiable lse"),
        (
            call_of(dtype=jnp.bfloat16, query_segment_ids=jnp.ones(8, int), key_value_segment_ids=jnp.ones(8, int)),
            "has no segment ids",
        ),
    ],
)
def test_cudnn_says_what_it_cannot_do(call, reason):
    with pytest.raises(ValueError, match=f"implementation='cudnn' can't serve this call: .*{reason}"):
        select_backend(call._replace(target=AMPERE), "cudnn")
    selection = select_backend(call._replace(target=AMPERE))
    assert selection.name in ("triton", "blockwise"), "where Triton isn't installed, the next one"
    assert reason in dict(selection.passed_over)["cudnn"]


def test_a_named_backend_on_the_wrong_platform_raises():
    with pytest.raises(ValueError, match="'cudnn' can't serve this call: runs on gpu, not on cpu"):
        dot_product_attention(Q, KV, KV, implementation="cudnn", device=jax.devices("cpu")[0])


def test_every_backend_of_the_tables_has_its_functions():
    for backend in BACKENDS:
        names = (backend.differentiable,) if backend.differentiable else ("resolve", "fwd", "bwd")
        for name in ("unsupported_reason", *names):
            assert callable(getattr(backend.load(), name)), (backend.name, name)
    for backend in DECODE_BACKENDS:
        for name in ("unsupported_reason", "attend", *["slower_reason"] * backend.may_be_slower):
            assert callable(getattr(backend.load(), name)), (backend.name, name)


def test_every_tuning_class_is_one_backends():
    """The tables name the classes, so that looking at them imports none."""
    named = [backend.tuning for backend in (*BACKENDS, *DECODE_BACKENDS) if backend.tuning is not None]
    assert sorted(named) == sorted(cls.__name__ for cls in get_args(Tuning))


@pytest.mark.parametrize("mask", [CausalMask(), CausalMask() & LocalMask(40, 0)], ids=repr)
def test_a_backward_starts_from_the_whole_rows_lse(mask, rng):
    """Keys in two parts, as on two devices: forwards are merged, and each part's backward gives its own gradients."""
    query, key, value, d_output = (jnp.asarray(rng.standard_normal((1, 96, 2, 16)), jnp.float32) for _ in range(4))
    position = jnp.arange(96, dtype=jnp.int32)[None]

    def part(keys):
        return make_call(
            query, key[:, keys], value[:, keys], mask, query_segment_ids=None, key_value_segment_ids=None,
            query_positions=position, key_value_positions=position[:, keys], scale=None, logits_soft_cap=None,
            sinks=None, return_lse=False, device=jax.devices("cpu")[0],
        )  # fmt: skip

    parts = [part(slice(0, 50)), part(slice(50, 96))]
    tuning = blockwise.resolve(None, parts[0][1])
    outputs, lses = zip(*(blockwise.fwd(inputs, call, tuning) for inputs, call in parts), strict=True)
    lse = jnp.logaddexp(*lses)
    output = sum(out * jnp.exp(own - lse)[..., None] for out, own in zip(outputs, lses, strict=True))
    cotangent = Cotangent.of(output, lse, d_output)
    gradients = [blockwise.bwd(inputs, call, tuning, cotangent) for inputs, call in parts]
    attend = functools.partial(dot_product_attention, mask=mask, implementation="reference")
    expected, vjp = jax.vjp(attend, query, key, value)
    (d_query, d_key, d_value), (d_query_2, d_key_2, d_value_2) = gradients
    actual = d_query + d_query_2, jnp.concatenate([d_key, d_key_2], 1), jnp.concatenate([d_value, d_value_2], 1)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    for a, e in zip(actual, vjp(d_output), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


def test_passed_over_backends_are_logged_once(caplog, rng):
    x = jnp.asarray(rng.standard_normal((1, int(rng.integers(8, 64)), 2, 8)), jnp.float32)
    from kernels.attention import dispatch

    dispatch._log_once.cache_clear()
    cpu, cache = jax.devices("cpu")[0], SlabCache.empty(1, 16, 2, 8, dtype=x.dtype)
    with caplog.at_level("INFO", logger="kernels.attention"):
        for _ in range(2):
            dot_product_attention(x, x, x, CausalMask(), device=cpu)
            decode_attention(x[:, :1], cache, CausalMask(), device=cpu)
    assert [r.message for r in caplog.records] == [
        "attention uses blockwise; splash passed over: runs on tpu, not on cpu",
        "attention uses blockwise; mosaic_gpu passed over: runs on gpu, not on cpu",
        "attention uses blockwise; cudnn passed over: runs on gpu, not on cpu",
        "attention uses blockwise; triton passed over: runs on gpu, not on cpu",
        "decoding uses blockwise; dense passed over: is faster on GPUs only, not on cpu",
        "decoding uses blockwise; triton passed over: runs on gpu, not on cpu",
    ]


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((Q[0], KV, KV), {}, r"query must be \[batch, length, heads, head_dim\], got shape \(8, 4, 16\)"),
        ((Q, KV, KV[:, :5]), {}, "don't fit together"),
        ((Q, KV, KV.astype(jnp.bfloat16)), {}, "share one dtype of float16, bfloat16, float32, float64"),
        ((Q.astype("float8_e5m2"),) + (KV.astype("float8_e5m2"),) * 2, {}, "got float8_e5m2, float8_e5m2, float8_e5m2"),
        ((Q[:, :, :3], KV, KV), {}, "num_heads=3 is not a multiple of num_kv_heads=2"),
        ((Q, KV, KV, np.ones((8, 8), bool)), {}, "wrap a dense boolean array in NumpyMask"),
        ((Q, KV, KV, NumpyMask(np.ones((4, 8), bool))), {}, r"shape \(4, 8\) doesn't cover q_len=8, kv_len=8"),
        ((Q, KV, KV, CausalMask() & NumpyMask(np.ones((4, 4), bool))), {}, "doesn't cover q_len=8, kv_len=8"),
        ((Q, KV, KV, MultiHeadMask([CausalMask()] * 2)), {}, "2 masks for num_heads=4"),
        ((Q, KV, KV), {"logits_soft_cap": 0.0}, "logits_soft_cap=0.0 must be positive"),
        ((Q, KV, KV), {"sinks": jnp.zeros(2)}, r"sinks must be floating \[4\]"),
        ((Q, KV, KV), {"query_segment_ids": jnp.ones((1, 8), int)}, "come together"),
        (
            (Q, KV, KV),
            {"query_positions": jnp.ones((1, 9), int)},
            r"query_positions must be integers \[1, 8\] or \[8\]",
        ),
        ((Q, KV, KV), {"key_value_positions": jnp.ones(8)}, "key_value_positions must be integers"),
        (
            (Q, KV, KV),
            {"implementation": "flash"},
            "implementation='flash' is no backend of attention; expected",
        ),
        ((Q, KV, KV), {"implementation": "mosaic"}, "; did you mean 'mosaic_gpu'?"),
        ((Q, KV, KV), {"implementation": "dense"}, "implementation='dense' is no backend of attention"),
        ((Q, KV, KV), {"implementation": TritonDecodeTuning()}, "is no backend of attention"),
        ((Q, KV, KV), {"implementation": 3}, "implementation=3 is no backend of attention"),
        ((Q[:, :0], KV, KV), {}, "has no elements"),
    ],
)
def test_refusals(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*arguments, **keywords)


def test_one_mask_on_all_heads_is_one_mask():
    assert call_of(MultiHeadMask([CausalMask()] * 4)).mask == CausalMask()


def test_the_target_is_what_the_call_is_compiled_for_and_not_this_machine():
    """Selection for hardware that isn't here: a GPU too old for cuDNN's attention, and none that is NVIDIA's."""
    call = call_of(CausalMask(), dtype=jnp.bfloat16)
    for target, reason in (
        (Target("gpu", "Tesla V100", 7.0), "needs an NVIDIA GPU of compute capability 8.0, this one has 7.0"),
        (Target("gpu", "AMD Instinct MI300X"), "needs an NVIDIA GPU, not AMD Instinct MI300X"),
    ):
        selection = select_backend(call._replace(target=target))
        assert selection.name == "blockwise"
        assert dict(selection.passed_over)["cudnn"] == reason
    assert select_backend(call._replace(target=AMPERE)).name == "cudnn"


def test_a_calls_target_is_its_device():
    device = jax.devices()[0]
    kinds = {make_call(Q, KV, KV, None, **ARGUMENTS, device=given)[1].target for given in (None, device)}
    assert kinds == {Target.of(device)}
    assert (Target.of(device).platform, Target.of(device).device_kind) == (device.platform, device.device_kind)


def test_a_tuning_object_names_its_backend():
    with pytest.raises(ValueError, match="can't serve this call: runs on tpu, not on cpu"):
        dot_product_attention(Q, KV, KV, implementation=SplashTuning.square(128), device=jax.devices("cpu")[0])


def test_masks_are_static_under_jit(rng):
    x = jnp.asarray(rng.standard_normal((1, 16, 2, 8)), jnp.float32)
    attend = jax.jit(dot_product_attention, static_argnums=3)
    np.testing.assert_allclose(
        attend(x, x, x, CausalMask()), dot_product_attention(x, x, x, CausalMask()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("bias", "the kernels take no bias"),
        ("is_causal", r"use mask=CausalMask\(\)"),
        ("query_seq_lengths", r"use query_segment_ids=segment_ids_of_lengths\(lengths, T\)"),
        ("key_value_seq_lengths", r"use key_value_segment_ids=segment_ids_of_lengths\(lengths, S, padding=-1\)"),
        ("local_window_size", r"use mask=LocalMask\(left, right\)"),
        ("return_residual", "use return_lse=True"),
    ],
)
def test_of_arguments_that_jax_nn_has_and_ours_lacks_the_error_says_what_to_use(argument, instead):
    assert argument in inspect.signature(jax.nn.dot_product_attention).parameters
    for function in (dot_product_attention, decode_attention):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) takes no {argument}: "):
            function(Q, KV, KV, **{argument: None})
    with pytest.raises(TypeError, match=instead):
        dot_product_attention(Q, KV, KV, **{argument: None})


def test_every_argument_of_jax_nn_is_taken_or_told_what_to_use_instead():
    for name in inspect.signature(jax.nn.dot_product_attention).parameters:
        taken = name in inspect.signature(dot_product_attention).parameters
        with contextlib.nullcontext() if taken else pytest.raises(TypeError, match=f"takes no {name}: "):
            jax.eval_shape(
                lambda **keywords: dot_product_attention(Q, KV, KV, **keywords), **{} if taken else {name: Q}
            )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, jnp.int32])
def test_lengths_become_segment_ids(rng, dtype):
    lengths = rng.integers(0, 9, 5)
    given = jnp.asarray(lengths) if dtype is jnp.int32 else lengths.astype(dtype)
    ids = segment_ids_of_lengths(given, 7, padding=-1)
    assert ids.dtype == jnp.int32
    assert ids.tolist() == [[1] * min(n, 7) + [-1] * max(7 - n, 0) for n in lengths]


def test_segment_ids_of_lengths_do_what_jax_nn_does_with_lengths(rng):
    arrays = [jnp.asarray(rng.standard_normal((3, length, 2, 8)), jnp.float32) for length in (6, 9, 9)]
    q_lengths, kv_lengths = rng.integers(1, 7, 3), rng.integers(1, 10, 3)
    ids = {
        "query_segment_ids": segment_ids_of_lengths(q_lengths, 6),
        "key_value_segment_ids": segment_ids_of_lengths(kv_lengths, 9, padding=-1),
    }
    lengths = {"query_seq_lengths": jnp.asarray(q_lengths), "key_value_seq_lengths": jnp.asarray(kv_lengths)}
    ours = jax.jit(functools.partial(dot_product_attention, implementation="reference", **ids))(*arrays)
    theirs = jax.jit(functools.partial(jax.nn.dot_product_attention, **lengths))(*arrays)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("lengths", [np.ones(2), np.ones((2, 1), int), jnp.int32(3)])
def test_what_is_no_vector_of_lengths_is_refused(lengths):
    with pytest.raises(ValueError, match=r"lengths must be integers \[B\], one for each sequence, got (float|int)"):
        segment_ids_of_lengths(lengths, 4)
