"""All kernels are traced under `jax_enable_x64` and strict promotion at once, which refuses what either refuses."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kernels import (
    BlockwiseTuning,
    CausalMask,
    LocalMask,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    PrefixMask,
    SlabCache,
    SplashTuning,
    Target,
    TritonTiles,
    TritonTuning,
    UnifiedCache,
    decode_attention,
    dot_product_attention,
)
from kernels.context import MeshLayout, attend_over_mesh
from kernels.experts import (
    GatedMatrices,
    choose_grouped_matmul,
    copy_rows,
    group_rows,
    grouped_gated_mlp,
    grouped_matmul,
    sum_copies,
)
from kernels.loss.exp_logits import ExpLogits
from kernels.tracing.number_types import at_least_float32


@pytest.fixture(autouse=True)
def _x64_and_strict():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux alone")
TILES = TritonTiles(32, 16)
BACKENDS = [
    ("reference", "float32"),
    (BlockwiseTuning(32, 32), "bfloat16"),
    (BlockwiseTuning(32, 32), "float64"),
    (SplashTuning.square(128, interpret=True), "bfloat16"),
    (SplashTuning.square(128, interpret=True, backward="fused"), "float32"),
    pytest.param(
        TritonTuning(forward=TILES, key_value=TILES, query=TILES, interpret=True), "float16", marks=needs_triton
    ),
    pytest.param(
        MosaicGpuTuning("split", MosaicForwardTuning(1, 64), MosaicBackwardTuning(1, persistent=True), interpret=True),
        "bfloat16",
        marks=pytest.mark.jax_0_11,
    ),
]


def assert_attention_is_traced(implementation, dtype, mask, *, has_sinks=False, **options):
    shapes = [(1, 70, 4, 16), (1, 70, 2, 16), (4,), (70,)]
    dtypes = [dtype, dtype, "float32", "int32"]

    def loss(query, key, sinks, tokens):
        keywords = {name: tokens if value == "tokens" else value for name, value in options.items()}
        sinks = sinks if has_sinks else None
        keywords |= {"implementation": implementation, "sinks": sinks, "return_lse": True}
        output, lse = dot_product_attention(query, key, key, mask, **keywords)
        return output.astype(lse.dtype).sum() + lse.sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    traced = gradient.trace(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert [x.dtype for x in jax.tree.leaves(traced.out_info)] == dtypes[:3]


@pytest.mark.parametrize(("implementation", "dtype"), BACKENDS, ids=lambda x: getattr(x, "backend", x))
def test_attention_of_documents_and_its_gradients(implementation, dtype):
    ids = {"query_segment_ids": "tokens", "key_value_segment_ids": "tokens"}
    window = CausalMask() & LocalMask(30, 0)
    assert_attention_is_traced(implementation, dtype, window, has_sinks=True, logits_soft_cap=3.0, **ids)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [row for row in BACKENDS if "Triton" not in repr(row)],  # it takes none beside such a mask
    ids=lambda x: getattr(x, "backend", x),
)
def test_attention_at_positions_and_its_gradients(implementation, dtype):
    positions = {"query_positions": "tokens", "key_value_positions": "tokens"}
    assert_attention_is_traced(implementation, dtype, CausalMask() & (LocalMask(30, 0) | PrefixMask(9)), **positions)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("exchange", "sequence_sharding"),
    [
        ("all_gather", "balanced"),
        ("all_gather", "zigzag"),
        ("all_to_all", "zigzag"),
        ("halo", "contiguous"),
        ("ring", "zigzag"),
    ],
)
def test_attention_over_a_mesh_and_its_gradients(exchange, sequence_sharding):
    mesh = jax.make_mesh((1, 2, 2), ("data", "tensor", "context"), (AxisType.Auto,) * 3, devices=jax.devices()[:4])
    layout = MeshLayout(mesh, ("data",), "context", "tensor", sequence_sharding)

    def loss(query, key, sinks, tokens):
        token_order = tokens if sequence_sharding == "balanced" else None
        window = CausalMask() & LocalMask(30, 0)
        keywords = {
            "segment_ids": tokens,
            "token_order": token_order,
            "sinks": sinks,
            "implementation": BlockwiseTuning(32, 32),
        }
        return attend_over_mesh(query, key, key, window, layout, exchange=exchange, **keywords).sum()

    shapes, dtypes = [(2, 512, 4, 8), (2, 512, 2, 8), (4,), (2, 512)], ["float32", "float32", "float32", "int32"]
    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert [x.dtype for x in gradients] == dtypes[:3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decoding(dtype):
    caches = (
        lambda: SlabCache.empty(num_sequences=2, capacity=64, num_kv_heads=2, head_dim=8, dtype=dtype),
        lambda: UnifiedCache.empty(num_sequences=2, capacity=256, num_kv_heads=2, head_dim=8, dtype=dtype),
    )

    def step(cache, implementation):
        token, query = jnp.ones((2, 3, 2, 8), dtype), jnp.ones((2, 3, 4, 8), dtype)
        cache = cache.write(token, token, num_tokens=jnp.array([3, 1], jnp.int32))
        output = decode_attention(
            query, cache, CausalMask() & LocalMask(9, 0), sinks=jnp.ones(4), implementation=implementation
        )
        return cache, output

    for make in caches:
        for implementation in ("dense", "blockwise"):
            cache = jax.eval_shape(make)
            grown, output = jax.eval_shape(lambda cache, name=implementation: step(cache, name), cache)
            assert output.dtype == dtype
            assert [x.dtype for x in jax.tree.leaves(grown)] == [x.dtype for x in jax.tree.leaves(cache)]


@pytest.mark.parametrize("backend", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.jax_0_11)])
def test_grouped_matmuls(backend):
    choice = choose_grouped_matmul("bfloat16", (64, 64), Target.of(), backend, interpret=backend != "xla")

    def loss(rows, matrices, groups):
        order = group_rows(groups, 3, choice.alignment)
        (products,) = grouped_matmul(copy_rows(rows, order, 1, choice), [matrices], order, choice)
        return sum_copies(products, order, 1, choice).astype(jnp.float32).sum()

    shapes, dtypes = [(100, 64), (3, 64, 64), (100,)], ["bfloat16", "bfloat16", "int32"]
    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert [x.dtype for x in gradients] == dtypes[:2]


@pytest.mark.jax_0_11
def test_gated_mlps_of_groups():
    choice = choose_grouped_matmul("bfloat16", (64, 64), Target.of(), "mosaic_gpu", interpret=True)

    def loss(rows, matrices, weights, groups):
        order = group_rows(groups, 3, choice.alignment)
        weights = weights.at[order.sources].get(mode="fill", fill_value=0)
        activation = lambda gate, features: (gate * features, features, gate)  # noqa: E731
        matrices = GatedMatrices(matrices, matrices, matrices, None, None)
        outputs = grouped_gated_mlp(
            copy_rows(rows, order, 1, choice), weights, matrices, order, activation, choice, "x"
        )
        return sum_copies(outputs, order, 1, choice).astype(jnp.float32).sum()

    shapes, dtypes = [(100, 64), (3, 64, 64), (100,), (100,)], ["bfloat16", "bfloat16", "float32", "int32"]
    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert [x.dtype for x in gradients] == dtypes[:3]


@pytest.mark.jax_0_11
def test_exponentials_of_logits():
    shapes, dtypes = [(100, 64), (64, 128), (100,)], ["bfloat16", "bfloat16", "float32"]
    kernel = ExpLogits(Target.of(), interpret=True)
    outputs = jax.eval_shape(lambda *arrays: kernel(*arrays, soft_cap=None), *map(jax.ShapeDtypeStruct, shapes, dtypes))
    assert [x.dtype for x in outputs] == ["bfloat16", "float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, jnp.dtype("float32"), np.float64])
def test_the_type_of_sums_is_that_of_standard_promotion(dtype):
    with jax.numpy_dtype_promotion("standard"):
        assert at_least_float32(dtype) == jnp.promote_types(dtype, jnp.float32)
