"""Compares attention over several devices with NumPy's, for test_context_on_devices.py.

Run as a program by test_peer.py, on two GPUs or four: in bfloat16 or float16, by the exchanges that read their memory.
Prints JSON lines: for each case the largest difference of the output and of each gradient, relative to the largest
value.
"""

import itertools
import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from kernels import CausalMask, ChunkedCausalMask, LocalMask, MaskFn, MultiHeadMask, PrefixMask
from kernels.backends.tuning import Tuning
from kernels.context import MeshLayout, attend_over_mesh, shard_sequence
from tests.kernels.contract_cases import draw_bounds

AXES = ("data", "tensor", "context")
SEQUENCE_SHARDINGS = ("contiguous", "zigzag", "balanced")
DOCUMENTS = ("none", "rising", "falling", "shuffled")
"""What ranks need of each other is told by the ranges of documents' ids, which rise, fall or say nothing."""
WILD = "k_start k_end q_start q_end"
BOUNDS = (None, "tree", "prefix", "blocks", "window", None, WILD)
"""As `draw_bounds` has them."""


class Sizes(NamedTuple):
    """Of attention's arrays, of all devices."""

    length: int = 96
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 6
    value_dim: int = 5
    dtype: str = "float64"


class Case(NamedTuple):
    """A call over a mesh; of the masks, documents and shardings by their names."""

    mesh: tuple[int, int, int]
    exchange: str
    sequence_sharding: str
    mask: str
    documents: str
    has_sinks: bool
    has_soft_cap: bool
    sizes: Sizes = Sizes()
    implementation: str | Tuning | None = None
    bounds: str | None = None
    may_restart: bool = False  # positions are in any order, as bounds allow


