"""Compares attention over several devices with NumPy's; run as a program by test_context.py and test_peer.py.

On CPU devices in float64, on two GPUs or four in bfloat16 or float16 by the exchanges that read their memory. For these
JAX stands in on the CPU.

Prints JSON lines: for each case the largest difference of the output and of each gradient, relative to the largest
value, or why the exchange refuses it.
"""

import dataclasses
import functools
import itertools
import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from kernels import (
    BlockwiseTuning,
    CausalMask,
    ChunkedCausalMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    PrefixMask,
    backends,
)
from kernels.collectives import chunks, peer_memory
from kernels.context import MeshLayout, attend_over_mesh, deal_tokens
from kernels.context.exchange import EXCHANGES

SMALL_TILES = BlockwiseTuning(16, 24)
AXES = ("data", "tensor", "context")
MESHES = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (1, 1, 2)]
DEALS = ("in_order", "zigzag", "by_cost")


class Sizes(NamedTuple):
    """Of attention's arrays, of all devices."""

    length: int = 96
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 6
    value_dim: int = 5
    dtype: str = "float64"


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


def compare(rng, shards, mask_name, deal, exchange, sizes, implementations):
    """The differences of one case, with documents, sinks, soft cap and tiles drawn at random."""
    mask, definition = MASKS[mask_name]
    num_ranks, batch, length, num_heads = shards[2], 2 * shards[0], sizes.length, sizes.num_heads
    features = (sizes.head_dim, sizes.head_dim, sizes.value_dim, sizes.value_dim)
    heads = (num_heads, sizes.num_kv_heads, sizes.num_kv_heads, num_heads)
    # Rounded to the devices' dtype, so that both sides begin with the same.
    *arrays, d_output = (
        np.asarray(jnp.asarray(rng.standard_normal((batch, length, *shape)), sizes.dtype), np.float64)
        for shape in zip(heads, features, strict=True)
    )
    sinks = rng.standard_normal(num_heads) if rng.integers(2) else None
    cap = float(rng.uniform(1, 4)) if rng.integers(2) else None

    place = np.tile(np.arange(length), (batch, 1))
    ids, positions, same = None, place, True
    if rng.integers(4):
        # Among the ids are the lowest that there is, and the highest.
        names = np.array([-(2**31), 2**31 - 1, *rng.choice(2**20, 6, replace=False)], np.int32)
        documents = np.sort(rng.integers(0, 8, (batch, length)), axis=1)
        # What ranks need of each other is told by the ranges of their ids, which rise, fall or say nothing.
        rising = np.sort(names)
        ids = (rising, rising[::-1], rng.permutation(names))[rng.integers(3)][documents]
        positions = np.stack([np.arange(length) - np.searchsorted(row, row) for row in documents])
        same = ids[:, None, :, None] == ids[:, None, None, :]
    heads = np.arange(num_heads)[None, :, None, None]
    evaluated_on = place if mask.translation_invariant else positions
    allowed = definition(heads, evaluated_on[:, None, :, None], evaluated_on[:, None, None, :]) & same
    allowed = np.broadcast_to(allowed, (batch, num_heads, length, length))
    expected, expected_gradients = numpy_attention(*arrays, allowed, sinks, cap, d_output)

    places = np.stack(
        [
            deal_tokens(deal, length, num_ranks, masks={mask: 1.0}, segment_ids=row)
            for row in (ids if ids is not None else [None] * batch)
        ]
    )

    def dealt(x, dtype=None):
        index = places.reshape(*places.shape, *[1] * (x.ndim - 2))
        return jnp.asarray(np.take_along_axis(x, index, axis=1), dtype)

    mesh = jax.make_mesh(shards, AXES, (AxisType.Auto,) * 3, devices=jax.devices()[: int(np.prod(shards))])
    layout = MeshLayout(mesh, ("data",), "context", "tensor", deal)

    def attend(query, key, value, sinks):
        return attend_over_mesh(
            query,
            key,
            value,
            mask,
            layout,
            segment_ids=None if ids is None else dealt(ids),
            positions=None if ids is None or mask.translation_invariant else dealt(positions).astype(jnp.int32),
            places=jnp.asarray(places) if deal == "by_cost" else None,
            sinks=sinks,
            logits_soft_cap=cap,
            implementation=implementations[rng.integers(len(implementations))],
            exchange=exchange,
        )

    @jax.jit
    def run(d_output, *inputs):
        output, pull_back = jax.vjp(attend, *inputs)
        return output, pull_back(d_output)

    inputs = (*(dealt(x, sizes.dtype) for x in arrays), None if sinks is None else jnp.asarray(sinks))
    try:
        output, gradients = run(dealt(d_output, sizes.dtype), *inputs)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    found = [output, *(x for x in gradients if x is not None)]
    wanted = [dealt(expected), *map(dealt, expected_gradients[:3]), *expected_gradients[3:]]
    differences = [
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-30))
        for a, b in zip(found, wanted, strict=True)
    ]
    return {"difference": float(np.max(differences))}  # Python's max would pass over a NaN


