"""How the Hopper attention kernels run: tuning objects, and the best ones known for a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from kernels.backends.mosaic_gpu import tuned_tables
from kernels.backends.mosaic_gpu.makespan import makespan_of_few_blocks
from kernels.backends.mosaic_gpu.padding import padded_head_dim
from kernels.call import AttentionCall
from kernels.hopper.launch import Warpgroups
from kernels.masks import Mask

# What others' tiles must promise: they are slower by themselves (docs/hopper_kernels.md).
_OTHERS_COST = 1.1
MAX_EQUAL_HEAD_DIM = 128
"""Up to it a backward pads the keys' and the values' head dims to the wider one. Above it both count by themselves."""
CallFamily = Literal["full", "causal", "window", "narrow_window", "packed", "other"]
# In tokens. Narrower windows have blocks as short as those of short sequences.
_NARROW_WINDOW = 2048


@dataclass(frozen=True)
class MosaicForwardTuning(Warpgroups):
    """How the `mosaic_gpu` forward kernel runs.

    Attributes:
      num_warpgroups: consumer warpgroups, each of which computes 64 queries; one more is the producer. Three have
        registers for tiles of 64 keys; with larger tiles they spill.
      block_kv: keys in a tile: 64, 128, 192 or 256.
      num_stages: key/value tiles in shared memory.
      ping_pong: whether warpgroups issue their matmuls one after another, so that one's softmax runs under another's.
      persistent: whether a dynamic tile scheduler gives one program per multiprocessor one block after another. The
        program loads a block's first tiles while the block before it ends. For short rows, and head dims up to 128.
        Otherwise each block has its own program.
      num_l2_heads: number of key/value heads processed together, counted over the batch. Fewer heads keep their keys
        and values in the L2 cache; more heads balance the load better.

    Raises:
      ValueError: a value out of range.
    """

    num_warpgroups: int = 2
    block_kv: int = 128
    num_stages: int = 2
    ping_pong: bool = True
    persistent: bool = False
    num_l2_heads: int = 24

    def __post_init__(self):
        self.check_counts("num_stages", "num_l2_heads")
        if self.block_kv not in (64, 128, 192, 256):
            raise ValueError(f"block_kv={self.block_kv} must be 64, 128, 192 or 256")

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return 64 * self.num_warpgroups


@dataclass(frozen=True)
class MosaicBackwardTuning(Warpgroups):
    """How the `mosaic_gpu` backward kernels run.

    Attributes:
      num_warpgroups: consumer warpgroups; one more is the producer. In the pass for dK and dV (and dQ, if fused) each
        computes 64 keys, in the pass for dQ alone 64 queries.
      block_q: queries in a tile of the pass for dK and dV: 64 or 128.
      num_stages: such tiles in shared memory.
      one_gradient_per_warpgroup: whether two warpgroups share 64 keys: one computes dV, the other dK. Head dims above
        128 need it, since one warpgroup's registers don't hold both. Up to 192 beside up to 128 also runs without it,
        with two warpgroups and block_q=64. Not for a fused backward.
      block_kv_dq: keys in a tile of the pass for dQ alone: 64 or 128.
      num_stages_dq: such tiles in shared memory (with one_gradient_per_warpgroup, one value tile fewer).
      num_l2_heads: number of key/value heads processed together, counted over the batch. Fewer heads keep their queries
        and dQ in the L2 cache; more heads balance the load better.
      persistent: whether, in the pass for dK and dV, a dynamic tile scheduler gives one program per multiprocessor one
        block after another. The program loads a block's first tile while the block before it ends. For short rows, and
        head dims up to 128. Not with one_gradient_per_warpgroup.

    Raises:
      ValueError: a value out of range.
    """

    num_warpgroups: int = 2
    block_q: int = 64
    num_stages: int = 2
    one_gradient_per_warpgroup: bool = False
    block_kv_dq: int = 64
    num_stages_dq: int = 2
    num_l2_heads: int = 24
    persistent: bool = False

    def __post_init__(self):
        self.check_counts("num_stages", "num_stages_dq", "num_l2_heads")
        if self.one_gradient_per_warpgroup and (self.num_warpgroups != 2 or self.num_stages < 2):
            raise ValueError(
                "one_gradient_per_warpgroup takes num_warpgroups=2 and num_stages of at least 2, not "
                f"{self.num_warpgroups} and {self.num_stages}"
            )
        if self.one_gradient_per_warpgroup and self.persistent:
            raise ValueError("one_gradient_per_warpgroup excludes persistent programs; leave persistent=False")
        for name in ("block_q", "block_kv_dq"):
            if getattr(self, name) not in (64, 128):
                raise ValueError(f"{name}={getattr(self, name)} must be 64 or 128")

    @property
    def block_kv(self) -> int:
        """Keys of a block of the pass for dK and dV."""
        return 64 if self.one_gradient_per_warpgroup else 64 * self.num_warpgroups

    @property
    def divides_dq_by_columns(self) -> bool:
        """True if the warpgroups of a fused backward share a tile of dQ by columns: it has too few queries."""
        return self.block_q < 64 * self.num_warpgroups

    @property
    def block_q_dq(self) -> int:
        """Queries of a block of the pass for dQ alone."""
        return 64 * self.num_warpgroups

    @property
    def num_value_stages_dq(self) -> int:
        """Value tiles in shared memory of the pass for dQ alone. Values are read early, and free their stage sooner."""
        return max(1, self.num_stages_dq - 1) if self.one_gradient_per_warpgroup else self.num_stages_dq


@dataclass(frozen=True)
class MosaicGpuTuning:
    """How the `mosaic_gpu` backend runs.

    Attributes:
      backward: "fused": one kernel for all gradients, for head dims up to 128, or 192 beside 128. It adds up dQ in an
        order that differs from run to run. "split": one kernel for dK and dV, one for dQ, with the same bits in every
        run. None: the faster one.
      forward_tiles, backward_tiles: tiles of the kernels; None for the best known for the call.
      interpret: run in Pallas's interpreter, on any device (JAX 0.11 and later; not "fused"): for tests, thousands of
        times slower. On a machine with few cores set the environment's PJRT_NPROC=16, or it may wait forever.

    Raises:
      ValueError: an unknown backward, "fused" to be interpreted, or tiles that only "split" takes.
    """

    backend: ClassVar[str] = "mosaic_gpu"

    backward: Literal["fused", "split"] | None = None
    forward_tiles: MosaicForwardTuning | None = None
    backward_tiles: MosaicBackwardTuning | None = None
    interpret: bool = False

    def __post_init__(self):
        if self.backward not in ("fused", "split", None):
            raise ValueError(f"backward={self.backward!r} must be 'fused', 'split' or None")
        tiles = self.backward_tiles
        if self.interpret and self.backward == "fused":
            raise ValueError("Pallas's interpreter can't add to memory as backward='fused' does; use backward='split'")
        if tiles is not None and self.backward == "fused" and tiles.one_gradient_per_warpgroup:
            raise ValueError(
                "backward='fused' can't take backward_tiles with one_gradient_per_warpgroup; use backward='split'"
            )
        if tiles is not None and self.may_fuse:
            # Its warpgroups share a tile of dQ by 64 rows, or two of them by columns.
            shared = (tiles.num_warpgroups, tiles.block_q)
            if shared not in ((1, 64), (2, 64), (2, 128)):
                raise ValueError(
                    "backward_tiles of a fused backward are (num_warpgroups, block_q) = (1, 64), (2, 64) or (2, 128), "
                    f"not {shared}; choose one of these, or backward='split'"
                )

    @property
    def may_fuse(self) -> bool:
        """True if the backward may be fused: not in Pallas's interpreter, which has no atomics, nor with some tiles."""
        only_split = self.backward_tiles is not None and self.backward_tiles.one_gradient_per_warpgroup
        return self.backward != "split" and not self.interpret and not only_split


