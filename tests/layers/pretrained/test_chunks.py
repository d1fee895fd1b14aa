"""Pieces make up every shard, whatever the shards, and nothing is read twice that needn't be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layers.pretrained.chunks import find_chunks


def _random_shards(rng, shape, num_cuts):
    """A grid of boxes that fills the shape."""
    edges = []
    for size, cuts in zip(shape, num_cuts, strict=True):
        inner = rng.choice(np.arange(1, size), min(cuts, size - 1), replace=False) if size > 1 else []
        edges.append(sorted({0, size, *map(int, inner)}))
    return [tuple(box) for box in itertools.product(*(itertools.pairwise(edge) for edge in edges))]


def _assemble(shards, chunks, array, num_stacked):
    """Each shard as its chunks write it, how often each of its entries is written, and how often each is read."""
    made = {shard: np.full([stop - start for start, stop in shard], -1) for shard in shards}
    written = {shard: np.zeros_like(part) for shard, part in made.items()}
    num_reads = np.zeros_like(array)
    for chunk in chunks:
        for block, place in enumerate(chunk.positions(), chunk.first):
            box = tuple(slice(*bounds) for bounds in chunk.box)
            num_reads[(*place, *box)] += 1
            for shard in chunk.shards:
                part = tuple(slice(*bounds) for bounds in chunk.part_of(shard))
                taken = array[(*place, *box)][part]
                first, *starts = chunk.starts_in(shard)
                into = tuple(slice(start, start + size) for start, size in zip(starts, taken.shape, strict=True))
                at = (first + block - chunk.first, *into)
                rest = made[shard].shape[num_stacked:]
                made[shard].reshape(-1, *rest)[at] = taken
                written[shard].reshape(-1, *rest)[at] += 1
    return made, written, num_reads


@pytest.mark.parametrize("num_stacked", [0, 1, 2])
def test_chunks_make_up_each_shard(num_stacked, rng):
    for _ in range(60):
        num_dims = num_stacked + int(rng.integers(1, 4))
        shape = rng.integers(1, 7, num_dims).tolist()
        shards = _random_shards(rng, shape, rng.integers(0, 3, num_dims))
        array = rng.permutation(np.prod(shape)).reshape(shape)
        outer = int(rng.integers(num_dims - num_stacked))
        kept = [shard for shard in shards if rng.random() < 0.8] or shards
        chunk_bytes = int(rng.integers(1, 40))
        chunks = list(find_chunks(kept, num_stacked, outer, 2, chunk_bytes))
        made, written, num_reads = _assemble(kept, chunks, array, num_stacked)
        for shard in kept:
            np.testing.assert_array_equal(made[shard], array[tuple(slice(*bounds) for bounds in shard)])
            assert (written[shard] == 1).all()
        assert num_reads.max() <= 1, "the shards are disjoint, and so is what is read"
        held = sum(np.prod([stop - start for start, stop in shard]) for shard in kept)
        assert num_reads.sum() == held, "nothing is read that no shard holds"
        for chunk in chunks:
            sizes = [stop - start for start, stop in chunk.box]
            row = np.prod(sizes) // sizes[outer]
            assert 2 * chunk.num_blocks * np.prod(sizes) <= max(chunk_bytes, 2 * row)


def test_columns_of_one_host_are_read_as_whole_rows():
    quarters = [((0, 2), (0, 8), (start, start + 2)) for start in (0, 2, 4, 6)]
    (chunk,) = find_chunks(quarters, 1, 0, 4, 1000)
    assert (chunk.box, chunk.shards) == (((0, 8), (0, 8)), tuple(quarters))
    apart = list(find_chunks([quarters[0], quarters[2]], 1, 0, 4, 1000))
    assert [chunk.box for chunk in apart] == [((0, 8), (0, 2)), ((0, 8), (4, 6))], "another host has what is between"
