"""Launches JAX's splash attention kernels with what its own `pallas_call`s don't pass on.

The kernels' bodies are upstream's. They aren't public; a test holds their signatures, the same from JAX 0.10.2 to 0.12.
Upstream's `pallas_call`s pass the mask function query positions only. These here also pass key positions, bounds and
the number of the head's mask: heads with different masks share one kernel, and those with the same mask one table.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as upstream
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Int

from kernels.call import AttentionCall
from kernels.masks.bounds import OF_KEYS, OF_QUERIES, is_within
from kernels.tracing.number_types import types_of_32_bits

MASKED = upstream.DEFAULT_MASK_VALUE
_LANES, _SUBLANES = upstream.NUM_LANES, upstream.NUM_SUBLANES
_HEAD_DIM_LAST = dict.fromkeys(("q_layout", "k_layout", "v_layout"), upstream.QKVLayout.HEAD_DIM_MINOR)


@dataclass(frozen=True)
class Pass:
    """One walk over the tiles.

    Attributes:
      block_q, block_kv: its tile.
      block_kv_compute: the part of it that one matmul takes.
      transposed: rows of the grid are key/value tiles, as for dK and dV.
      shrunk: rows of the grid are as long as the longest needs; the fused backward needs all tiles.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int
    transposed: bool
    shrunk: bool

    def grid_shape(self, call: AttentionCall) -> tuple[int, int]:
        """Rows of the grid, and tiles of the other side."""
        num_q, num_kv = -(-call.q_len // self.block_q), -(-call.kv_len // self.block_kv)
        return (num_kv, num_q) if self.transposed else (num_q, num_kv)


class PassMask(NamedTuple):
    """The masks of one pass."""

    info: MaskInfo
    """The tiles to visit under each distinct mask, as the kernels take them."""
    function: Callable[[Any, Any, Any, Any], Any] | None
    """(number of the mask, query positions, key positions, keys' indices) → allowed, traced into the
    kernel, which adds the bounds. None: `info` is enough."""
    mask_of_head: tuple[int, ...]
    """The number of each query head's mask."""
    tokens: dict[str, Int[Array, " L"]]
    """Bounds by their names, and `kv_positions` if these don't count from 0."""


class _TableOfMask(NamedTuple):
    """One mask's part of a table in scalar memory, in the shape that upstream has for heads that share a mask."""

    table: Any
    mask: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.table.shape[1:])

    def __getitem__(self, index):
        return self.table[self.mask, *index[1:]]


class _WithoutInfinities(NamedTuple):
    """lse as upstream's backward kernels read it: exp(logits − a huge lse) = 0 where a query attends to nothing."""

    lse: Any

    def __getitem__(self, index):
        return jnp.where(self.lse[index] == -jnp.inf, -MASKED, self.lse[index])


