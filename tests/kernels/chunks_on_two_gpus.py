"""Compares rows put together from two GPUs' chunks, and sums of them, with NumPy, bit by bit; run by test_peer.py.

Draws tables, shapes and dtypes, and prints a JSON line for each draw.
"""

import json
import sys

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


def draw_tables(rng, batch, num_own):
    """Of both GPUs: chunks in any order, of which each is read by the other GPU or not."""
    num_chunks = 2 * num_own
    of_row = np.zeros((2, batch, num_chunks), np.int32)
    of_own = np.zeros((2, batch, num_own), np.int32)
    for b in range(batch):
        places = rng.permutation(num_chunks).reshape(2, num_own)
        is_needed = rng.random((2, num_own)) < rng.choice([0.0, 0.1, 0.5, 1.0])
        for rank in range(2):
            of_row[rank, b, places[rank]] = np.arange(num_own)
            read, not_read = is_needed[rank], ~is_needed[rank]
            of_row[1 - rank, b, places[rank][read]] = num_own + np.flatnonzero(read)
            of_row[1 - rank, b, places[rank][not_read]] = rng.integers(num_own, size=not_read.sum())
            of_own[rank, b] = places[rank] + num_chunks * read
    return of_row, of_own


def numpy_layers(x, of_row, of_own):
    """Rows and sums of all layers, of both GPUs' chunks `[2, B, n, …]`."""
    found, dtype, num_own = [], x.dtype, x.shape[2]
    for _ in range(NUM_LAYERS):
        rows = [
            np.stack([np.concatenate([x[rank, b], x[1 - rank, b]])[of_row[rank, b]] for b in range(x.shape[1])])
            for rank in range(2)
        ]
        found += rows
        sums = np.empty_like(x)
        for rank, b in np.ndindex(2, x.shape[1]):
            place, is_sum = of_own[rank, b] % (2 * num_own), of_own[rank, b] >= 2 * num_own
            theirs = rows[1 - rank][b, place].astype(np.float32)
            own = rows[rank][b, place].astype(np.float32)
            sums[rank, b] = np.where(is_sum.reshape(-1, *[1] * (own.ndim - 1)), own + theirs, own).astype(dtype)
        x = sums
        found += list(sums)
    return found


def is_exact(rng, mesh, batch, num_own, shapes, dtype):
    length, *dims = shapes
    of_row, of_own = draw_tables(rng, batch, num_own)
    arrays = [
        np.asarray(jnp.asarray(rng.standard_normal((2, batch, num_own, length, *shape)), dtype)) for shape in dims
    ]
    num_multiprocessors = Target.of(mesh.devices.flat[0]).num_multiprocessors

    def layers(of_row, of_own, *arrays):
        tables, arrays, found = ChunkTables(of_row[0], of_own[0]), tuple(x[0] for x in arrays), []
        for _ in range(NUM_LAYERS):
            rows, vjp = jax.vjp(lambda x: gather_chunks(x, tables, "context", num_multiprocessors), arrays)
            (arrays,) = vjp(rows)
            found.append((rows, arrays))
        return jax.tree.map(lambda x: x[None], found)

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=P("context"), out_specs=P("context"), check_vma=False)
    sharding = NamedSharding(mesh, P("context"))
    found = jax.jit(mapped)(*(jax.device_put(x, sharding) for x in (of_row, of_own, *arrays)))
    for i, x in enumerate(arrays):
        expected = numpy_layers(x, of_row, of_own)
        actual = [np.asarray(each)[rank] for rows, sums in found for each in (rows[i], sums[i]) for rank in range(2)]
        if not all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in zip(actual, expected, strict=True)):
            return False
    return True


def main(seed: int, num_draws: int) -> None:
    rng = np.random.default_rng(seed)
    mesh = jax.make_mesh((1, 2), ("data", "context"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    for draw in range(num_draws):
        batch, shapes = int(rng.integers(1, 4)), SHAPES[draw % len(SHAPES)]
        # A program copies none, one or several tiles, so that it waits for each stage again and again.
        num_own = int(rng.choice([1, 7, 100, 900]) if draw else 900)
        dtype = str(rng.choice(["bfloat16", "float16"]))
        exact = is_exact(rng, mesh, batch, num_own, shapes, dtype)
        print(json.dumps({"batch": batch, "num_own": num_own, "shapes": shapes, "is_exact": exact}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