class TunedCall(NamedTuple):
    """The properties of a call that its tuning depends on.

    Attributes:
      head_dim: as of `tuned_head_dim`.
      family: what the mask leaves out.
      length: how long rows of pairs are: tokens of a narrow window; of other families, the queries.
    """

    head_dim: int
    family: CallFamily
    length: int

    @staticmethod
    def of(mask: Mask, length: int, head_dims: tuple[int, int], *, packed: bool) -> TunedCall:
        """The key of a call in the tables of tunings.

        Args:
          mask: the call's.
          length: its queries.
          head_dims: of its keys and values.
          packed: whether it has documents.

        >>> from kernels import LocalMask
        >>> TunedCall.of(LocalMask(1023, 0), 32768, (64, 64), packed=False)
        TunedCall(head_dim=64, family='narrow_window', length=1024)
        """
        family = call_family(mask, packed=packed)
        if family == "narrow_window":
            assert mask.window is not None
            assert mask.window[0] is not None
            length = max(mask.window[0] + 1, 1)
        return TunedCall(tuned_head_dim(*head_dims), family, length)


def tuned_head_dim(head_dim: int, value_dim: int) -> int:
    """The head dim that two head dims are tuned as: the wider one, and above 128 the mean of both.

    >>> tuned_head_dim(128, 64), tuned_head_dim(192, 128), tuned_head_dim(192, 192)
    (128, 160, 192)
    """
    narrower, wider = sorted((head_dim, value_dim))
    if wider <= MAX_EQUAL_HEAD_DIM:
        return wider
    return (padded_head_dim(wider) + max(padded_head_dim(narrower), MAX_EQUAL_HEAD_DIM)) // 2


def call_family(mask: Mask, *, packed: bool) -> CallFamily:
    """The family of a mask, by the pairs that the mask, and documents where `packed`, leave out.

    >>> from kernels import CausalMask, LocalMask
    >>> call_family(CausalMask() & LocalMask(4095, 0), packed=False)
    'window'
    >>> call_family(LocalMask(1023, 0), packed=False)
    'narrow_window'
    """
    if packed:
        return "packed"
    if mask.allows_all:
        return "full"
    if mask.window is None or mask.window[1] != 0:
        return "other"
    left = mask.window[0]
    if left is None:
        return "causal"
    return "window" if left >= _NARROW_WINDOW else "narrow_window"