@dataclass(frozen=True)
class _Grid:
    """Which blocks a step loads. The methods take a step's three indices, then the arrays in scalar memory."""

    call: AttentionCall
    walk: Pass
    num_masks: int

    def head(self, *at):
        """The query head."""
        return at[1 if self.walk.transposed else 0]

    def lookup(self, table, *at):
        """The step's entry in a table."""
        step, mask_of_head = at[2], at[-1]
        row = at[0 if self.walk.transposed else 1]
        index = (step, row) if self.walk.transposed else (row, step)
        return table[(mask_of_head[self.head(*at)] if self.num_masks > 1 else 0, *index)].astype(jnp.int32)

    def q_tile(self, *at):
        """The query tile; where steps aren't visited, that of the next one that is."""
        return self.lookup(at[3], *at) if self.walk.transposed else at[1]

    def kv_tile(self, *at):
        """The key/value tile; where steps aren't visited, that of the next one that is."""
        return at[0] if self.walk.transposed else self.lookup(at[3], *at)

    def query_blocks(self, width: int) -> pl.BlockSpec:
        """Blocks of `[N, T, width]`."""
        return pl.BlockSpec((None, self.walk.block_q, width), lambda *at: (self.head(*at), self.q_tile(*at), 0))

    def key_blocks(self, width: int) -> pl.BlockSpec:
        """Blocks of `[K, S, width]`."""
        size = self.call.group_size
        return pl.BlockSpec(
            (None, self.walk.block_kv, width), lambda *at: (jax.lax.div(self.head(*at), size), self.kv_tile(*at), 0)
        )

    def token_blocks(self, tokens: Int[Array, " L"], *, queries: bool) -> tuple[Array, pl.BlockSpec]:
        """One number a token, repeated over the vector registers' other dimension, and their blocks."""
        block, tile = (self.walk.block_q, self.q_tile) if queries else (self.walk.block_kv, self.kv_tile)
        if queries != self.walk.transposed:
            repeated = jax.lax.broadcast_in_dim(tokens, (*tokens.shape, _LANES), (0,))
            return repeated, pl.BlockSpec((block, _LANES), lambda *at: (tile(*at), 0))
        repeated = jax.lax.broadcast_in_dim(tokens, (_SUBLANES, *tokens.shape), (1,))
        return repeated, pl.BlockSpec((_SUBLANES, block), lambda *at: (0, tile(*at)))

    def operand_blocks(self, name: str, x: Array) -> tuple[Array, pl.BlockSpec]:
        """An operand as its kernel takes it, and its blocks."""
        if name in ("k", "v"):
            return x, self.key_blocks(x.shape[-1])
        if name in ("q", "do"):
            return x, self.query_blocks(x.shape[-1])
        return x[:, None], self.statistics_blocks()

    def statistics_blocks(self) -> pl.BlockSpec:
        """Blocks of `[N, 1, T]`."""
        return pl.BlockSpec((None, 1, self.walk.block_q), lambda *at: (self.head(*at), 0, self.q_tile(*at)))

    def output_blocks(self, name: str, width: int) -> pl.BlockSpec:
        """An output's blocks."""
        if name in ("dk", "dv"):
            return self.key_blocks(width)
        if name == "lse":
            return self.statistics_blocks()
        if name == "dq" and self.walk.transposed:
            return pl.BlockSpec((None, None, self.walk.block_q, width), lambda j, head, i, *_: (j, head, i, 0))
        return self.query_blocks(width)


def _call_kernel(
    kernel: Callable, grid: _Grid, mask: PassMask, refs: dict[str, Any], tables: list[str], static: dict[str, Any]
) -> None:
    """Calls upstream's kernel on the references of one step, by the kernel's names for them.

    Args:
      kernel, grid, mask, static: those of the launch.
      refs: tables, operands, outputs and scratch.
      tables: names of the tables in scalar memory among them.
    """
    walk, bounds, number = grid.walk, grid.call.bounds, 0
    if set(bounds) & set(OF_KEYS):
        # Bounds are of indices, and upstream's kernels know the queries' positions only.
        first_query = walk.block_q * grid.q_tile(*map(pl.program_id, range(3)), *(refs[name] for name in tables))
    if grid.num_masks > 1:
        number = refs.pop("mask_of_head")[grid.head(*(pl.program_id(axis) for axis in range(3)))]
        refs |= {name: _TableOfMask(refs[name], number) for name in tables if name in refs}
    tokens = {name: refs.pop(name) for name in mask.tokens}
    if "logsumexp" in refs:
        refs["logsumexp"] = _WithoutInfinities(refs["logsumexp"])

    def once(name):
        # [rows, 1] or [1, columns] of the tile.
        by_row = (name in OF_QUERIES) != walk.transposed
        return tokens[name][:, :1] if by_row else tokens[name][:1, :]

    def allowed(q_pos, kv_index):
        kv_pos = jnp.broadcast_to(once("kv_positions"), kv_index.shape) if "kv_positions" in tokens else kv_index
        assert mask.function is not None
        result = mask.function(number, q_pos, kv_pos, kv_index)
        for name in bounds:
            index = kv_index
            if name in OF_KEYS:
                index = first_query + jax.lax.broadcasted_iota(jnp.int32, q_pos.shape, int(walk.transposed))
            result &= is_within(name, index, once(name))
        return result

    parameters = inspect.signature(kernel).parameters
    absent = {name: None for name in parameters if name.endswith("_ref")}
    kernel(
        **absent | {f"{name}_ref": ref for name, ref in refs.items()},
        mask_value=MASKED,
        bq=walk.block_q,
        bkv=walk.block_kv,
        mask_function=None if mask.function is None else allowed,
        **static,
        **_HEAD_DIM_LAST,
    )