# The mask, and its definition on (heads, query, key) positions.
MASKS = {
    "causal": (CausalMask(), lambda h, q, k: k <= q),
    "window": (CausalMask() & LocalMask(17, 0), lambda h, q, k: (k <= q) & (q - k <= 17)),
    "both sides": (LocalMask(9, 12), lambda h, q, k: (q - k <= 9) & (k - q <= 12)),
    "chunked": (ChunkedCausalMask(20), lambda h, q, k: (k <= q) & (k // 20 == q // 20)),
    "prefix": (CausalMask() | PrefixMask(13), lambda h, q, k: (k <= q) | (k < 13)),
    "function": (MaskFn(lambda q, k: (k <= q) & ((q - k) % 3 != 1)), lambda h, q, k: (k <= q) & ((q - k) % 3 != 1)),
    "ahead": (LocalMask(-2, 30), lambda h, q, k: (k - q >= 2) & (k - q <= 30)),
    "heads": (
        MultiHeadMask([CausalMask(), CausalMask() & LocalMask(17, 0)] * 4),
        lambda h, q, k: (k <= q) & ((h % 2 == 0) | (q - k <= 17)),
    ),
}


def numpy_attention(query, key, value, allowed, sinks, cap, d_output):
    """Output and gradients by the definition, one head at a time."""
    (batch, _, num_heads, head_dim), group = query.shape, query.shape[2] // key.shape[2]
    output, gradients = np.zeros_like(d_output), [np.zeros_like(x) for x in (query, key, value)]
    d_sinks = np.zeros(num_heads)
    for b, n in itertools.product(range(batch), range(num_heads)):
        kv = n // group
        q, k, v = query[b, :, n], key[b, :, kv], value[b, :, kv]
        raw = q @ k.T / np.sqrt(head_dim)
        logits = raw if cap is None else cap * np.tanh(raw / cap)
        weights = np.where(allowed[b, n], np.exp(logits), 0)
        attends = allowed[b, n].any(1)
        total = weights.sum(1) + (0 if sinks is None else np.exp(sinks[n]))
        p = weights / np.where(attends, total, 1)[:, None]
        output[b, :, n] = p @ v
        d_p = d_output[b, :, n] @ v.T
        delta = (p * d_p).sum(1)
        d_logits = p * (d_p - delta[:, None]) * (1 if cap is None else 1 - (logits / cap) ** 2) / np.sqrt(head_dim)
        gradients[0][b, :, n] += d_logits @ k
        gradients[1][b, :, kv] += d_logits.T @ q
        gradients[2][b, :, kv] += p.T @ d_output[b, :, n]
        if sinks is not None:
            d_sinks[n] -= np.where(attends, np.exp(sinks[n]) / total * delta, 0).sum()
    return output, [*gradients, *([] if sinks is None else [d_sinks])]


def compare(rng, case):
    """The largest difference of a case's output and gradients from NumPy's, relative to the largest value.

    Raises:
      ValueError: the case is refused.
    """
    mask, definition = MASKS[case.mask]
    sizes, num_ranks, batch = case.sizes, case.mesh[2], 2 * case.mesh[0]
    length, num_heads = sizes.length, sizes.num_heads
    features = (sizes.head_dim, sizes.head_dim, sizes.value_dim, sizes.value_dim)
    heads = (num_heads, sizes.num_kv_heads, sizes.num_kv_heads, num_heads)
    # Rounded to the devices' dtype, so that both sides begin with the same.
    *arrays, d_output = (
        np.asarray(jnp.asarray(rng.standard_normal((batch, length, *shape)), sizes.dtype), np.float64)
        for shape in zip(heads, features, strict=True)
    )
    sinks = rng.standard_normal(num_heads) if case.has_sinks else None
    cap = float(rng.uniform(1, 4)) if case.has_soft_cap else None

    place = np.tile(np.arange(length), (batch, 1))
    ids, positions, same = None, place, True
    if case.documents != "none":
        # Among the ids are the lowest that there is, and the highest.
        names = np.array([-(2**31), 2**31 - 1, *rng.choice(2**20, 6, replace=False)], np.int32)
        names = rng.permutation(names) if case.documents == "shuffled" else np.sort(names)
        documents = np.sort(rng.integers(0, 8, (batch, length)), axis=1)
        ids = (names[::-1] if case.documents == "falling" else names)[documents]
        positions = np.stack([np.arange(length) - np.searchsorted(row, row) for row in documents])
        same = ids[:, None, :, None] == ids[:, None, None, :]
    has_positions = case.may_restart or (ids is not None and not mask.translation_invariant)
    if case.may_restart:
        positions = rng.integers(0, length // 2, place.shape)
    heads = np.arange(num_heads)[None, :, None, None]
    evaluated_on = positions if has_positions else place
    allowed = definition(heads, evaluated_on[:, None, :, None], evaluated_on[:, None, None, :]) & same
    bounds = None if case.bounds is None else draw_bounds(rng, case.bounds, batch, length, length)
    bounds = jax.tree.map(lambda bound: np.broadcast_to(bound, place.shape), bounds)
    for name, bound in () if bounds is None else bounds._asdict().items():
        if bound is not None:
            limit, index = bound[:, None, :, None], place[:, None, None]
            if name.startswith("q"):
                limit, index = limit.swapaxes(2, 3), index.swapaxes(2, 3)
            allowed &= index >= limit if name.endswith("start") else index < limit
    allowed = np.broadcast_to(allowed, (batch, num_heads, length, length))
    expected, expected_gradients = numpy_attention(*arrays, allowed, sinks, cap, d_output)

    token_order = np.stack(
        [
            shard_sequence(
                case.sequence_sharding,
                length,
                num_ranks,
                masks={mask: 1.0},
                segment_ids=None if ids is None else ids[row],
                bounds=jax.tree.map(lambda bound, row=row: bound[row], bounds),
            )
            for row in range(batch)
        ]
    )

    def sharded(x, dtype=None):
        index = token_order.reshape(*token_order.shape, *[1] * (x.ndim - 2))
        return jnp.asarray(np.take_along_axis(x, index, axis=1), dtype)

    mesh = jax.make_mesh(case.mesh, AXES, (AxisType.Auto,) * 3, devices=jax.devices()[: int(np.prod(case.mesh))])
    layout = MeshLayout(mesh, ("data",), "context", "tensor", case.sequence_sharding)

    def attend(query, key, value, sinks):
        return attend_over_mesh(
            query,
            key,
            value,
            mask,
            layout,
            segment_ids=None if ids is None else sharded(ids),
            positions=sharded(positions).astype(jnp.int32) if has_positions else None,
            bounds=jax.tree.map(sharded, bounds),
            token_order=jnp.asarray(token_order) if case.sequence_sharding == "balanced" else None,
            sinks=sinks,
            logits_soft_cap=cap,
            implementation=case.implementation,
            exchange=case.exchange,
        )

    @jax.jit
    def run(d_output, *inputs):
        output, pull_back = jax.vjp(attend, *inputs)
        return output, pull_back(d_output)

    inputs = (*(sharded(x, sizes.dtype) for x in arrays), None if sinks is None else jnp.asarray(sinks))
    output, gradients = run(sharded(d_output, sizes.dtype), *inputs)
    found = [output, *(x for x in gradients if x is not None)]
    wanted = [sharded(expected), *map(sharded, expected_gradients[:3]), *expected_gradients[3:]]
    differences = [
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-30))
        for a, b in zip(found, wanted, strict=True)
    ]
    return float(np.max(differences))  # Python's max would pass over a NaN


def draw_sizes_of_gpus(rng, mask_name, num_ranks, exchange):
    """Such as the kernels serve, with rows of few chunks and of many; of halos whole tiles, which they alone read."""
    num_kv_heads, head_dim, value_dim = ((1, 256, 256), (2, 128, 128), (4, 64, 64), (4, 192, 128))[rng.integers(4)]
    # A mask of eight heads is for eight.
    num_heads = 8 if mask_name == "heads" else num_kv_heads * int(rng.choice([1, 2, 3]))
    length = num_ranks * int(rng.choice([128, 384, 640, 1408] if exchange == "halo" else [64, 320, 704, 1408]))
    return Sizes(length, num_heads, num_kv_heads, head_dim, value_dim, str(rng.choice(["bfloat16", "float16"])))


def draw_cases(rng, num_cases):
    """Cases of two GPUs, or four, that read each other's memory; a third of them are halos."""
    meshes = [(1, 1, number) for number in (2, 4) if number <= jax.device_count()]
    # Causal masks have the most to show: their rows are compact.
    cases = list(itertools.product(meshes, ["peer"], SEQUENCE_SHARDINGS, [*MASKS, *["causal"] * len(MASKS)]))
    halos = list(itertools.product(meshes, ["halo"], ["contiguous"], ["window", "both sides", "ahead"]))
    cases += halos * (len(cases) // (2 * len(halos)))
    rng.shuffle(cases)
    for mesh, exchange, sequence_sharding, mask in cases[:num_cases]:
        documents, (has_sinks, has_soft_cap) = str(rng.choice(DOCUMENTS)), map(bool, rng.integers(2, size=2))
        sizes = draw_sizes_of_gpus(rng, mask, mesh[2], exchange)
        bounds = BOUNDS[rng.integers(len(BOUNDS))]
        yield Case(mesh, exchange, sequence_sharding, mask, documents, has_sinks, has_soft_cap, sizes, None, bounds)


def main(seed: int, num_cases: int) -> None:
    rng = np.random.default_rng(seed)
    for case in draw_cases(rng, num_cases):
        print(json.dumps(case._asdict() | {"difference": compare(rng, case)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
