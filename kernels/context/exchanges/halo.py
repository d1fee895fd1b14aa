"""Halo: a rank gets just the keys before and after its own that its queries' windows reach.

Ranks hold runs of consecutive tokens. Each run is a batch element of the kernel's call, with the halo around its own
keys. A window allows the same pairs wherever a run begins, so the kernel's tiles are known ahead of time.

- Before the custom gradient: halos are brought where the ranks are a few GPUs that hold one run each. A kernel reads
  the halo from the neighbours' memory and puts it around the run (`halo_chunks.py`). The backward pass has it, too.
- Forward and backward: elsewhere XLA sends the halos.
- Home: the halos' gradients return to the ranks of their tokens, and are added up there.

Dimensions: B batch, t tokens of a rank, n runs of a rank, c = t / n tokens of a run, s = left + c + right keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.context.exchanges import halo_chunks
from kernels.context.rank import Rank
from kernels.context.spans import Spans
from kernels.context.split import Split
from kernels.masks import LocalMask

_TILE_KEYS = 128  # of most tiles


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """The mask has to reach only so far, and a rank to hold the same runs of every sequence."""
    if split.num_runs is None:
        return (
            "needs to know ahead of time which tokens a rank holds, and sequence_sharding='balanced' decides for each "
            "sequence"
        )
    if call.mask.num_heads is not None:
        return "is for one mask, since heads of different masks reach differently far"
    if _may_restart(call):
        return "needs positions that count up within a document, and with bounds they may restart"
    reach = reach_of(call)
    if reach is None:
        return f"needs a mask that reaches only so far, and {call.mask!r} has no bound"
    run_length, num_runs = call.q_len // split.num_runs, split.num_ranks * split.num_runs
    if max(reach) >= run_length * (num_runs - 1):
        return f"would be all of the sequence, since {call.mask!r} reaches {max(reach):,} tokens far"
    return None


def reach_of(call: AttentionCall) -> tuple[int, int] | None:
    """How many tokens before and after its own a query may look; None if there is no such bound."""
    left, right = reach_by_side(call)
    return None if left is None or right is None else (left, right)


def reach_by_side(call: AttentionCall) -> tuple[int | None, int | None]:
    """How many tokens before its own a query may look, and how many after; None for no bound."""
    if _may_restart(call):
        return None, None
    mask = call.mask
    left, right = mask.window or (mask.lookback, None if mask.looks_ahead else 0)
    return None if left is None else max(left, 0), None if right is None else max(right, 0)


def _may_restart(call: AttentionCall) -> bool:
    """True: positions may restart within a document, as at each branch of a tree. So they tell no distances."""
    return call.has_positions and bool(call.bounds)


def kernel_call(call: AttentionCall, split: Split) -> AttentionCall:
    """A rank's runs side by side, with their halos."""
    num_runs = _num_runs(split)
    run_length = call.q_len // num_runs
    left, right = halo_of(call, run_length)
    call = call._replace(
        batch=call.batch * num_runs,
        q_len=run_length,
        kv_len=left + run_length + right,
        has_segment_ids=True,
    )
    if call.mask.window is None:
        return call._replace(has_query_positions=True, has_key_value_positions=True)
    # Query i of a run stands at key left + i.
    window_left, window_right = (bound or 0 for bound in call.mask.window)
    shifted = LocalMask(window_left - left, window_right + left)
    return call._replace(mask=shifted, has_query_positions=False, has_key_value_positions=False)


def bring(rank: Rank) -> Callable[[AttentionInputs], AttentionInputs] | None:
    """Brings the keys and values with their halos, where kernels read these from the neighbours' memory."""
    chunks = chunks_of_halo(rank.call, rank.split)
    if chunks is None:
        return None

    def bring_halo(inputs: AttentionInputs) -> AttentionInputs:
        kernel_inputs = Runs.of(rank).without_halos(inputs)
        key, value = halo_chunks.with_halos((inputs.key, inputs.value), chunks, rank.split, rank.call.target)
        return kernel_inputs._replace(key=key, value=value)

    return bring_halo


def fwd(inputs: AttentionInputs, rank: Rank) -> tuple[Array, Array]:
    """Output and lse of this rank's queries."""
    if bring(rank) is not None:
        return rank.fwd(inputs)
    runs = Runs.of(rank)
    output, lse = rank.fwd(runs.with_keys(inputs))
    return runs.join(output), runs.join(lse)


