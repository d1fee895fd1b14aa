"""Compares rows put together from two or four GPUs' chunks, and sums of them, with NumPy, bit by bit; for test_peer.py.

Draws tables, shapes and dtypes, and prints a JSON line for each draw.
"""

import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import Target
from kernels.collectives.chunks import ChunkTables, gather_chunks

# One after another: a GPU that runs ahead would read what isn't there yet, or write over what is still read.
NUM_LAYERS = 3
# Tokens of a chunk, and dims of each of two arrays: alike, for one kernel, and not, for two.
SHAPES = [(64, (2, 64), (2, 64)), (256, (1, 64), (1, 64)), (128, (1, 192), (1, 128)), (32, (4, 64), (8, 64))]


class Places(NamedTuple):
    """Where all GPUs' chunks stand, and the kernels' tables that say so."""

    of_row: np.ndarray
    of_own: np.ndarray
    num_chunks: np.ndarray
    places: np.ndarray  # [this GPU's rows, B, holder, chunk]; −1: not needed there


def draw_places(rng, num_ranks, batch, num_own):
    """Chunks in any order, which each other GPU reads or not, anywhere in its rows or one after another."""
    num_all, is_compact, ranks = num_ranks * num_own, rng.integers(2), range(num_ranks)
    of_row = rng.integers(num_own, size=(num_ranks, batch, num_all), dtype=np.int32)
    of_own = np.zeros((num_ranks, batch, num_own, num_ranks), np.int32)
    places = np.full((num_ranks, batch, num_ranks, num_own), -1)
    num_chunks = np.zeros((num_ranks, 1), np.int32)
    for b in range(batch):
        for here in ranks:
            is_there = rng.random((num_ranks, num_own)) < rng.choice([0.0, 0.1, 0.5, 1.0])
            is_there[here] = True
            num_there = is_there.sum() if is_compact else num_all
            places[here, b][is_there] = rng.permutation(num_there)[: is_there.sum()]
            for holder in ranks:
                chunks = np.flatnonzero(is_there[holder])
                of_row[here, b, places[here, b, holder, chunks]] = chunks + num_own * ((holder - here) % num_ranks)
            num_chunks[here] = max(num_chunks[here], num_there)
        for here in ranks:
            of_own[here, b, :, 0] = places[here, b, here]
            for distance in range(1, num_ranks):
                of_own[here, b, :, distance] = places[(here + distance) % num_ranks, b, here] + 1
    return Places(of_row, of_own, num_chunks, places)


def numpy_layers(x, drawn):
    """Rows, as far as they are put together, and sums of all layers, of all GPUs' chunks `[R, B, n, …]`."""
    found, dtype, num_ranks = [], x.dtype, len(x)
    for _ in range(NUM_LAYERS):
        rows = [
            np.stack(
                [
                    np.concatenate([x[(here + i) % num_ranks, b] for i in range(num_ranks)])[drawn.of_row[here, b]]
                    for b in range(x.shape[1])
                ]
            )
            for here in range(num_ranks)
        ]
        found += [rows[here][:, : drawn.num_chunks[here, 0]] for here in range(num_ranks)]
        sums = np.empty_like(x)
        for here, b, chunk in np.ndindex(*x.shape[:3]):
            total = rows[here][b, drawn.places[here, b, here, chunk]].astype(np.float32)
            for rank in ((here + i) % num_ranks for i in range(1, num_ranks)):
                if (theirs := drawn.places[rank, b, here, chunk]) >= 0:
                    total = total + rows[rank][b, theirs].astype(np.float32)
            sums[here, b, chunk] = total.astype(dtype)
        x = sums
        found += list(sums)
    return found


def is_exact(rng, mesh, batch, num_own, shapes, dtype):
    (length, *dims), num_ranks = shapes, mesh.size
    drawn = draw_places(rng, num_ranks, batch, num_own)
    arrays = [
        np.asarray(jnp.asarray(rng.standard_normal((num_ranks, batch, num_own, length, *shape)), dtype))
        for shape in dims
    ]
    num_multiprocessors = Target.of(mesh.devices.flat[0]).num_multiprocessors

    def layers(tables, *arrays):
        (tables, arrays), found = jax.tree.map(lambda x: x[0], (tables, arrays)), []
        for _ in range(NUM_LAYERS):
            rows, vjp = jax.vjp(lambda x: gather_chunks(x, tables, "context", num_multiprocessors), arrays)
            (arrays,) = vjp(rows)
            found.append((rows, arrays))
        return jax.tree.map(lambda x: x[None], found)

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False)
    sharding = NamedSharding(mesh, P("context"))
    tables = ChunkTables(drawn.of_row, drawn.of_own, drawn.num_chunks)
    found = jax.jit(mapped)(*jax.device_put((tables, *arrays), sharding))
    for i, x in enumerate(arrays):
        expected, actual = numpy_layers(x, drawn), []
        for rows, sums in found:
            actual += [np.asarray(rows[i])[here][:, : drawn.num_chunks[here, 0]] for here in range(num_ranks)]
            actual += list(np.asarray(sums[i]))
        if not all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in zip(actual, expected, strict=True)):
            return False
    return True


def main(seed: int, num_draws: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = [number for number in (2, 4) if number <= jax.device_count()]
    for draw in range(num_draws):
        num_ranks = numbers[-1 - draw % len(numbers)]
        mesh = jax.make_mesh(
            (1, num_ranks), ("data", "context"), (AxisType.Auto,) * 2, devices=jax.devices()[:num_ranks]
        )
        batch, shapes = int(rng.integers(1, 4)), SHAPES[draw % len(SHAPES)]
        # A program copies none, one or several tiles, so that it waits for each stage again and again.
        num_own = int(rng.choice([1, 7, 100, 900]) if draw else 900)
        dtype = str(rng.choice(["bfloat16", "float16"]))
        exact = is_exact(rng, mesh, batch, num_own, shapes, dtype)
        print(
            json.dumps(
                {"num_ranks": num_ranks, "batch": batch, "num_own": num_own, "shapes": shapes, "is_exact": exact}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
