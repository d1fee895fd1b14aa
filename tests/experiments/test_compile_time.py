"""The compile-time benchmark: cases in processes of their own, their limits, and the baselines."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from experiments.benchmarks.compile_time.__main__ import Arguments, describe, main
from experiments.benchmarks.compile_time.measure import read_mask
from experiments.benchmarks.compile_time.upstream import attention, describe_call, lazy_mask, make_kernel
from kernels import CausalMask, ChunkedCausalMask, LocalMask, MultiHeadMask, PrefixMask, dot_product_attention
from tests.kernels.integer_masks import specs
from trainer.hardware import resident_bytes

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: the `tpu` extra, on Linux x86-64"
)
SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


def swept(tmp_path, **arguments):
    """The rows of a sweep of small calls."""
    output = tmp_path / "rows.jsonl"
    assert main(Arguments(**({"output": output, "lengths": (128,)} | SIZES | arguments))) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.full
@needs_libtpu
def test_every_source_is_compiled_for_a_tpu(tmp_path, capsys):
    sources, lengths = ("ours", "dense", "upstream_lazy"), (1024, 2048)
    rows = swept(tmp_path, target="v5e:1x1", sources=sources, lengths=lengths)
    assert [(row["source"], row["length"]) for row in rows] == [(s, t) for s in sources for t in lengths]
    for row, line in zip(rows, capsys.readouterr().out.splitlines(), strict=True):
        assert row["status"] == "measured"
        assert min(row["first_trace_s"], row["lower_s"], row["compile_s"]) > 0
        assert row["peak_bytes"] > 50e6
        assert all((row["libtpu"], row["cpu"], row["date"]))
        assert line.startswith(f"causal, {row['source']}, {row['length']:,}: trace {row['first_trace_s']:.3f} s, ")


def test_a_case_of_this_machine_is_measured(tmp_path):
    (row,) = swept(tmp_path)
    assert (row["status"], row["length"]) == ("measured", 128)
    assert min(row["first_trace_s"], row["lower_s"], row["compile_s"]) > 0


def test_a_case_that_takes_too_long_is_stopped_and_ends_its_series(tmp_path):
    rows = swept(tmp_path, lengths=(2048, 1024), masks=("causal", "window_4096"), limit_s=0.2)
    assert [describe(row) for row in rows] == [
        "causal, ours, 1,024: stopped: at 0.2 s",
        "window_4096, ours, 1,024: stopped: at 0.2 s",
    ]


@pytest.mark.skipif(resident_bytes() is None, reason="needs /proc, which tells what another process has resident")
def test_a_case_that_takes_too_much_memory_is_stopped(tmp_path):
    (row,) = swept(tmp_path, limit_gigabytes=0.05)
    assert describe(row) == "causal, ours, 128: stopped: at 50.0 MB"


def test_a_case_that_fails_says_why(tmp_path):
    (row,) = swept(tmp_path, num_heads=3, num_kv_heads=2)
    assert describe(row) == "causal, ours, 128: failed: ValueError: num_heads=3 is not a multiple of num_kv_heads=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": ("ours", "dense")}, "dense masks are those of JAX's TPU kernel; give --target a TPU topology, or"),
        ({"target": "v9:2x2"}, "unknown topology 'v9:2x2'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(capsys, arguments, message):
    assert main(Arguments(**arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("mask", [CausalMask(), LocalMask(400, 0), ChunkedCausalMask(256)], ids=repr)
def test_jax_evaluates_its_lazy_masks_in_its_kernel(mask):
    array = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)
    kernel = make_kernel("upstream_lazy", describe_call(array, array, array, mask))
    q_pos, kv_pos = np.arange(1024)[:, None], np.arange(1024)[None]
    np.testing.assert_array_equal(kernel.kwargs["mask_function"](q_pos, kv_pos), mask(q_pos, kv_pos))
    assert kernel.fwd_mask_info.partial_mask_blocks is None


@settings(max_examples=30)
@given(spec=specs)
def test_jaxs_lazy_masks_allow_what_ours_do(spec):
    lazy = lazy_mask(spec.mask(), (128, 128))
    np.testing.assert_array_equal(lazy[:, :], spec.dense(range(128), range(128)))


@pytest.mark.parametrize("source", ["upstream_lazy", "dense"])
@pytest.mark.parametrize(
    "mask",
    [CausalMask() & LocalMask(150, 0), PrefixMask(300), MultiHeadMask([CausalMask(), LocalMask(150, 40)])],
    ids=["window", "prefix", "two_masks"],
)
def test_the_baselines_compute_the_same(source, mask, rng):
    query, key, value = (
        jnp.asarray(rng.standard_normal((1, length, heads, 64)), jnp.float32)
        for length, heads in ((384, 2), (256, 1), (256, 1))
    )

    def run(function):
        return jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2))(query, key, value)

    actual = run(lambda *x: attention(source, *x, mask, interpret=True))
    expected = run(functools.partial(dot_product_attention, mask=mask, implementation="reference"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), actual, expected)


def test_the_baselines_refuse_lengths_that_jax_does_not_take():
    array = jnp.ones((1, 1000, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiples of 128, not 1000 and 1000"):
        make_kernel("dense", describe_call(array, array, array, CausalMask()))


def test_masks_by_name_and_by_expression():
    window = CausalMask() & LocalMask(4095, 0)
    assert read_mask("window_4096", 4) == window == read_mask(repr(window), 4)
    assert read_mask("two_masks", 4).masks == (CausalMask(), CausalMask() & LocalMask(4095, 0)) * 2
    with pytest.raises(ValueError, match="cannot read"):
        Arguments(masks=("no_such_mask",))


def test_importing_the_benchmark_starts_no_device():
    code = "import experiments.benchmarks.compile_time.__main__, jax; assert not jax._src.xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