def bwd(inputs: AttentionInputs, rank: Rank, cotangent: Cotangent) -> Gradients:
    """Gradients of this rank's queries, keys and values; with their halos, where these were brought."""
    if bring(rank) is not None:
        return rank.bwd(inputs, cotangent)
    runs = Runs.of(rank)
    d_query, *d_keys = rank.bwd(runs.with_keys(inputs), Cotangent(*map(runs.cut, cotangent)))
    d_key, d_value = (runs.sum_to_owners(d).astype(rank.call.dtype) for d in d_keys)
    return runs.join(d_query), d_key, d_value


class Runs(NamedTuple):
    """The runs of consecutive tokens that a rank holds, each a batch element of the kernel's call.

    Attributes:
      call: of one rank.
      split: of the sequences.
    """

    call: AttentionCall
    split: Split

    @staticmethod
    def of(rank: Rank) -> Runs:
        """The runs of a rank."""
        return Runs(rank.call, rank.split)

    @property
    def number(self) -> int:
        """n, of a sequence."""
        return _num_runs(self.split)

    @property
    def length(self) -> int:
        """c, in tokens."""
        return self.call.q_len // self.number

    def cut(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B*n c ..."]:
        """A rank's tokens as runs."""
        return self._by_run(x).reshape(-1, self.length, *x.shape[2:])

    def join(self, x: Shaped[Array, "B*n c ..."]) -> Shaped[Array, "B t ..."]:
        """The inverse of `cut`."""
        return x.reshape(-1, self.call.q_len, *x.shape[2:])

    def with_halos(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B*n s ..."]:
        """A rank's runs with their halos, which the neighbours send."""
        whole = jnp.concatenate([part_of(x) for _, part_of in self._parts()], axis=2)
        return whole.reshape(-1, whole.shape[2], *x.shape[2:])

    def sum_to_owners(self, x: Shaped[Array, "B*n s ..."]) -> Shaped[Array, "B t ..."]:
        """The transpose of `with_halos`, in the softmax's dtype: the sum over the runs that read a key."""
        own = jax.ShapeDtypeStruct((x.shape[0] // self.number, self.call.q_len, *x.shape[2:]), x.dtype)
        by_run = x.reshape(-1, self.number, *x.shape[1:])
        ends = np.cumsum([length for length, _ in self._parts()])[:-1]
        total = jnp.zeros((), self.call.softmax_dtype)
        # Each part's gradients travel in their own dtype: of one part, no token has two.
        for (_, part_of), gradient in zip(self._parts(), jnp.split(by_run, ends, axis=2), strict=True):
            total += jax.linear_transpose(part_of, own)(gradient)[0].astype(total.dtype)
        return total

    def with_keys(self, inputs: AttentionInputs) -> AttentionInputs:
        """The kernel's inputs, where XLA sends the halos."""
        kernel_inputs = self.without_halos(inputs)
        return kernel_inputs._replace(key=self.with_halos(inputs.key), value=self.with_halos(inputs.value))

    def without_halos(self, inputs: AttentionInputs) -> AttentionInputs:
        """The kernel's inputs, but with keys and values that have no halos yet."""
        ids, positions = inputs.query_segment_ids, inputs.query_positions
        left, right = halo_of(self.call, self.length)
        query_order = self.cut(self.split.token_order(inputs))
        key_order = query_order[:, :1] + jnp.arange(-left, self.length + right, dtype=jnp.int32)
        # Keys beyond the ends of the sequence belong to no document.
        is_there = (key_order >= 0) & (key_order < self.split.length)
        if ids is None:
            query_ids, key_ids = jnp.zeros_like(query_order), jnp.where(is_there, 0, 1)
        else:
            outside = jnp.repeat(unused_id(ids), self.number)[:, None]
            query_ids, key_ids = self.cut(ids), jnp.where(is_there, self.with_halos(ids), outside)
        query_positions = key_positions = None
        if self.call.mask.window is None:
            query_positions = query_order if positions is None else self.cut(positions)
            key_positions = key_order if positions is None else self.with_halos(positions)
        bounds = inputs.bounds
        if bounds is not None:
            queries, keys = (Spans(order[:, :1], order.shape[1]) for order in (query_order, key_order))
            bounds = bounds.map(
                lambda k: keys.num_before(self.cut(k)), lambda q: queries.num_before(self.with_halos(q))
            )
        return AttentionInputs(
            self.cut(inputs.query),
            inputs.key,
            inputs.value,
            inputs.sinks,
            query_ids,
            key_ids,
            query_positions,
            key_positions,
            bounds=bounds,
        )

    def _parts(self) -> list[tuple[int, Callable]]:
        """The parts of a run with its halo, in order: the number of tokens, and the function of this rank's tokens."""
        left, right = map(self._spans, halo_of(self.call, self.length))

        def neighbours(distance: int, length: int, from_end: bool) -> tuple[int, Callable]:
            return length, lambda x: self._neighbours(x, distance, length, from_end=from_end)

        return [
            *(neighbours(-distance, length, True) for distance, length in left[::-1]),
            (self.length, self._by_run),
            *(neighbours(distance, length, False) for distance, length in right),
        ]

    def _by_run(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B n c ..."]:
        return x.reshape(x.shape[0], self.number, self.length, *x.shape[2:])

    def _spans(self, reach: int) -> list[tuple[int, int]]:
        """(distance in runs, tokens) of the runs within reach, the nearest first."""
        num_whole, rest = divmod(reach, self.length)
        spans = [(distance, self.length) for distance in range(1, num_whole + 1)]
        return spans + [(num_whole + 1, rest)] * (rest > 0)

    def _neighbours(
        self, x: Shaped[Array, "B t ..."], distance: int, length: int, *, from_end: bool
    ) -> Shaped[Array, "B n length ..."]:
        """`length` tokens of the run that stands `distance` after each of this rank's; zeros beyond the sequence."""
        runs = self._by_run(x)
        span = runs[:, :, self.length - length :] if from_end else runs[:, :, :length]
        runs_of = runs_of_ranks(self.split)
        holder = {run: (rank, slot) for rank, held in enumerate(runs_of) for slot, run in enumerate(held)}
        found = []
        for slot in range(self.number):
            # From each slot apart, since a rank may send only one span at a time.
            sources: dict[int, list[tuple[int, int]]] = {}
            for rank, held in enumerate(runs_of):
                if held[slot] + distance in holder:
                    source, source_slot = holder[held[slot] + distance]
                    sources.setdefault(source_slot, []).append((source, rank))
            received = [lax.ppermute(span[:, source], self.split.axis, moves) for source, moves in sources.items()]
            # At an end of the sequence there may be none that any rank's run of this slot could get.
            found.append(sum(received[1:], start=received[0]) if received else jnp.zeros_like(span[:, slot]))
        return jnp.stack(found, axis=1)


def _num_runs(split: Split) -> int:
    assert split.num_runs is not None, "checked by unsupported_reason"
    return split.num_runs


def halo_of(call: AttentionCall, run_length: int) -> tuple[int, int]:
    """How many tokens before and after its own a run gets: as far as the mask reaches, in whole tiles.

    A kernel would pad keys to whole tiles itself, and copy all of them for that.
    """
    reach = reach_of(call)
    assert reach is not None, "checked by unsupported_reason"
    multiple = 1 if run_length % _TILE_KEYS else _TILE_KEYS
    left, right = (-(-side // multiple) * multiple for side in reach)
    return left, right


def chunks_of_halo(call: AttentionCall, split: Split) -> halo_chunks.HaloChunks | None:
    """The chunks by which GPUs read halos from their neighbours' memory; None: XLA sends them."""
    if split.num_runs != 1:
        return None
    return halo_chunks.HaloChunks.of(call, split, *halo_of(call, call.q_len))


def runs_of_ranks(split: Split) -> list[tuple[int, ...]]:
    """The runs that each rank holds, numbered along the sequence."""
    if split.sequence_sharding == "contiguous":
        return [(rank,) for rank in range(split.num_ranks)]
    return [(rank, 2 * split.num_ranks - 1 - rank) for rank in range(split.num_ranks)]


def unused_id(ids: Int[Array, "B t"]) -> Int[Array, " B"]:
    """An int32 that none of each batch element's ids is: among t + 1 candidates there is one."""
    lowest = jnp.iinfo(jnp.int32).min

    def find(ids: Int[Array, " t"]) -> Int[Array, ""]:
        is_used = jnp.zeros(len(ids) + 1, bool).at[ids - lowest].set(True, mode="drop")
        return lowest + is_used.argmin().astype(jnp.int32)

    return jax.vmap(find)(ids)