FORWARD = {TunedCall(*key): MosaicForwardTuning(*fields) for key, fields in tuned_tables.FORWARD.items()}
FEW_BLOCKS = {TunedCall(*key): MosaicForwardTuning(*fields) for key, fields in tuned_tables.FEW_BLOCKS.items()}
FUSED = {TunedCall(*key): MosaicBackwardTuning(*fields) for key, fields in tuned_tables.FUSED.items()}
SPLIT = {TunedCall(*key): MosaicBackwardTuning(*fields) for key, fields in tuned_tables.SPLIT.items()}
FASTEST_BACKWARD = {TunedCall(*key): form for key, form in tuned_tables.FASTEST_BACKWARD.items()}
"""The best tunings found: of the forward, of its calls of few blocks, of both backwards, and the faster backward."""
FASTEST_BACKWARD_ON = {
    device: {TunedCall(*key): form for key, form in forms.items()}
    for device, forms in tuned_tables.FASTEST_BACKWARD_ON.items()
}
"""By the kind of device, where its faster backward is the other one."""


def resolve(tuning: MosaicGpuTuning | None, call: AttentionCall) -> MosaicGpuTuning:
    """Fills what a tuning leaves open."""
    tuning = tuning or MosaicGpuTuning()
    backward = backward_form(tuning, call)
    return dataclasses.replace(
        tuning,
        backward=backward,
        forward_tiles=tuning.forward_tiles or _forward_tiles(call),
        backward_tiles=tuning.backward_tiles or _backward_tiles(backward, call),
    )


def backward_form(tuning: MosaicGpuTuning, call: AttentionCall) -> Literal["fused", "split"]:
    """The form of the backward that a call gets."""
    if not tuning.may_fuse:
        return "split"
    forms = FASTEST_BACKWARD | FASTEST_BACKWARD_ON.get(call.target.device_kind, {})
    return tuning.backward or forms[_nearest_key(forms, call, packed=_is_packed(call), at_least=_wide_values(call))]


def _forward_tiles(call: AttentionCall) -> MosaicForwardTuning:
    """The nearest call's tiles; where blocks are few, maybe those found for such calls, which keep the GPU busier."""
    # Rows with holes are of unequal length, as those of documents are.
    packed = _is_packed(call) or bool(call.bounds)
    key = _nearest_key(FORWARD, call, packed=packed, at_least=_wide_values(call))
    best = FORWARD[key]
    least: float | None = makespan_of_few_blocks(best.block_q, best.block_kv, best.num_l2_heads, call)
    # Windows have blocks of equal, little work, of which there are seldom few.
    if least is None or key.family in ("window", "narrow_window"):
        return best
    for other_key, tiles in FEW_BLOCKS.items():
        if other_key.head_dim == key.head_dim:
            pairs = makespan_of_few_blocks(tiles.block_q, tiles.block_kv, tiles.num_l2_heads, call)
            if pairs is not None and _OTHERS_COST * pairs < least:
                best, least = tiles, _OTHERS_COST * pairs
    return best


def _backward_tiles(form: Literal["fused", "split"], call: AttentionCall) -> MosaicBackwardTuning:
    """The nearest call's tiles.

    Blocks of keys that several heads of queries share are long, as in long rows.
    """
    table = FUSED if form == "fused" else SPLIT
    tiles = table[_nearest_key(table, call, packed=_is_packed(call))]
    return dataclasses.replace(tiles, persistent=tiles.persistent and call.group_size == 1)


def _wide_values(call: AttentionCall) -> int:
    """The values' head dim above 128, else 0: what was found for wide keys beside narrow values wasn't timed for it."""
    return call.value_dim if call.value_dim > MAX_EQUAL_HEAD_DIM else 0


def _is_packed(call: AttentionCall) -> bool:
    """True for documents, and for positions, which take as much shared memory as segment ids do."""
    return call.has_segment_ids or call.has_positions


def _nearest_key(table: Mapping[TunedCall, Any], call: AttentionCall, *, packed: bool, at_least: int = 0) -> TunedCall:
    """The next head dim from `at_least` on, if possible of the same family, and then of the nearest length."""
    tuned_call = TunedCall.of(call.mask, call.q_len, (call.head_dim, call.value_dim), packed=packed)
    head_dim = max(tuned_call.head_dim, at_least)
    family = tuned_call.family
    families = [family, *(["window"] if family == "narrow_window" else []), "causal"]

    def distance(key: TunedCall):
        differs = (key.family != each for each in families)
        length = tuned_call.length if key.family == family else call.q_len
        # Of two that are as near, the longer one.
        return key.head_dim, *differs, abs(math.log(key.length / length)), -key.length

    return min((key for key in table if key.head_dim >= head_dim), key=distance)
