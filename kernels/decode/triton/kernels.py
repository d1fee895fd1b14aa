"""The Triton kernels of a decoding step.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
J blocks of slots, P parts that a sequence's visited blocks are split into.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backends.triton.tiles import add_tile, capped


@triton.jit
def list_blocks_kernel(tile_kinds, blocks, counts, num_blocks: tl.constexpr, chunk: tl.constexpr):
    """Lists the blocks that aren't EMPTY, FULL ones first, and counts both: `tile_kinds` [B, J] → [B, J], [B, 2]."""
    batch = tl.program_id(0)
    tile_kinds += batch * num_blocks
    blocks += batch * num_blocks
    num_full = 0
    for start in range(0, num_blocks, chunk):
        block = start + tl.arange(0, chunk)
        kind = tl.load(tile_kinds + block, mask=block < num_blocks, other=0)
        num_full += tl.sum((kind == 2).to(tl.int32), 0)
    next_full, next_partial = 0, num_full
    for start in range(0, num_blocks, chunk):
        block = start + tl.arange(0, chunk)
        kind = tl.load(tile_kinds + block, mask=block < num_blocks, other=0)
        full, partial = (kind == 2).to(tl.int32), (kind == 1).to(tl.int32)
        tl.store(blocks + next_full + tl.cumsum(full, 0) - 1, block, mask=kind == 2)
        tl.store(blocks + next_partial + tl.cumsum(partial, 0) - 1, block, mask=kind == 1)
        next_full += tl.sum(full, 0)
        next_partial += tl.sum(partial, 0)
    tl.store(counts + batch * 2, num_full)
    tl.store(counts + batch * 2 + 1, next_partial)


