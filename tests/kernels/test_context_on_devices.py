"""Attention over a mesh of eight CPU devices is NumPy's, by every exchange; what one can't serve is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kernels import BlockwiseTuning, CausalMask, LocalMask, SplashTuning, dot_product_attention
from kernels.context import MeshLayout, attend_over_mesh
from kernels.context.choose_exchange import EXCHANGES
from tests.kernels.context_on_devices import (
    AXES,
    BOUNDS,
    DOCUMENTS,
    MASKS,
    SEQUENCE_SHARDINGS,
    WILD,
    Case,
    Sizes,
    compare,
)
from tests.kernels.contract_cases import draw_bounds
from tests.kernels.peers_on_cpus import pass_for_gpus

pytestmark = pytest.mark.usefixtures("eight_devices")

SMALL_TILES = BlockwiseTuning(16, 24)
KERNELS = ("reference", "reference", SMALL_TILES)  # XLA takes several times as long for blockwise's loops
MESHES = ((1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (1, 1, 2))
FEW = ((1, 1, 2), (1, 1, 3), (1, 1, 4))
"""As many devices as read each other's memory where they are GPUs."""
WITH_REACH = ("window", "both sides", "chunked", "ahead")
NUM_CASES = 5


def in_turn(rng, levels, num):
    """So many of the levels, each as often as any other, give or take one, in any order."""
    rounds = [rng.permutation(len(levels)) for _ in range(-(-num // len(levels)))]
    return [levels[index] for index in rng.permutation(np.concatenate(rounds)[:num])]


def draw_cases(rng, exchange, num, *, meshes=MESHES, shardings=SEQUENCE_SHARDINGS, masks=tuple(MASKS), kernels=KERNELS):
    """Cases that an exchange serves. It meets each mesh, sharding, and kind of documents."""
    while True:
        flags = (True, False)
        levels = meshes, [exchange], shardings, masks, DOCUMENTS, flags, flags, [Sizes()], kernels, BOUNDS
        cases = list(map(Case, *(in_turn(rng, of_field, num) for of_field in levels)))
        if not any(refuses_masks_of_heads(case) or refuses_positions(case) for case in cases):
            return cases


def refuses_masks_of_heads(case):
    """Each of four heads has a mask: they can't be split, nor can four go to eight ranks."""
    return case.mask == "heads" and (case.mesh[1] > 1 or (case.exchange, case.mesh[2]) == ("all_to_all", 8))


def refuses_positions(case):
    """A chunked mask is evaluated on positions in documents, which tell no distances where there are bounds."""
    return case.exchange == "halo" and case.mask == "chunked" and case.documents != "none" and case.bounds is not None


def check(rng, cases):
    for case in cases:
        assert compare(rng, case) < 1e-12, case


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "all_to_all"])
def test_eight_devices_compute_what_numpy_does(exchange, rng, float64):
    check(rng, draw_cases(rng, exchange, NUM_CASES))


def test_a_ring_goes_round_as_far_as_windows_reach(rng, float64):
    """They reach back over more ranks than one."""
    cases = draw_cases(
        rng, "ring", 2, meshes=[(1, 1, 8)], shardings=["contiguous"], masks=["window", "chunked"], kernels=["reference"]
    )
    check(rng, cases)


def test_halos_compute_what_numpy_does(rng, float64):
    def in_whole_tiles(case):
        """Of runs that have whole tiles, halos are whole tiles."""
        if case.mesh != (1, 1, 2):
            return case
        return case._replace(sizes=Sizes(length=256 if case.sequence_sharding == "contiguous" else 512))

    cases = draw_cases(rng, "halo", NUM_CASES, shardings=SEQUENCE_SHARDINGS[:2], masks=WITH_REACH)
    check(rng, map(in_whole_tiles, cases))


def test_devices_that_read_each_others_memory_compute_what_numpy_does(rng, float64, gpus):
    # Causal masks have the most to show: within documents, their rows are compact.
    masks = ("causal", "causal", str(rng.choice([name for name in MASKS if name != "causal"])))
    cases = draw_cases(rng, "peer", 3, meshes=FEW, masks=masks, kernels=[SMALL_TILES])
    check(rng, [case._replace(sizes=Sizes(length=192)) for case in cases])


def test_halos_that_are_read_from_the_neighbours_memory_are_what_numpy_has(rng, float64, gpus):
    check(
        rng, draw_cases(rng, "halo", 2, meshes=FEW, shardings=["contiguous"], masks=["window", "both sides", "ahead"])
    )


@pytest.mark.parametrize(
    ("exchange", "sequence_sharding", "mask", "shape", "message"),
    [
        *(("halo", "balanced", mask, (2, 1, 4), "decides for each sequence") for mask in WITH_REACH),
        *(
            ("halo", "contiguous", mask, (2, 1, 4), "needs a mask that reaches only so far")
            for mask in ("causal", "prefix", "function")
        ),
        ("halo", "zigzag", "heads", (2, 1, 4), "mask that reaches only so far"),
        ("all_to_all", "contiguous", "heads", (1, 1, 8), "4 don't divide by 8 ranks"),
        *((exchange, "zigzag", "heads", (1, 2, 4), "tensor=2 one program") for exchange in EXCHANGES),
    ],
)
def test_what_an_exchange_cannot_serve_is_refused_and_never_computed_otherwise(
    exchange, sequence_sharding, mask, shape, message, rng, float64
):
    with pytest.raises(ValueError, match=message):
        compare(rng, Case(shape, exchange, sequence_sharding, mask, "rising", True, True, implementation="reference"))


def test_a_halo_refuses_positions_that_may_restart(rng, float64):
    case = Case((1, 1, 2), "halo", "contiguous", "window", "none", False, False, bounds="tree", may_restart=True)
    with pytest.raises(ValueError, match="needs positions that count up within a document, and with bounds they may"):
        compare(rng, case)


@pytest.fixture
def gpus(monkeypatch):
    """A few CPU devices pass for GPUs that read each other's memory, and `blockwise` takes part of the keys."""
    pass_for_gpus(monkeypatch, SMALL_TILES.block_kv)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bounds_of_queries_and_of_keys_in_any_order_are_numpys(exchange, rng, float64, gpus):
    sharding, mask = ("zigzag", "window") if exchange == "halo" else ("balanced", "causal")
    case = Case((1, 1, 4), exchange, sharding, mask, "rising", False, False, implementation="reference", bounds=WILD)
    if exchange == "peer":
        case = case._replace(sizes=Sizes(length=192), implementation=SMALL_TILES)
    check(rng, [case])


@pytest.mark.full  # the interpreter takes some 10 s for each
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name != "peer"])
def test_splash_serves_bounds_over_a_mesh(exchange, rng):
    sharding, mask = ("zigzag", "window") if exchange == "halo" else ("balanced", "causal")
    sizes = Sizes(length=256, num_heads=2, num_kv_heads=2, head_dim=8, value_dim=8, dtype="float32")
    case = Case((1, 1, 2), exchange, sharding, mask, "rising", False, False, sizes)
    splash = SplashTuning.square(128, interpret=True)
    case = case._replace(implementation=splash, bounds=str(rng.choice(["tree", "blocks", WILD])))
    assert compare(rng, case) < 16 * np.finfo(np.float32).eps, case


