"""Dealing out a row's tokens: which rank of a mesh axis holds which chunk of queries, so that all ranks work equally.

A row of T tokens is cut into chunks. Every rank gets as many chunks as any other, and chunks of nearly the same cost in
all. A chunk costs the tiles that a kernel visits for its queries, under the layers' masks and the row's documents,
found from the rows' intervals in closed form. Neighbouring chunks are dealt out together as far as that is level: a
long document comes out zigzagged, and few short ones are cut. What is cut has to be exchanged.

Chunks lie on a grid, wherever documents begin. A chunk so has whole tiles, as many as any other, and a document that
lies in two chunks of different ranks costs the tiles that it would cost on one.

Everything here is NumPy on the host: the data pipeline deals rows out before they reach a device.

Dimensions: T tokens of a row, C chunks, R ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int

from kernels.masks import Mask
from kernels.plan.host import make_block_plan

Deal = Literal["in_order", "zigzag", "by_cost"]
"""in_order: rank i holds the i-th part of the row. zigzag: of 2·R parts, rank i holds the i-th from either end (Ring
Flash Attention, github.com/zhuzilin/ring-flash-attention). by_cost: chunks in an order that each row decides."""

# The side of the tiles that costs are counted in, in tokens: a kernel's own differ little from it.
_TILE = 128
# Pairs of runs swapped between the busiest and the idlest rank, at most, after the first deal.
_MAX_SWAPS = 64
# The swaps of runs dealt out one by one end when no rank has more than this much above the mean.
_LEVEL = 1.002
# How far from its share a half of the ranks may be, for the sake of a cut where little of a document lies before it.
_LEVEL_OF_A_PART = 0.01
# Places of the first two cuts that are tried where documents are cut. More of them take more time and save little.
_NUM_FIRST_CUTS = 8
# The imbalance up to which neighbouring chunks stay together: less than a kernel's other tiles make of it.
_LEVEL_TOGETHER = 1.005
# The imbalance up to which a deal in few runs is taken, and one that is known ahead of time.
_LEVEL_ENOUGH = 1.02


def deal_tokens(
    deal: Deal,
    length: int,
    num_ranks: int,
    *,
    masks: Mapping[Mask, float] | None = None,
    chunk_size: int | None = None,
    segment_ids: Int[np.ndarray, " T"] | None = None,
    positions: Int[np.ndarray, " T"] | None = None,
) -> Int[np.ndarray, " T"]:
    """Where in the row the tokens stand that the ranks hold.

    Args:
      deal: how tokens are dealt out.
      length: T, a multiple of `num_ranks`; of `2 · num_ranks` for zigzag, of `num_ranks · chunk_size` for by_cost.
      num_ranks: devices along the mesh axis.
      masks: by_cost: each mask of the model and its weight, such as the number of layers and query heads that use it.
      chunk_size: by_cost: tokens of a chunk; None: `default_chunk_size`, in which attention over a mesh takes them.
      segment_ids: by_cost: document of each token, each document in one run; None: one document.
      positions: by_cost: what the masks are evaluated on; counts up by one in each document. None: places in the row.

    Returns:
      int32: the place in the row of each token dealt out; rank r holds those at `[r·T/R : (r + 1)·T/R]`. Within a rank
      places rise.

    Raises:
      ValueError: the deal isn't one, the length can't be cut like that, or by_cost has no masks, or weights, ids or
        positions that don't fit.

    Source: MagiAttention's dispatch (arXiv:2505.13211) deals chunks by area likewise.

    >>> deal_tokens("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_deal(deal, length, num_ranks, chunk_size)
    chunk_size = chunk_size or default_chunk_size(length, num_ranks)
    if deal == "in_order":
        return np.arange(length, dtype=np.int32)
    if deal == "zigzag":
        ends = np.arange(num_ranks)
        return _tokens_of(np.stack([ends, 2 * num_ranks - 1 - ends], 1), length // (2 * num_ranks))
    if not masks:
        raise ValueError("deal='by_cost' needs the masks whose costs it levels; pass masks={mask: number of layers}")
    if not all(0 < weight < math.inf for weight in masks.values()):
        raise ValueError(f"masks must have positive, finite weights, got {list(masks.values())}")
    for name, tokens in (("segment_ids", segment_ids), ("positions", positions)):
        if tokens is not None and np.shape(tokens) != (length,):
            raise ValueError(f"{name} must be those of one row, [{length}], got shape {np.shape(tokens)}")
    segment_ids = None if segment_ids is None else np.asarray(segment_ids)
    costs = chunk_costs(masks, length, chunk_size, segment_ids=segment_ids, positions=positions)
    starts = np.arange(0, length, chunk_size)
    num_before = None
    if segment_ids is not None:
        num_before = np.arange(len(starts)) - _documents(segment_ids, length)[0][starts] // chunk_size
    return _tokens_of(deal_chunks(costs, num_ranks, num_before), chunk_size)


def check_deal(deal: str, length: int, num_ranks: int, chunk_size: int | None = None) -> None:
    """Raises ValueError if a row of this length can't be dealt out to these ranks in this way."""
    if deal not in get_args(Deal):
        raise ValueError(f"deal={deal!r} is not one of {', '.join(get_args(Deal))}")
    if num_ranks < 1 or (chunk_size is not None and chunk_size < 1):
        raise ValueError(f"num_ranks={num_ranks} and chunk_size={chunk_size} must be at least 1")
    parts, what = {
        "in_order": (num_ranks, f"{num_ranks} ranks"),
        "zigzag": (2 * num_ranks, f"twice {num_ranks} ranks"),
        "by_cost": (num_ranks * (chunk_size or 1), f"{num_ranks} ranks × chunk_size={chunk_size or 1}"),
    }[deal]
    if length < 1 or length % parts:
        raise ValueError(
            f"a row of {length} tokens is not a multiple of {what}, which deal={deal!r} needs; "
            f"use {max(1, -(-length // parts)) * parts} tokens"
        )


def default_chunk_size(length: int, num_parts: int, largest: int = 512) -> int:
    """The tokens of a chunk where nobody says: the largest power of two, up to 512, that divides a rank's tokens.

    >>> default_chunk_size(131_072, 8), default_chunk_size(96, 2)
    (512, 16)
    """
    tokens = length // num_parts
    return min(largest, tokens & -tokens)


def choose_deal(masks: Mapping[Mask, float], length: int, num_ranks: int, *, has_documents: bool) -> Deal:
    """The simplest deal that gives every rank the same cost to within 2 %.

    Args:
      masks: as for `deal_tokens`.
      length: T, a multiple of `num_ranks`.
      num_ranks: devices along the mesh axis.
      has_documents: whether each row has documents of its own, so that only the row tells what its chunks cost.
    """
    # Documents shorten what a token attends to. Where masks are windows already, they shorten it little.
    if has_documents and any(mask.lookback is None or mask.looks_ahead for mask in masks):
        return "by_cost"
    known_ahead: tuple[tuple[Deal, int], ...] = (("in_order", num_ranks), ("zigzag", 2 * num_ranks))
    for deal, num_parts in known_ahead:
        if length % num_parts:
            continue
        side = default_chunk_size(length, num_parts, _TILE)
        places = deal_tokens(deal, length, num_ranks)[::side]
        if imbalance(chunk_costs(masks, length, side)[places // side].reshape(num_ranks, -1)) <= _LEVEL_ENOUGH:
            return deal
    return "by_cost"


def imbalance(costs: Float[np.ndarray, "R n"]) -> float:
    """The greatest rank's cost divided by the mean: how much longer than needed all ranks wait."""
    of_ranks = costs.sum(-1)
    return float(of_ranks.max() / of_ranks.mean()) if of_ranks.any() else 1.0


def chunk_costs(
    masks: Mapping[Mask, float],
    length: int,
    chunk_size: int,
    *,
    segment_ids: Int[np.ndarray, " T"] | None = None,
    positions: Int[np.ndarray, " T"] | None = None,
) -> Float[np.ndarray, " C"]:
    """What the queries of each chunk cost: pairs in the tiles that a kernel visits for them.

    Args:
      masks, segment_ids, positions: as for `deal_tokens`.
      length: T.
      chunk_size: tokens of a chunk; a divisor of T.

    Returns:
      float64, weighted by the masks' weights. Where a mask's rows aren't intervals (`MaskFn`, `NumpyMask`), documents
      are taken to cut every row in proportion to their length.
    """
    # A tile doesn't reach past its chunk, since the next chunk may lie on another rank.
    side = min(_TILE, chunk_size)
    starts = (np.arange(length // chunk_size)[:, None] * chunk_size + np.arange(0, chunk_size, side)).ravel()
    heights = np.minimum(side, chunk_size - starts % chunk_size)
    places = np.arange(length)
    positions = places if positions is None else np.asarray(positions, np.int64)
    begin, end = _documents(segment_ids, length)

    costs = np.zeros(len(starts))
    for mask, weight in _by_head(masks).items():
        interval = mask.row_interval(positions)
        if interval is None:
            share = np.minimum.reduceat(end - begin, starts) / length
            costs += weight * share * _visited_pairs(mask, length, side)[starts // side]
            continue
        # Keys of a document count up with its queries, so positions tell places.
        first, last = (np.asarray(bound, np.int64) - positions + places for bound in interval)
        first, stop = np.maximum(first, begin), np.minimum(last + 1, end)
        is_empty = stop <= first
        first, stop = np.where(is_empty, length, first), np.where(is_empty, 0, stop)
        first, stop = np.minimum.reduceat(first, starts), np.maximum.reduceat(stop, starts)
        num_tiles = np.maximum(-(-stop // side) - first // side, 0)
        costs += weight * num_tiles * side * heights
    return costs.reshape(length // chunk_size, -1).sum(1)


def deal_chunks(
    costs: Float[np.ndarray, " C"], num_ranks: int, num_before: Int[np.ndarray, " C"] | None = None
) -> Int[np.ndarray, "R n"]:
    """Gives every rank as many chunks as any other, of nearly equal cost, in few runs.

    Args:
      costs: of each chunk; C is a multiple of `num_ranks`.
      num_ranks: R.
      num_before: how many chunks before each one hold tokens of the document that its first token belongs to. Of
        several level deals, the one is taken whose neediest rank lacks the fewest of these, as a causal mask needs
        them. None: all cuts are alike.

    Returns:
      int64: the chunks of each rank, rising.

    >>> deal_chunks(np.ones(8), 2).tolist(), deal_chunks(np.arange(8.0), 2).tolist()
    ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 6, 7], [2, 3, 4, 5]])
    """
    num_tries = 1 if num_before is None else _NUM_FIRST_CUTS
    if num_before is None:
        num_before = np.zeros(len(costs), np.int64)
    tried = []
    for choice in range(num_tries):
        parts = _part(np.arange(len(costs)), costs, num_ranks, num_before, choice)
        parts.sort(key=lambda chunks: int(chunks[0]))
        tried.append(_level(np.stack(parts), costs, _LEVEL_ENOUGH))
    if level := [dealt for dealt in tried if imbalance(costs[dealt]) <= _LEVEL_ENOUGH]:
        return np.sort(min(level, key=lambda dealt: _most_lacked(dealt, num_before)), axis=1)
    of_rank = len(costs) // num_ranks
    run = of_rank & -of_rank
    while True:
        costs_of_runs = costs.reshape(-1, run).sum(1)
        dealt = _deal_runs(costs_of_runs, num_ranks)
        if run == 1 or imbalance(costs_of_runs[dealt]) <= _LEVEL_TOGETHER:
            return (dealt[:, :, None] * run + np.arange(run)).reshape(num_ranks, -1)
        run //= 2


def _most_lacked(dealt: Int[np.ndarray, "R n"], num_before: Int[np.ndarray, " C"]) -> int:
    """The most chunks that a rank has to get from others, so that its own have all that is before them."""
    rank = np.arange(len(dealt))[:, None]
    edges = np.zeros((len(dealt), len(num_before) + 1), np.int64)
    np.add.at(edges, (rank, dealt - num_before[dealt]), 1)
    np.add.at(edges, (rank, dealt), -1)
    is_needed = edges.cumsum(1) > 0
    is_needed[rank, dealt] = False
    return int(is_needed.sum(1).max())


def _part(
    chunks: Int[np.ndarray, " C"],
    costs: Float[np.ndarray, " all"],
    num_ranks: int,
    num_before: Int[np.ndarray, " all"],
    choice: int = 0,
) -> list[Int[np.ndarray, " n"]]:
    """Parts chunks among ranks, half of the ranks at a time, by two cuts each time.

    Bend the chunks to a ring, and slide a window of the right length along it: what it costs, less its fair share,
    adds up to 0 over all places of the window, so that there is one where it is about 0. The best place is taken; at
    first, where `choice` is 1, the second best, and so on.
    """
    if num_ranks == 1:
        return [chunks]
    num_chunks, first_ranks = len(chunks), num_ranks // 2
    length = num_chunks * first_ranks // num_ranks
    # Either of two equal halves may be the window.
    begins = np.arange(num_chunks if 2 * first_ranks != num_ranks else length)
    sums = np.concatenate([[0.0], np.tile(costs[chunks], 2).cumsum()])
    share = sums[num_chunks] * first_ranks / num_ranks
    off = np.abs(sums[begins + length] - sums[begins] - share)

    # A cut between chunks that don't follow each other in the row was made before. So was one at the row's ends.
    follows = np.concatenate([[False], chunks[1:] == chunks[:-1] + 1])
    cut_off = np.where(follows, num_before[chunks], 0)
    at_ends = np.stack([cut_off[begins], cut_off[(begins + length) % num_chunks]])
    level = off <= max(_LEVEL_OF_A_PART * share, off.min())
    order = np.lexsort((off, at_ends.sum(0), at_ends.max(0), ~level))
    begin = begins[order[min(choice, len(order) - 1)]]
    is_first = np.zeros(num_chunks, bool)
    is_first[np.arange(begin, begin + length) % num_chunks] = True
    rest = num_ranks - first_ranks
    return _part(chunks[is_first], costs, first_ranks, num_before) + _part(chunks[~is_first], costs, rest, num_before)


def _deal_runs(costs: Float[np.ndarray, " C"], num_ranks: int) -> Int[np.ndarray, "R n"]:
    """Deals out runs of chunks, or single chunks: the costliest first, one to each rank, each to the idlest so far."""
    by_cost = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    dealt, totals = np.empty_like(by_cost), np.zeros(num_ranks)
    for index, runs in enumerate(by_cost):
        idlest_first = np.argsort(totals, kind="stable")
        dealt[index, idlest_first] = runs
        totals[idlest_first] += costs[runs]
    dealt = _level(dealt.T, costs, _LEVEL)
    # Runs of one cost stand in for each other. Each rank gets its share of them side by side.
    kinds = np.unique(costs, return_inverse=True)[1]
    ranks = np.repeat(np.arange(num_ranks), dealt.shape[1])
    owners = np.empty_like(ranks)
    owners[np.argsort(kinds, kind="stable")] = ranks[np.lexsort((ranks, kinds[dealt.ravel()]))]
    return np.argsort(owners, kind="stable").reshape(dealt.shape)


def _level(dealt: Int[np.ndarray, "R n"], costs: Float[np.ndarray, " C"], enough: float) -> Int[np.ndarray, "R n"]:
    """The deal after the busiest and the idlest rank have swapped runs, again and again while that helps.

    Args:
      dealt: the runs of each rank.
      costs: of each run.
      enough: the imbalance at which the swaps end.
    """
    dealt, totals = dealt.copy(), costs[dealt].sum(1)
    for _ in range(_MAX_SWAPS):
        if totals.max() <= enough * totals.mean() or not _swap(dealt, totals, costs):
            break
    return dealt


def _swap(dealt: Int[np.ndarray, "R n"], totals: Float[np.ndarray, " R"], costs: Float[np.ndarray, " C"]) -> bool:
    """Swaps a run of the busiest rank with one of the idlest, so that both come closest to their mean, if any do."""
    busiest, idlest = int(totals.argmax()), int(totals.argmin())
    gap = totals[busiest] - totals[idlest]
    dealt[idlest] = dealt[idlest, np.argsort(costs[dealt[idlest]], kind="stable")]
    own, theirs = costs[dealt[busiest]], costs[dealt[idlest]]
    # Half of the gap should move: the runs to look at are those on either side of own − gap / 2.
    above = np.searchsorted(theirs, own - gap / 2)
    partners = np.stack([np.maximum(above - 1, 0), np.minimum(above, len(theirs) - 1)])
    left_over = np.abs(gap - 2 * (own - theirs[partners]))
    side, index = np.unravel_index(left_over.argmin(), left_over.shape)
    if not left_over[side, index] < gap:
        return False
    partner = partners[side, index]
    moved = own[index] - theirs[partner]
    totals[busiest] -= moved
    totals[idlest] += moved
    dealt[busiest, index], dealt[idlest, partner] = dealt[idlest, partner], dealt[busiest, index]
    return True


def _tokens_of(chunks: Int[np.ndarray, "R n"], chunk_size: int) -> Int[np.ndarray, " T"]:
    return (chunks.ravel()[:, None] * chunk_size + np.arange(chunk_size)).ravel().astype(np.int32)


def _documents(segment_ids: Int[np.ndarray, " T"] | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The places at which each token's document begins and ends."""
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
    """Pairs in the tiles that each query tile of a whole row visits."""
    plan = make_block_plan(mask, length, length, side, side)
    num_tiles = np.zeros(plan.num_rows)
    for rectangles in (plan.full, plan.partial):
        for (row_start, row_stop), (start, stop) in rectangles:
            num_tiles[row_start:row_stop] += stop - start
    return num_tiles * side * side