@triton.jit
def attend_part_kernel(
    query, key, value, first, last, blocks, counts, sequences, lengths, positions, owners,
    output, lse,
    num_new: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, group_size: tl.constexpr,
    head_dim: tl.constexpr, value_dim: tl.constexpr, interval_heads: tl.constexpr,
    num_blocks: tl.constexpr, block_size: tl.constexpr, slab_capacity: tl.constexpr, num_words: tl.constexpr,
    has_tree: tl.constexpr,
    to_cap: tl.constexpr, to_log2: tl.constexpr,
    tile_rows: tl.constexpr, tile_slots: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """One part of one sequence's visited blocks, for one key/value head and some of the rows that read it.

    Rows run over (token, query head of the group). `slab_capacity` is the number of a sequence's slots, or None if all
    sequences share theirs. With a tree, `positions` are of the slots of each batch element's sequence, and `owners` the
    sets of new tokens that see each of these slots. The output is float32, divided by the part's own row_sum.
    """
    num_row_tiles: tl.constexpr = (num_new * group_size + tile_rows - 1) // tile_rows
    tiles_per_block: tl.constexpr = block_size // tile_slots
    kv_head, row_tile = tl.program_id(0) // num_row_tiles, tl.program_id(0) % num_row_tiles
    part, num_parts, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2)

    row = row_tile * tile_rows + tl.arange(0, tile_rows)
    is_row = row < num_new * group_size
    token, head = row // group_size, kv_head * group_size + row % group_size
    query_row = (batch * num_new + token) * num_heads + head
    part_row = part * (tl.num_programs(2) * num_new * num_heads) + query_row
    num_full, num_visited = tl.load(counts + batch * 2), tl.load(counts + batch * 2 + 1)
    # Loads that don't wait for one another come before the first use of any.
    sequence = tl.load(sequences + batch)
    h, v_col = tl.arange(0, block_h), tl.arange(0, block_v)
    q = tl.load(query + query_row[:, None] * head_dim + h, mask=is_row[:, None] & (h < head_dim), other=0.0)
    begin, end = part * num_visited // num_parts, (part + 1) * num_visited // num_parts
    if begin >= end:
        tl.store(lse + part_row, tl.full((tile_rows,), float("-inf"), tl.float32), mask=is_row)
        return

    first_slot = tl.cast(0 if slab_capacity is None else sequence * slab_capacity, tl.int64)
    key += (first_slot * num_kv_heads + kv_head) * head_dim
    value += (first_slot * num_kv_heads + kv_head) * value_dim
    slot_in_tile = tl.arange(0, tile_slots)
    key_offset = slot_in_tile[:, None] * (num_kv_heads * head_dim) + h
    value_offset = slot_in_tile[:, None] * (num_kv_heads * value_dim) + v_col

    acc = tl.zeros((tile_rows, block_v), tl.float32)
    row_sum = tl.zeros((tile_rows,), tl.float32)
    # Below any logit, but finite: exp2(−inf − it) is 0 while a row has seen no allowed slot.
    row_max = tl.full((tile_rows,), -1e30, tl.float32)

    # A block's number is loaded one step ahead: a load that waits for another in the same step can't be pipelined.
    blocks += batch * num_blocks
    next_block = tl.load(blocks + begin)
    for step in range(begin * tiles_per_block, tl.minimum(end, num_full) * tiles_per_block):
        slot = tl.cast(next_block * block_size + step % tiles_per_block * tile_slots, tl.int64)
        next_block = tl.load(blocks + tl.minimum((step + 1) // tiles_per_block, end - 1))
        k = _load(key + slot * (num_kv_heads * head_dim) + key_offset, h < head_dim, block_h == head_dim)
        v = _load(value + slot * (num_kv_heads * value_dim) + value_offset, v_col < value_dim, block_v == value_dim)
        logits = capped(tl.dot(q, tl.trans(k)), to_cap)
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, logits, v, to_log2)

    interval = (batch * num_new + token) * interval_heads + (head if interval_heads > 1 else 0)
    row_first = tl.load(first + interval, mask=is_row, other=2147483647)
    row_last = tl.load(last + interval, mask=is_row, other=-2147483648)
    lowest, highest = tl.min(row_first, 0), tl.max(row_last, 0)
    for step in range(tl.maximum(begin, num_full) * tiles_per_block, end * tiles_per_block):
        tile_start = next_block * block_size + step % tiles_per_block * tile_slots
        next_block = tl.load(blocks + tl.minimum((step + 1) // tiles_per_block, end - 1))
        slot = tile_start + slot_in_tile
        if has_tree:
            position, by_tree = _position_and_seen_by_tree(
                slot, batch, token, is_row, positions, owners, slab_capacity, num_words
            )
            seen = tl.max(by_tree, 0) != 0
        else:
            position, seen = _position_and_seen(slot, sequence, lengths, positions, owners, slab_capacity, num_words)
        # A slot that no row may see isn't even read: a probability of 0 doesn't stop a NaN.
        seen = (seen & (lowest <= position) & (position <= highest))[:, None]
        at = tl.cast(tile_start, tl.int64)
        k = tl.load(key + at * (num_kv_heads * head_dim) + key_offset, mask=seen & (h < head_dim), other=0.0)
        v = tl.load(value + at * (num_kv_heads * value_dim) + value_offset, mask=seen & (v_col < value_dim), other=0.0)
        seen_by_row = (row_first[:, None] <= position[None, :]) & (position[None, :] <= row_last[:, None])
        seen_by_row &= tl.trans(seen)
        if has_tree:
            seen_by_row &= by_tree != 0
        logits = tl.where(seen_by_row, capped(tl.dot(q, tl.trans(k)), to_cap), float("-inf"))
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, logits, v, to_log2)

    attends = row_sum != 0  # True for NaN: it must come out.
    row_sum = tl.where(attends, row_sum, 1.0)
    row_lse = tl.where(attends, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + part_row, row_lse, mask=is_row)
    tl.store(
        output + tl.cast(part_row, tl.int64)[:, None] * value_dim + v_col,
        tl.where(attends[:, None], acc / row_sum[:, None], 0.0),
        mask=is_row[:, None] & (v_col < value_dim),
    )


@triton.jit
def merge_parts_kernel(
    part_output, part_lse, sinks, output, lse,
    num_parts: tl.constexpr, num_rows: tl.constexpr, num_heads: tl.constexpr, value_dim: tl.constexpr,
    has_sinks: tl.constexpr, chunk: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Merges one row's parts by their lse, and adds the sink: [P, B·T·N, V] → [B·T·N, V]."""
    row = tl.program_id(0)
    column = tl.arange(0, block_v)
    acc = tl.zeros((block_v,), tl.float32)
    row_sum = 0.0
    # As above: below any lse, but finite.
    row_max = -1e30
    for start in range(0, num_parts, chunk):
        part = start + tl.arange(0, chunk)
        part_row = part * num_rows + row
        lses = tl.load(part_lse + part_row, mask=part < num_parts, other=float("-inf"))
        offset = tl.cast(part_row, tl.int64)[:, None] * value_dim + column
        values = tl.load(part_output + offset, mask=(part < num_parts)[:, None] & (column < value_dim), other=0.0)
        new_max = tl.maximum(row_max, tl.max(lses, 0))
        p, alpha = tl.exp(lses - new_max), tl.exp(row_max - new_max)
        # A part without blocks wrote no output: its memory may hold NaN.
        weighted = tl.where(lses[:, None] != float("-inf"), values * p[:, None], 0.0)
        acc, row_max, row_sum = acc * alpha + tl.sum(weighted, 0), new_max, row_sum * alpha + tl.sum(p, 0)

    attends = row_sum != 0  # True for NaN: it must come out.
    if has_sinks:
        sink = tl.load(sinks + row % num_heads)
        new_max = tl.maximum(row_max, sink)
        alpha = tl.exp(row_max - new_max)
        acc, row_max, row_sum = acc * alpha, new_max, row_sum * alpha + tl.exp(sink - new_max)
    row_sum = tl.where(attends, row_sum, 1.0)
    result = tl.where(attends, acc / row_sum, 0.0)
    tl.store(output + tl.cast(row, tl.int64) * value_dim + column, result, mask=column < value_dim)
    tl.store(lse + row, tl.where(attends, row_max + tl.log(row_sum), float("-inf")))


@triton.jit
def _position_and_seen(
    slot, sequence, lengths, positions, owners, slab_capacity: tl.constexpr, num_words: tl.constexpr
):
    """The position of each slot, and whether the sequence has a token there."""
    if slab_capacity is None:
        position = tl.load(positions + slot)
        word = tl.load(owners + slot * num_words + sequence // 32)
        seen = ((word >> (sequence % 32)) & 1) != 0
    else:
        newest = tl.load(lengths + sequence) - 1
        # Triton's remainder takes the dividend's sign.
        back = (newest - slot) % slab_capacity
        position = newest - tl.where(back < 0, back + slab_capacity, back)
        seen = (slot < slab_capacity) & (position >= 0)
    return position, seen


@triton.jit
def _position_and_seen_by_tree(
    slot, batch, token, is_row, positions, owners, slab_capacity: tl.constexpr, num_words: tl.constexpr
):
    """The position of each slot, and 1 where each row's token sees it by the tree, else 0."""
    is_slot = slot < slab_capacity
    at = tl.cast(batch, tl.int64) * slab_capacity + slot
    position = tl.load(positions + at, mask=is_slot, other=0)
    words = owners + at[None, :] * num_words + (token // 32)[:, None]
    word = tl.load(words, mask=is_row[:, None] & is_slot[None, :], other=0)
    return position, (word >> (token % 32)[:, None]) & 1


@triton.jit
def _load(pointers, inside, whole: tl.constexpr):
    """Rows of keys or values; columns past the head dim are 0."""
    return tl.load(pointers) if whole else tl.load(pointers, mask=inside, other=0.0)