@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name != "halo"])
def test_under_bounds_positions_may_restart_within_a_document(exchange, rng, float64, gpus):
    """A window then reaches tokens that are far away in the sequence, before the query and after it."""
    case = Case((1, 1, 4), exchange, "contiguous", "window", "rising", False, False, implementation="reference")
    check(rng, [case._replace(bounds="tree", may_restart=True, documents=name) for name in ("rising", "none")])


def test_bounds_within_a_shard_map_are_indices_in_the_whole_sequence(rng, float64):
    """The arrays are those of one device then, and shorter than the sequence."""
    x, bounds = rng.standard_normal((2, 96, 2, 4)), draw_bounds(rng, WILD, 2, 96, 96)
    mesh = jax.make_mesh((1, 1, 4), AXES, (AxisType.Auto,) * 3, devices=jax.devices()[:4])
    layout, tokens = MeshLayout(mesh, ("data",), "context", "tensor"), P(None, "context")

    def attend(x, bounds):
        return attend_over_mesh(x, x, x, CausalMask(), layout, bounds=bounds)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(tokens, tokens), out_specs=tokens, check_vma=False)
    expected = dot_product_attention(x, x, x, CausalMask(), bounds=bounds, implementation="reference")
    assert np.abs(jax.jit(mapped)(x, bounds) - expected).max() < 1e-12


@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name != "peer"])
def test_layers_are_differentiated_in_a_scan_over_heads_and_tokens(exchange, rng, float64):
    """Documents are the same in all layers: what follows from them alone, JAX takes out of the scan."""
    batch, length, num_heads, head_dim, num_layers, mask = 2, 32, 4, 4, 3, CausalMask() & LocalMask(13, 0)
    weights = rng.standard_normal((num_layers, head_dim))
    hidden = rng.standard_normal((batch, length, num_heads, head_dim))
    documents = np.cumsum(rng.random((batch, length)) < 0.1, axis=1, dtype=np.int32)
    mesh = jax.make_mesh((1, 2, 2), AXES, (AxisType.Auto,) * 3, devices=jax.devices()[:4])
    layout = MeshLayout(mesh, ("data",), "context", "tensor")

    def gradients(attend):
        def loss(weights, hidden, documents):
            def layer(hidden, weight):
                return hidden + attend(hidden * weight, hidden, hidden, documents), None

            return jnp.square(lax.scan(layer, hidden, weights)[0]).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, hidden, documents)

    def on_one_device(query, key, value, documents):
        options = {"query_segment_ids": documents, "key_value_segment_ids": documents}
        return dot_product_attention(query, key, value, mask, implementation="reference", **options)

    def on_mesh(query, key, value, documents):
        return attend_over_mesh(query, key, value, mask, layout, segment_ids=documents, exchange=exchange)

    for found, expected in zip(gradients(on_mesh), gradients(on_one_device), strict=True):
        assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()