@types_of_32_bits()
def launch(
    kernel: Callable,
    call: AttentionCall,
    walk: Pass,
    mask: PassMask,
    segment_ids: upstream.SegmentIds | None,
    operands: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, tuple[int, int]],
    *,
    interpret: bool,
    **static: Any,
) -> list[Array]:
    """Runs one pass over one sequence, whose lengths are padded to whole tiles.

    Args:
      kernel: upstream's.
      call, walk, mask, segment_ids: the call, its pass over the tiles, its masks and documents.
      operands: by the kernel's names for them: q, do `[N, T, X]`, k, v `[K, S, X]`, logsumexp, di `[N, T]`.
      outputs: by the kernel's names, too.
      scratch: shapes of its float32 scratch memory.
      interpret: run in Pallas's interpreter.
      static: further parameters of the kernel.
    """
    info = mask.info
    tables = {
        name: jnp.asarray(table)
        for name in ("data_next", "block_mask", "mask_next")
        if (table := getattr(info, name)) is not None
    }
    num_masks, *steps = tables["data_next"].shape
    grid = _Grid(call, walk, num_masks)
    given = {name: grid.operand_blocks(name, x) for name, x in operands.items()}
    if segment_ids is not None:
        given["q_segment_ids"] = grid.token_blocks(segment_ids.q, queries=True)
        given["kv_segment_ids"] = grid.token_blocks(segment_ids.kv, queries=False)
    if mask.function is not None:
        given["q_sequence"] = grid.token_blocks(jnp.asarray(info.q_sequence), queries=True)
        for name, numbers in mask.tokens.items():
            given[name] = grid.token_blocks(numbers, queries=name in OF_QUERIES)
    if info.partial_mask_blocks is not None:
        blocks = jnp.asarray(info.partial_mask_blocks)
        given["mask"] = blocks, pl.BlockSpec((None, *blocks.shape[1:]), lambda *at: (grid.lookup(at[5], *at), 0, 0))

    if num_masks > 1:
        tables["mask_of_head"] = jnp.asarray(mask.mask_of_head, jnp.int32)

    static |= {"grid_width": steps[0 if walk.transposed else 1], "attn_logits_soft_cap": call.logits_soft_cap}
    names = [*tables, *given, *outputs, *(f"{name}_scratch" for name in scratch)]

    def body(*refs):
        _call_kernel(kernel, grid, mask, dict(zip(names, refs, strict=True)), list(tables), static)

    num_q, num_kv = operands["q"].shape[1] // walk.block_q, operands["k"].shape[1] // walk.block_kv
    # Two cores of a chip may share the forward's heads, as upstream has it.
    first: Literal["parallel", "arbitrary"] = "parallel" if "o" in outputs else "arbitrary"
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(num_kv, call.num_heads, steps[0]) if walk.transposed else (call.num_heads, num_q, steps[1]),
            in_specs=[spec for _, spec in given.values()],
            out_specs=[grid.output_blocks(name, shape.shape[-1]) for name, shape in outputs.items()],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(first, "arbitrary", "arbitrary")),
        out_shape=list(outputs.values()),
        name=f"splash_{'_'.join(outputs)}",
        interpret=interpret,
    )(*tables.values(), *(x for x, _ in given.values()))
