"""Sharding of the sequence: which rank of a mesh axis holds which tokens, so that all ranks have equal work.

A sequence of T tokens is cut into chunks on a fixed grid, so that a chunk has whole tiles wherever documents begin.
Every rank gets the same number of chunks. `balanced` also gives every rank nearly the same cost. The cost of a chunk is
the number of pairs in the tiles that a kernel visits for the chunk's queries, under the masks of the layers and the
documents of the sequence, in closed form. Neighbouring chunks stay together where they can, because keys that lie on
another rank have to be exchanged.

All of it is NumPy on the host: the data pipeline shards sequences before they reach a device.

Dimensions: T tokens of a sequence, C chunks, R ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int

from kernels.masks import Bounds, Mask
from kernels.plan.host import make_block_plan

SequenceSharding = Literal["contiguous", "zigzag", "balanced"]
"""contiguous: rank i holds the i-th part of the sequence. zigzag: of 2·R parts, rank i holds the i-th from either end
(Ring Flash Attention, github.com/zhuzilin/ring-flash-attention). balanced: chunks in an order that each sequence
decides."""

# The side of the tiles in which costs are counted, in tokens. The kernels' own tiles differ little from it.
_TILE = 128
# The imbalance that is good enough: of a sharding that is known ahead of time, and the end of the swaps.
_TOLERANCE = 1.02
# The number of swaps between the busiest and the idlest rank, at most.
_MAX_SWAPS = 64
# How far the cost of one side of a cut may be from its share, for a cut that separates less of a document.
_CUT_TOLERANCE = 0.01


def shard_sequence(
    sequence_sharding: SequenceSharding,
    length: int,
    num_ranks: int,
    *,
    masks: Mapping[Mask, float] | None = None,
    chunk_size: int | None = None,
    segment_ids: Int[np.ndarray, " T"] | None = None,
    positions: Int[np.ndarray, " T"] | None = None,
    bounds: Bounds | None = None,
) -> Int[np.ndarray, " T"]:
    """The order of a sequence's tokens in which the ranks hold them.

    Args:
      sequence_sharding: the rule.
      length: T, a multiple of `num_ranks`; of `2 · num_ranks` for zigzag, of `num_ranks · chunk_size` for balanced.
      num_ranks: devices along the mesh axis.
      masks: for `balanced`: each mask of the model and its weight, such as the number of layers and query heads.
      chunk_size: for `balanced`: tokens of a chunk. None: `default_chunk_size`, the one of `attend_over_mesh`.
      segment_ids: for `balanced`: the document of each token; a document's tokens are neighbours. None: one document.
      positions: for `balanced`: the positions that the masks are evaluated on, which count up by one in each document.
        None: indices in the sequence.
      bounds: for `balanced`: of the sequence's tokens, NumPy's `[T]`, as for `kernels.dot_product_attention`. None: all
        are allowed.

    Returns:
      int32: indices in the sequence. Rank r holds those at `[r·T/R : (r + 1)·T/R]`; they rise within a rank.

    Raises:
      ValueError: an unknown rule, a length that can't be cut so, or, for `balanced`: no masks, or weights, ids,
        positions or bounds that don't fit.

    Source: MagiAttention's dispatch (arXiv:2505.13211) also balances the area of chunks.

    >>> shard_sequence("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_sequence_sharding(sequence_sharding, length, num_ranks, chunk_size)
    chunk_size = chunk_size or default_chunk_size(length, num_ranks)
    if sequence_sharding == "contiguous":
        return np.arange(length, dtype=np.int32)
    if sequence_sharding == "zigzag":
        ends = np.arange(num_ranks)
        return _tokens_of(np.stack([ends, 2 * num_ranks - 1 - ends], 1), length // (2 * num_ranks))
    if not masks:
        raise ValueError(
            "sequence_sharding='balanced' needs the masks whose costs it levels; pass masks={mask: number of layers}"
        )
    if not all(0 < weight < math.inf for weight in masks.values()):
        raise ValueError(f"masks must have positive, finite weights, got {list(masks.values())}")
    of_tokens = {"segment_ids": segment_ids, "positions": positions}
    if bounds is not None:
        of_tokens |= {f"bounds.{name}": bound for name, bound in bounds._asdict().items()}
    for name, tokens in of_tokens.items():
        if tokens is not None and np.shape(tokens) != (length,):
            raise ValueError(f"{name} must be those of one sequence, [{length}], got shape {np.shape(tokens)}")
    segment_ids = None if segment_ids is None else np.asarray(segment_ids)
    costs = chunk_costs(masks, length, chunk_size, segment_ids=segment_ids, positions=positions, bounds=bounds)
    starts = np.arange(0, length, chunk_size)
    num_before = None
    if segment_ids is not None:
        num_before = np.arange(len(starts)) - _documents(segment_ids, length)[0][starts] // chunk_size
    return _tokens_of(assign_chunks(costs, num_ranks, num_before), chunk_size)


def check_sequence_sharding(sequence_sharding: str, length: int, num_ranks: int, chunk_size: int | None = None) -> None:
    """Raises ValueError if a sequence of this length can't be cut for these ranks by this rule."""
    if sequence_sharding not in get_args(SequenceSharding):
        raise ValueError(
            f"sequence_sharding={sequence_sharding!r} is not one of {', '.join(get_args(SequenceSharding))}"
        )
    if num_ranks < 1 or (chunk_size is not None and chunk_size < 1):
        raise ValueError(f"num_ranks={num_ranks} and chunk_size={chunk_size} must be at least 1")
    parts, what = {
        "contiguous": (num_ranks, f"{num_ranks} ranks"),
        "zigzag": (2 * num_ranks, f"twice {num_ranks} ranks"),
        "balanced": (num_ranks * (chunk_size or 1), f"{num_ranks} ranks × chunk_size={chunk_size or 1}"),
    }[sequence_sharding]
    if length < 1 or length % parts:
        raise ValueError(
            f"a sequence of {length} tokens is not a multiple of {what}, which "
            f"sequence_sharding={sequence_sharding!r} needs; use {max(1, -(-length // parts)) * parts} tokens"
        )


def default_chunk_size(length: int, num_parts: int, largest: int = 512) -> int:
    """The default number of tokens of a chunk: the largest power of two, up to 512, that divides a rank's tokens.

    >>> default_chunk_size(131_072, 8), default_chunk_size(96, 2)
    (512, 16)
    """
    tokens = length // num_parts
    return min(largest, tokens & -tokens)


def choose_sequence_sharding(
    masks: Mapping[Mask, float], length: int, num_ranks: int, *, has_documents: bool
) -> SequenceSharding:
    """The simplest rule that gives every rank the same cost to within 2 %.

    Args:
      masks: as for `shard_sequence`.
      length: T, a multiple of `num_ranks`.
      num_ranks: devices along the mesh axis.
      has_documents: whether the cost of a chunk depends on the documents of its sequence.
    """
    # Documents shorten what a token attends to. Where masks are windows already, they shorten it little.
    if has_documents and any(mask.lookback is None or mask.looks_ahead for mask in masks):
        return "balanced"
    known_ahead: tuple[tuple[SequenceSharding, int], ...] = (("contiguous", num_ranks), ("zigzag", 2 * num_ranks))
    for sequence_sharding, num_parts in known_ahead:
        if length % num_parts:
            continue
        side = default_chunk_size(length, num_parts, _TILE)
        token_order = shard_sequence(sequence_sharding, length, num_ranks)[::side]
        if imbalance(chunk_costs(masks, length, side)[token_order // side].reshape(num_ranks, -1)) <= _TOLERANCE:
            return sequence_sharding
    return "balanced"


def imbalance(costs: Float[np.ndarray, "R n"]) -> float:
    """The greatest cost of a rank divided by the mean."""
    of_ranks = costs.sum(-1)
    return float(of_ranks.max() / of_ranks.mean()) if of_ranks.any() else 1.0


def chunk_costs(
    masks: Mapping[Mask, float],
    length: int,
    chunk_size: int,
    *,
    segment_ids: Int[np.ndarray, " T"] | None = None,
    positions: Int[np.ndarray, " T"] | None = None,
    bounds: Bounds | None = None,
) -> Float[np.ndarray, " C"]:
    """The cost of each chunk: the number of pairs in the tiles that a kernel visits for the queries of the chunk.

    Args:
      masks, segment_ids, positions, bounds: as for `shard_sequence`.
      length: T.
      chunk_size: tokens of a chunk; a divisor of T.

    Returns:
      float64, weighted by the masks' weights. For a mask whose rows aren't intervals (`MaskFn`, `NumpyMask`), documents
      are assumed to shorten every query's keys in proportion to their length, and bounds to shorten none.
    """
    # A tile doesn't reach past its chunk, since the next chunk may lie on another rank.
    side = min(_TILE, chunk_size)
    starts = (np.arange(length // chunk_size)[:, None] * chunk_size + np.arange(0, chunk_size, side)).ravel()
    heights = np.minimum(side, chunk_size - starts % chunk_size)
    indices = np.arange(length)
    positions = indices if positions is None else np.asarray(positions, np.int64)
    begin, end = _documents(segment_ids, length)
    document_lengths = end - begin
    as_int64 = functools.partial(np.asarray, dtype=np.int64)
    bounds = Bounds() if bounds is None else bounds.map(as_int64, as_int64)
    if bounds.k_start is not None:
        begin = np.maximum(begin, bounds.k_start)
    if bounds.k_end is not None:
        end = np.minimum(end, bounds.k_end)

    costs = np.zeros(len(starts))
    for mask, weight in _by_head(masks).items():
        interval = mask.row_interval(positions)
        if interval is None:
            share = np.minimum.reduceat(document_lengths, starts) / length
            costs += weight * share * _visited_pairs(mask, length, side)[starts // side]
            continue
        # Keys of a document count up with its queries, so positions tell indices.
        first, last = (np.asarray(bound, np.int64) - positions + indices for bound in interval)
        first, stop = np.maximum(first, begin), np.minimum(last + 1, end)
        is_empty = stop <= first
        first, stop = np.where(is_empty, length, first), np.where(is_empty, 0, stop)
        first, stop = np.minimum.reduceat(first, starts), np.maximum.reduceat(stop, starts)
        num_tiles = _num_tiles(first // side, -(-stop // side), starts, starts + heights, bounds, side)
        costs += weight * num_tiles * side * heights
    return costs.reshape(length // chunk_size, -1).sum(1)


def _num_tiles(
    first: Int[np.ndarray, " R"],
    stop: Int[np.ndarray, " R"],
    row_start: Int[np.ndarray, " R"],
    row_stop: Int[np.ndarray, " R"],
    bounds: Bounds,
    side: int,
) -> Int[np.ndarray, " R"]:
    """The number of key tiles in each row's interval, less those that the keys' own bounds keep from the row's queries.

    Args:
      first, stop: the interval of each row of tiles.
      row_start, row_stop: the queries of each row.
      bounds: of all tokens.
      side: of a tile, in tokens.
    """
    if bounds.q_start is None and bounds.q_end is None:
        return np.maximum(stop - first, 0)
    tiles = np.arange(0, row_stop[-1], side)
    earliest = np.zeros(len(tiles)) if bounds.q_start is None else np.minimum.reduceat(bounds.q_start, tiles)
    latest = np.full(len(tiles), np.inf) if bounds.q_end is None else np.maximum.reduceat(bounds.q_end, tiles)
    # Row by row, so that memory doesn't grow with rows × tiles.
    return np.array(
        [
            np.count_nonzero((earliest[a:b] < row_end) & (latest[a:b] > row_begin))
            for a, b, row_begin, row_end in zip(first, stop, row_start, row_stop, strict=True)
        ]
    )


def assign_chunks(
    costs: Float[np.ndarray, " C"], num_ranks: int, num_before: Int[np.ndarray, " C"] | None = None
) -> Int[np.ndarray, "R n"]:
    """Gives every rank the same number of chunks, of nearly equal cost, most of them neighbours.

    Args:
      costs: of each chunk; C is a multiple of `num_ranks`.
      num_before: for each chunk, the number of chunks before it that hold tokens of the document of its first token. A
        cut at this chunk makes these chunks travel, so that a cut with a smaller number is better. None: all cuts are
        equally good.

    Returns:
      int64: the chunks of each rank, rising.

    >>> assign_chunks(np.ones(8), 2).tolist(), assign_chunks(np.arange(8.0), 2).tolist()
    ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 6, 7], [2, 3, 4, 5]])
    """
    if num_before is None:
        num_before = np.zeros(len(costs), np.int64)
    parts = _bisect(np.arange(len(costs)), costs, num_ranks, num_before)
    parts.sort(key=lambda chunks: int(chunks[0]))
    return np.sort(_swap_until_level(np.stack(parts), costs), axis=1)


def _bisect(
    chunks: Int[np.ndarray, " C"],
    costs: Float[np.ndarray, " all"],
    num_ranks: int,
    num_before: Int[np.ndarray, " all"],
) -> list[Int[np.ndarray, " n"]]:
    """Divides chunks among ranks: two cuts give half of the ranks their chunks, and each half is divided again.

    Join the ends of the sequence to a ring. The chunks of one half are a window on that ring. The excess of a window is
    its cost less its fair share. Over all windows of the same length the excesses add up to 0, so that some window has
    an excess near 0.
    """
    if num_ranks == 1:
        return [chunks]
    num_chunks, first_ranks = len(chunks), num_ranks // 2
    length = num_chunks * first_ranks // num_ranks
    # The complement of a window of half the ring is a window as well.
    begins = np.arange(num_chunks if 2 * first_ranks != num_ranks else length)
    sums = np.concatenate([[0.0], np.tile(costs[chunks], 2).cumsum()])
    share = sums[num_chunks] * first_ranks / num_ranks
    excess = np.abs(sums[begins + length] - sums[begins] - share)

    # Chunks that aren't neighbours in the sequence were separated before: to cut there costs nothing more.
    follows = np.concatenate([[False], chunks[1:] == chunks[:-1] + 1])
    separated = np.where(follows, num_before[chunks], 0)
    at_cuts = np.stack([separated[begins], separated[(begins + length) % num_chunks]])
    is_level = excess <= max(_CUT_TOLERANCE * share, excess.min())
    begin = begins[np.lexsort((excess, at_cuts.sum(0), at_cuts.max(0), ~is_level))[0]]
    is_first = np.zeros(num_chunks, bool)
    is_first[np.arange(begin, begin + length) % num_chunks] = True
    other_ranks = num_ranks - first_ranks
    return _bisect(chunks[is_first], costs, first_ranks, num_before) + _bisect(
        chunks[~is_first], costs, other_ranks, num_before
    )


def _swap_until_level(assigned: Int[np.ndarray, "R n"], costs: Float[np.ndarray, " C"]) -> Int[np.ndarray, "R n"]:
    """Lets the busiest and the idlest rank swap chunks, again and again, while that helps and is needed."""
    assigned, totals = assigned.copy(), costs[assigned].sum(1)
    for _ in range(_MAX_SWAPS):
        if totals.max() <= _TOLERANCE * totals.mean() or not _swap(assigned, totals, costs):
            break
    return assigned


def _swap(assigned: Int[np.ndarray, "R n"], totals: Float[np.ndarray, " R"], costs: Float[np.ndarray, " C"]) -> bool:
    """Swaps two chunks of the busiest and the idlest rank, after which both are closest to their mean, in place.

    Returns:
      Whether there was such a pair.
    """
    busiest, idlest = int(totals.argmax()), int(totals.argmin())
    gap = totals[busiest] - totals[idlest]
    assigned[idlest] = assigned[idlest, np.argsort(costs[assigned[idlest]], kind="stable")]
    own, theirs = costs[assigned[busiest]], costs[assigned[idlest]]
    # Half of the gap should move. So the candidates are the chunks on either side of own − gap / 2.
    above = np.searchsorted(theirs, own - gap / 2)
    partners = np.stack([np.maximum(above - 1, 0), np.minimum(above, len(theirs) - 1)])
    gap_after = np.abs(gap - 2 * (own - theirs[partners]))
    side, index = np.unravel_index(gap_after.argmin(), gap_after.shape)
    if not gap_after[side, index] < gap:
        return False
    partner = partners[side, index]
    moved = own[index] - theirs[partner]
    totals[busiest] -= moved
    totals[idlest] += moved
    assigned[busiest, index], assigned[idlest, partner] = assigned[idlest, partner], assigned[busiest, index]
    return True


def _tokens_of(chunks: Int[np.ndarray, "R n"], chunk_size: int) -> Int[np.ndarray, " T"]:
    return (chunks.ravel()[:, None] * chunk_size + np.arange(chunk_size)).ravel().astype(np.int32)


def _documents(segment_ids: Int[np.ndarray, " T"] | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices at which each token's document begins and ends."""
    if segment_ids is None:
        return np.zeros(length, np.int64), np.full(length, length)
    starts = np.flatnonzero(np.concatenate([[True], segment_ids[1:] != segment_ids[:-1]]))
    lengths = np.diff(starts, append=length)
    return np.repeat(starts, lengths), np.repeat(starts + lengths, lengths)


def _by_head(masks: Mapping[Mask, float]) -> dict[Mask, float]:
    """The masks with those of several heads taken apart, each with its share of the weight."""
    weights: dict[Mask, float] = {}
    for mask, weight in masks.items():
        num_heads = mask.num_heads or 1
        for each, heads in mask.distinct_heads(num_heads).items():
            weights[each] = weights.get(each, 0.0) + weight * len(heads) / num_heads
    return weights


@functools.lru_cache(maxsize=16)
def _visited_pairs(mask: Mask, length: int, side: int) -> Float[np.ndarray, " rows"]:
    """Pairs in the tiles that each query tile of a whole sequence visits."""
    plan = make_block_plan(mask, length, length, side, side)
    num_tiles = np.zeros(plan.num_rows)
    for rectangles in (plan.full, plan.partial):
        for (row_start, row_stop), (start, stop) in rectangles:
            num_tiles[row_start:row_stop] += stop - start
    return num_tiles * side * side
