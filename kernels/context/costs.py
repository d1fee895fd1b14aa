"""What an exchange costs: bytes that a device receives and holds, and the time that it adds to the kernels'.

A model to choose by, not a prediction. Times are those of one layer, forward and backward.

Dimensions: B batch, t tokens of a rank, T = t·R tokens of a row, N query heads, K key/value heads, all of one device.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from kernels.call import AttentionCall
from kernels.context.exchanges.halo import chunks_of_halo, halo_of, reach_of
from kernels.context.exchanges.needed import can_leave_any, num_sent
from kernels.context.exchanges.ring import documents_bound_hops, num_hops
from kernels.context.sequence_sharding import chunk_costs, default_chunk_size, imbalance, shard_sequence
from kernels.context.split import Split
from kernels.masks import Mask
from kernels.plan import count_allowed_pairs
from kernels.tracing.target import Target

Exchange = Literal["all_gather", "peer", "halo", "ring", "all_to_all"]
"""gather: the keys that any rank needs to all ranks. peer: a few GPUs read what they need from each other's memory.
halo: the keys within the windows' reach. ring: keys travel from rank to rank. heads: each rank gets whole rows of some
heads."""


class Links(NamedTuple):
    """A kind of device, as far as exchanges depend on it.

    Attributes:
      bytes_per_s: that a device receives from its neighbours, over all the links of one mesh axis.
      is_torus: whether devices reach others only through those between, as TPUs do; through a switch otherwise.
      attention_flops_per_s: of our kernels, about.
      memory_bytes: of a device.
      memory_bytes_per_s: read and written.
    """

    bytes_per_s: float
    is_torus: bool
    attention_flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float


# NVIDIA: the data sheets at nvidia.com/en-us/data-center (h100, h200, a100, dgx-b200), half of "NVLink bandwidth",
# which counts both directions, and half of that again, which is what NCCL's collectives reach ("Training on two H200s"
# in docs/benchmarks.md). TPU: docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, "interchip interconnect
# bandwidth" of a chip, of which an axis of the torus has one half (2D) or one third (3D), half of it inwards.
_LINKS: tuple[tuple[str, Links], ...] = (
    (r"NVIDIA B200", Links(450e9, False, 1000e12, 180e9, 8.0e12)),
    (r"NVIDIA (GH|H)200.*", Links(225e9, False, 600e12, 141e9, 4.8e12)),
    (r"NVIDIA H100.*", Links(225e9, False, 600e12, 80e9, 3.35e12)),
    (r"NVIDIA A100.*", Links(150e9, False, 180e12, 80e9, 2.0e12)),
    (r"TPU v4", Links(50e9, True, 150e12, 32e9, 1.2e12)),
    (r"TPU (v5e|v5 lite)", Links(50e9, True, 100e12, 16e9, 0.82e12)),
    (r"TPU (v5p|v5)", Links(100e9, True, 250e12, 95e9, 2.77e12)),
    (r"TPU (v6e|v6 lite)", Links(112e9, True, 450e12, 32e9, 1.64e12)),
)
# Others: PCI Express, or the memory that CPU devices share.
_OTHER_LINKS = Links(25e9, False, 1e12, 16e9, 0.1e12)

# How much longer the kernels take on queries whose places they learn at run time, and on keys, too: the tiles are
# planned on the device, and those that the mask cuts evaluate it on positions. See "Training on two H200s" in
# docs/benchmarks.md.
_SLOWER_WITH_QUERY_PLACES = 1.03
_SLOWER_WITH_KEY_PLACES = 1.14
# How often a gather of documents' or windows' keys reads or writes whole rows of them, or of their gradients; and how
# often where a GPU reads what it needs from the other's memory, and how much faster it does than NCCL, about.
_COPIES_OF_WHOLE_ROWS = 8
_COPIES_BY_PEER, _FASTER_BY_PEER = 5, 1.4
# The share of a ring's hops that kernels hide at best on a torus: what is sent takes some of the memory's bandwidth. On
# GPUs they hide nothing: "Training on four H200s" in docs/benchmarks.md.
_HIDDEN_SHARE_OF_HOPS = 0.75
# How much longer a GPU takes for a hop, or a halo that XLA sends, than for as many bytes of other exchanges, and how
# much faster NCCL gathers and sums up. Seen there, too.
_SLOWER_BY_HOPS = 1.58
_FASTER_BY_GATHER = 1.3
# A rank's work over the mean where documents of other lengths in each row decide it, about: `chunk_costs` of random
# packed rows of 131,072 tokens say 1.1 to 1.3 over 2 ranks, and 1.6 to 2.2 over 8. And what is left of it when each row
# is sharded by `balanced`.
_IMBALANCE_OF_DOCUMENTS = 1.5
_IMBALANCE_OF_BALANCED = 1.02
# A token of packed documents has so many of its document's before it, about: documents have 6,000 tokens or so. Nobody
# knows them before they are read. And the runs that a rank has with `balanced`, about.
_TOKENS_BEFORE = 3_000
_RUNS_OF_BALANCED = 2
# The tokens of the longest document of a batch, about.
_LONGEST_DOCUMENT = 50_000
# Gathered keys take no more of a device's memory than this, parameters and activations being the rest.
_MOST_OF_MEMORY = 0.15


class ExchangeCost(NamedTuple):
    """Of one layer on one device.

    Attributes:
      received_bytes: in the forward pass and in the backward pass.
      held_bytes: at most at one time, of keys and values of other ranks, or their gradients.
      seconds: of the kernels and of the exchange as far as no kernel runs under it.
      exposed_seconds: the exchange's part of them.
      fits: whether `held_bytes` leave enough memory.
    """

    received_bytes: tuple[float, float]
    held_bytes: float
    seconds: float
    exposed_seconds: float
    fits: bool


def links_of(target: Target) -> Links:
    """The links of a kind of device."""
    for pattern, links in _LINKS:
        if re.fullmatch(pattern, target.device_kind):
            return links
    return _OTHER_LINKS


class _Bytes(NamedTuple):
    """Of an exchange, on one device.

    Attributes:
      forward: what comes in the forward pass.
      backward: what comes in the backward pass, where a remat policy makes the layer anew.
      kept: of that, what the forward pass leaves where no policy does.
      held: at most at one time.
    """

    forward: float
    backward: float
    kept: float
    held: float


def exchange_cost(name: Exchange, call: AttentionCall, split: Split, *, remat: bool = True) -> ExchangeCost:
    """The cost of an exchange that serves the call.

    Args:
      name: the exchange.
      call: of one device.
      split: of the rows.
      remat: whether a remat policy makes the layer anew in the backward pass.

    Returns:
      The cost of one layer.
    """
    links = links_of(call.target)
    forward, backward, kept, held = _BYTES[name](call, split)
    if not remat:
        backward -= kept
    kernels = 7 * pairs_of_a_device(call, split) * (call.head_dim + call.value_dim) / links.attention_flops_per_s
    if name != "all_to_all":  # each rank works on its own queries
        kernels *= expected_imbalance(call.mask, split, call.has_segment_ids)
    exposed = (forward + backward) / links.bytes_per_s
    if name == "all_to_all":
        # On a torus, a message to a rank farther off takes the links of those between.
        exposed *= max(1.0, split.num_ranks / 4) if links.is_torus else 1.0
    elif name == "all_gather":
        kernels *= _SLOWER_WITH_QUERY_PLACES
        exposed /= 1.0 if links.is_torus else _FASTER_BY_GATHER
        # Whole rows are put together, twice, and their gradients filled in and taken apart, whatever was sent.
        whole = _key_bytes(call, split.length, call.num_kv_heads, call.dtype.itemsize)
        exposed += _COPIES_OF_WHOLE_ROWS * whole / links.memory_bytes_per_s
    elif name == "peer":
        kernels *= _SLOWER_WITH_QUERY_PLACES
        whole = _key_bytes(call, split.length, call.num_kv_heads, call.dtype.itemsize)
        exposed = exposed / _FASTER_BY_PEER + _COPIES_BY_PEER * whole / links.memory_bytes_per_s
    elif name == "halo":
        # Halos are small: kernels that read them from the neighbours' memory are as fast as the links are taken to be.
        if chunks_of_halo(call, split) is None and not links.is_torus:
            exposed *= _SLOWER_BY_HOPS
        # A rank's own keys are put into their halo, twice with a remat policy, and their gradients are taken out of it:
        # each time they are read and written.
        own = _key_bytes(call, call.q_len, call.num_kv_heads, call.dtype.itemsize)
        exposed += 2 * (3 if remat else 2) * own / links.memory_bytes_per_s
    elif name == "ring":
        kernels *= _SLOWER_WITH_KEY_PLACES
        if links.is_torus:
            # Hops are under way while kernels run, but for those that take gradients home.
            home = _hop_bytes(call) * _ring_hops(call, split)[1] / links.bytes_per_s
            exposed -= min(_HIDDEN_SHARE_OF_HOPS * (exposed - home), kernels)
        else:
            exposed *= _SLOWER_BY_HOPS
    fits = held <= _MOST_OF_MEMORY * links.memory_bytes
    return ExchangeCost((forward, backward), held, kernels + exposed, exposed, fits)


@functools.lru_cache(maxsize=256)
def expected_imbalance(mask: Mask, split: Split, has_documents: bool) -> float:
    """The greatest rank's work divided by the mean, where each rank works on its own queries."""
    if split.sequence_sharding == "balanced":
        return _IMBALANCE_OF_BALANCED
    num_parts = split.num_ranks * (split.num_runs or 1)
    side = default_chunk_size(split.length, num_parts, 128)
    token_order = shard_sequence(split.sequence_sharding, split.length, split.num_ranks)[::side]
    of_whole_rows = imbalance(
        chunk_costs({mask: 1.0}, split.length, side)[token_order // side].reshape(split.num_ranks, -1)
    )
    if has_documents and (mask.lookback is None or mask.looks_ahead):
        return max(of_whole_rows, _IMBALANCE_OF_DOCUMENTS)
    return of_whole_rows


def pairs_of_a_device(call: AttentionCall, split: Split) -> float:
    """Query/key pairs that a device computes, over its heads and batch elements, on average; documents as assumed."""
    heads = call.mask.distinct_heads(call.num_heads)
    pairs = sum(count_allowed_pairs(mask, split.length, split.length) * len(sharing) for mask, sharing in heads.items())
    if call.has_segment_ids:
        pairs = min(pairs, split.length * _TOKENS_BEFORE * call.num_heads)
    return call.batch * pairs / split.num_ranks


def _key_bytes(call: AttentionCall, num_tokens: float, num_heads: int, itemsize: int) -> float:
    return call.batch * num_tokens * num_heads * (call.head_dim + call.value_dim) * itemsize


def _all_gather_bytes(call: AttentionCall, split: Split) -> _Bytes:
    itemsize, sum_itemsize = call.dtype.itemsize, call.softmax_dtype.itemsize
    sent = _tokens_sent(call, split)
    others = (split.num_ranks - 1) * sent
    forward = _key_bytes(call, others, call.num_kv_heads, itemsize)
    backward = forward + _key_bytes(call, others, call.num_kv_heads, sum_itemsize)
    # As they come, and in the row's order, which they may come in.
    in_order = split.sequence_sharding == "contiguous" and sent == call.q_len
    received = _key_bytes(call, split.num_ranks * sent, call.num_kv_heads, itemsize + sum_itemsize)
    whole = 0.0 if in_order else _key_bytes(call, split.length, call.num_kv_heads, 2 * itemsize)
    return _Bytes(forward, backward, forward, received + whole)


def _tokens_sent(call: AttentionCall, split: Split) -> int:
    """How many of its tokens' keys a rank sends to all others in a gather, about."""
    if not can_leave_any(call, split):
        return call.q_len
    num_chunks = min(call.q_len, 128)
    needed = -(-_tokens_needed(call, split) * num_chunks // call.q_len)
    return num_sent(needed, num_chunks) * call.q_len // num_chunks


def _tokens_needed(call: AttentionCall, split: Split) -> int:
    """How many of a rank's tokens' keys another rank needs, about."""
    return min(call.q_len, _tokens_before(call, split))


def _tokens_before(call: AttentionCall, split: Split) -> int:
    """How many tokens' keys a rank needs that lie before its runs, about."""
    reach = sum(reach_of(call.mask) or (split.length, 0))
    if call.has_segment_ids:
        reach = min(reach, _TOKENS_BEFORE)
    return (split.num_runs or _RUNS_OF_BALANCED) * reach


def _peer_bytes(call: AttentionCall, split: Split) -> _Bytes:
    num_tokens = min((split.num_ranks - 1) * call.q_len, _tokens_before(call, split))
    needed = _key_bytes(call, num_tokens, call.num_kv_heads, call.dtype.itemsize)
    # What is held: the kernel's whole rows, and their gradients.
    held = 2 * _key_bytes(call, split.length, call.num_kv_heads, call.dtype.itemsize)
    return _Bytes(needed, 2 * needed, needed, held)


def _halo_bytes(call: AttentionCall, split: Split) -> _Bytes:
    num_runs = split.num_runs or 1
    num_tokens = num_runs * sum(halo_of(call, call.q_len // num_runs))
    forward = _key_bytes(call, num_tokens, call.num_kv_heads, call.dtype.itemsize)
    # Gradients come back in the keys' dtype, and are added up in the softmax's.
    return _Bytes(forward, 2 * forward, forward, 2 * forward)


def _ring_bytes(call: AttentionCall, split: Split) -> _Bytes:
    hops, hops_home = _ring_hops(call, split)
    keys = _hop_bytes(call)
    gradients = _key_bytes(call, call.q_len, call.num_kv_heads, call.softmax_dtype.itemsize)
    # They go home in the keys' dtype. XLA keeps what came by the first hop, which is outside of the loop over hops.
    backward = (hops + hops_home) * keys + hops * gradients
    return _Bytes(hops * keys, backward, min(hops, 1) * keys, 2 * (keys + gradients))


def _ring_hops(call: AttentionCall, split: Split) -> tuple[int, int]:
    """Those of keys, and those that take their gradients home, about."""
    hops = num_hops(call, split) - 1
    if not documents_bound_hops(call, split):
        return hops, 1
    hops = min(hops, -(-_LONGEST_DOCUMENT // call.q_len))
    return hops, min(hops, split.num_ranks - hops)


def _hop_bytes(call: AttentionCall) -> float:
    return _key_bytes(call, call.q_len, call.num_kv_heads, call.dtype.itemsize)


def _all_to_all_bytes(call: AttentionCall, split: Split) -> _Bytes:
    queries = call.batch * call.q_len * call.num_heads * (call.head_dim + call.value_dim) * call.dtype.itemsize
    num_kv_heads = max(call.num_kv_heads, split.num_ranks)
    keys = _key_bytes(call, call.q_len, num_kv_heads, call.dtype.itemsize)
    delta = call.batch * call.q_len * call.num_heads * call.softmax_dtype.itemsize
    from_others = (split.num_ranks - 1) / split.num_ranks
    forward = (queries + keys) * from_others
    # The output's gradient and delta, and the gradients of queries, keys and values back.
    backward = (queries + keys + delta) * from_others
    # What comes in the forward pass is what the gradient's half starts from.
    return _Bytes(forward, backward, 0.0, 2 * (queries + keys))


_BYTES: dict[Exchange, Callable[[AttentionCall, Split], _Bytes]] = {
    "all_gather": _all_gather_bytes,
    "peer": _peer_bytes,
    "halo": _halo_bytes,
    "ring": _ring_bytes,
    "all_to_all": _all_to_all_bytes,
}