def stand_in_for_gpus() -> None:
    """Lets a few CPU devices pass for GPUs that read each other's memory: JAX's collectives do what the kernels do.

    And `blockwise` for a backend that may be given less than whole rows of keys: it visits the plan's tiles alone.
    """
    backends.TABLES["attention"] = tuple(
        dataclasses.replace(backend, longest_tile=SMALL_TILES.block_kv) if backend.name == "blockwise" else backend
        for backend in backends.BACKENDS
    )
    of_gpus = peer_memory.unsupported_reason

    def unsupported_reason(mesh, axis):
        are_all = mesh.shape[axis] == mesh.size and 2 <= mesh.size <= peer_memory.MOST_RANKS
        return None if are_all else of_gpus(mesh, axis)

    peer_memory.unsupported_reason = unsupported_reason
    chunks.unsupported_reason = lambda *_: None

    def by_distance(x, axis):
        """Every rank's, this rank's first, then the next one's."""
        return jnp.roll(lax.all_gather(x, axis), -lax.axis_index(axis), axis=0)

    def pick(x, numbers):
        return jax.vmap(lambda row, numbers: row[numbers])(x, numbers)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def gather_chunks(arrays, tables, axis, _):
        def put_together(x):
            rows = pick(jnp.concatenate(list(by_distance(x, axis)), axis=1), tables.of_row)
            is_there = jnp.arange(rows.shape[1]) < tables.num_chunks
            # The kernels leave what the memory held.
            return jnp.where(is_there.reshape(-1, *[1] * (x.ndim - 2)), rows, jnp.nan)

        return tuple(map(put_together, arrays))

    def backward(axis, _, tables, gradients):
        def sum_up(x):
            own, *places = jnp.moveaxis(tables.of_own, -1, 0)
            total = pick(x, own)
            for theirs, place in zip(by_distance(x, axis)[1:], places, strict=True):
                needed = (place > 0).reshape(*place.shape, *[1] * (x.ndim - 2))
                total += jnp.where(needed, pick(theirs, jnp.maximum(place - 1, 0)), 0)
            return total

        def unwritten(x):
            # Past the places that are put together, kernels write no gradients.
            is_there = jnp.arange(x.shape[1]) < tables.num_chunks
            return jnp.where(is_there.reshape(-1, *[1] * (x.ndim - 2)), x, jnp.nan)

        return tuple(sum_up(unwritten(x)) for x in gradients), None

    gather_chunks.defvjp(lambda arrays, tables, *rest: (gather_chunks(arrays, tables, *rest), tables), backward)
    chunks.gather_chunks = gather_chunks


def draw_sizes_of_gpus(rng, mask_name, num_ranks, exchange):
    """Such as the kernels serve, with rows of few chunks and of many; of halos whole tiles, which they alone read."""
    num_kv_heads, head_dim, value_dim = ((1, 256, 256), (2, 128, 128), (4, 64, 64), (4, 192, 128))[rng.integers(4)]
    # A mask of eight heads is for eight.
    num_heads = 8 if mask_name == "heads" else num_kv_heads * int(rng.choice([1, 2, 3]))
    length = num_ranks * int(rng.choice([128, 384, 640, 1408] if exchange == "halo" else [64, 320, 704, 1408]))
    return Sizes(length, num_heads, num_kv_heads, head_dim, value_dim, str(rng.choice(["bfloat16", "float16"])))


def draw_sizes(rng, num_ranks, deal, exchange):
    """Such as CPU devices take no time for. Halos come in whole tiles where runs do."""
    lengths = {"peer": [768], "halo": [96, 128 * num_ranks * (2 if deal == "zigzag" else 1)]}
    return Sizes(int(rng.choice(lengths.get(exchange, [96]))))


def draw_cases(rng, num_cases, of_gpus):
    """Cases of all exchanges; of GPUs, and a seventh of the others, of a few that read each other's memory."""
    # Causal masks have the most to show there: their rows are compact.
    masks_of_peers = [*MASKS, *["causal"] * len(MASKS)]
    numbers = (2, 4) if of_gpus else (2, 3, 4)
    meshes_of_peers = [(1, 1, number) for number in numbers if number <= jax.device_count()]
    of_peers = list(itertools.product(meshes_of_peers, masks_of_peers, DEALS, ["peer"]))
    # A third of them are halos that are read from the neighbours' memory.
    halos = list(itertools.product(meshes_of_peers, ("window", "both sides", "ahead"), ("in_order",), ["halo"]))
    of_peers += halos * (len(of_peers) // (2 * len(halos)))
    of_others = list(itertools.product(MESHES, MASKS, DEALS, [name for name in EXCHANGES if name != "peer"]))
    num_of_peers = num_cases if of_gpus else num_cases // 7
    rng.shuffle(of_peers)
    rng.shuffle(of_others)
    return of_peers[:num_of_peers] + of_others[: num_cases - num_of_peers]


def main(seed: int, num_cases: int) -> None:
    rng = np.random.default_rng(seed)
    of_gpus = jax.devices()[0].platform == "gpu"
    if not of_gpus:
        jax.config.update("jax_enable_x64", True)
        stand_in_for_gpus()
    for shards, mask_name, deal, exchange in draw_cases(rng, num_cases, of_gpus):
        implementations = [None] if of_gpus else [SMALL_TILES] if exchange == "peer" else ["reference", SMALL_TILES]
        sizes = draw_sizes(rng, shards[2], deal, exchange)
        if of_gpus:
            sizes = draw_sizes_of_gpus(rng, mask_name, shards[2], exchange)
        result = compare(rng, shards, mask_name, deal, exchange, sizes, implementations)
        case = {"mesh": shards, "mask": mask_name, "deal": deal, "exchange": exchange, "sizes": sizes}
        print(json.dumps(case | result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
