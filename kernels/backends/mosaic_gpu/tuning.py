"""How the Hopper kernels run: tuning objects, and the best ones known for a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

from kernels.backends.mosaic_gpu import tuned
from kernels.call import AttentionCall
from kernels.masks import Mask

_T = TypeVar("_T")
CallFamily = Literal["full", "causal", "window", "packed", "other"]


class _Warpgroups:
    """Warpgroups of a `mosaic_gpu` kernel: some compute, one more loads, and gives them most of its registers."""

    num_warpgroups: int

    def _check_warpgroups(self) -> None:
        if self.num_warpgroups not in (1, 2, 3):
            raise ValueError(f"num_warpgroups={self.num_warpgroups} must be 1, 2 or 3")

    @property
    def compute_registers(self) -> int:
        """Registers of a computing thread, of the multiprocessor's 65,536."""
        return {1: 240, 2: 240, 3: 160}[self.num_warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers of a loading thread."""
        return {1: 40, 2: 24, 3: 32}[self.num_warpgroups]


@dataclass(frozen=True)
class MosaicForwardTuning(_Warpgroups):
    """How the `mosaic_gpu` forward kernel runs.

    Attributes:
      num_warpgroups: warpgroups that compute, each on 64 query rows; one more loads. Three have registers for tiles of
        64 keys; with larger ones they spill, to several times the time.
      block_kv: keys in a tile: 64, 128, 192 or 256.
      num_stages: key/value tiles in shared memory.
      take_turns: whether warpgroups issue their matmuls by turns.
      persistent: whether as many programs as the GPU has multiprocessors take one block after another, whichever is
        next when they are done with one, and load its first tiles while the one before ends: for short rows; for head
        dims up to 128. Else each block has a program of its own.
      heads_at_once: key/value heads, of all elements of the batch, whose queries' blocks are made before any other's:
        so few that many blocks read the same keys and values at a time, from the L2 cache.

    Raises:
      ValueError: a value out of range.
    """

    num_warpgroups: int = 2
    block_kv: int = 128
    num_stages: int = 2
    take_turns: bool = True
    persistent: bool = False
    heads_at_once: int = 24

    def __post_init__(self):
        self._check_warpgroups()
        if self.block_kv not in (64, 128, 192, 256):
            raise ValueError(f"block_kv={self.block_kv} must be 64, 128, 192 or 256")
        _require_positive(num_stages=self.num_stages, heads_at_once=self.heads_at_once)

    @property
    def block_q(self) -> int:
        """Query rows of a block."""
        return 64 * self.num_warpgroups


@dataclass(frozen=True)
class MosaicBackwardTuning(_Warpgroups):
    """How the `mosaic_gpu` backward kernels cut their work up.

    Attributes:
      num_warpgroups: warpgroups that compute; one more loads. The pass for dK and dV (and dQ, if fused) gives each
        64 keys, the pass for dQ alone 64 query rows.
      block_q: query rows in a tile of the pass for dK and dV, 64 or 128.
      num_stages: such tiles in shared memory.
      one_gradient_each: two warpgroups share 64 keys, and one makes dV, the other dK: above a head dim of 128 one
        warpgroup's registers don't hold both. Not for a fused backward.
      block_kv_dq, num_stages_dq: keys in a tile of the pass for dQ alone, and such tiles in shared memory (with
        one_gradient_each, of values one fewer).
      heads_at_once: key/value heads, of all elements of the batch, whose blocks are made before any other's: so few
        that many blocks of each run at a time, and read its queries, and add to their dQ, in the L2 cache.

    Raises:
      ValueError: a value out of range.
    """

    num_warpgroups: int = 2
    block_q: int = 64
    num_stages: int = 2
    one_gradient_each: bool = False
    block_kv_dq: int = 64
    num_stages_dq: int = 2
    heads_at_once: int = 24

    def __post_init__(self):
        self._check_warpgroups()
        if self.one_gradient_each and (self.num_warpgroups != 2 or self.num_stages < 2):
            raise ValueError(
                "one_gradient_each takes num_warpgroups=2 and num_stages of at least 2, not "
                f"{self.num_warpgroups} and {self.num_stages}"
            )
        for name in ("block_q", "block_kv_dq"):
            if getattr(self, name) not in (64, 128):
                raise ValueError(f"{name}={getattr(self, name)} must be 64 or 128")
        _require_positive(
            num_stages=self.num_stages, num_stages_dq=self.num_stages_dq, heads_at_once=self.heads_at_once
        )

    @property
    def block_kv(self) -> int:
        """Keys of a block of the pass for dK and dV."""
        return 64 if self.one_gradient_each else 64 * self.num_warpgroups

    @property
    def divides_dq_by_columns(self) -> bool:
        """Whether the warpgroups of a fused backward share a tile of dQ by columns: it has too few rows."""
        return self.block_q < 64 * self.num_warpgroups

    @property
    def block_q_dq(self) -> int:
        """Query rows of a block of the pass for dQ alone."""
        return 64 * self.num_warpgroups


@dataclass(frozen=True)
class MosaicGpuTuning:
    """How the `mosaic_gpu` backend runs.

    Attributes:
      backward: "fused": one kernel for all gradients, which adds up dQ in an order that differs from run to run; for
        head dims up to 128. "split": one for dK and dV, one for dQ; the same bits in every run. None: the faster one.
      forward_tiles, backward_tiles: how the kernels cut the work up; None for the best known for the call.
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
        if self.interpret and self.backward == "fused":
            raise ValueError("Pallas's interpreter can't add to memory as backward='fused' does; use backward='split'")
        tiles = self.backward_tiles
        if tiles is not None and self.backward == "fused" and tiles.one_gradient_each:
            raise ValueError("backward='fused' can't take backward_tiles with one_gradient_each; use backward='split'")
        may_fuse = self.backward != "split" and not self.interpret
        if tiles is not None and may_fuse and not tiles.one_gradient_each:
            # Its warpgroups share a tile of dQ by 64 rows, or two of them by columns.
            shared = (tiles.num_warpgroups, tiles.block_q)
            if shared not in ((1, 64), (2, 64), (2, 128)):
                raise ValueError(
                    "backward_tiles of a fused backward are (num_warpgroups, block_q) = (1, 64), (2, 64) or (2, 128), "
                    f"not {shared}; choose one of these, or backward='split'"
                )


def _require_positive(**settings: int) -> None:
    for name, setting in settings.items():
        if setting < 1:
            raise ValueError(f"{name}={setting} must be at least 1")


class TunedCall(NamedTuple):
    """What calls are tuned by: the wider head dim, what the mask leaves out, and the queries' length in tokens."""

    head_dim: int
    family: CallFamily
    length: int


def call_family(mask: Mask, *, packed: bool) -> CallFamily:
    """What a mask, and documents where `packed`, leave out.

    >>> from kernels import CausalMask, LocalMask
    >>> call_family(CausalMask() & LocalMask(1023, 0), packed=False)
    'window'
    """
    if packed:
        return "packed"
    if mask.allows_all:
        return "full"
    if mask.window is None or mask.window[1] != 0:
        return "other"
    return "causal" if mask.window[0] is None else "window"


FORWARD = {TunedCall(*key): MosaicForwardTuning(*fields) for key, fields in tuned.FORWARD.items()}
FUSED = {TunedCall(*key): MosaicBackwardTuning(*fields) for key, fields in tuned.FUSED.items()}
SPLIT = {TunedCall(*key): MosaicBackwardTuning(*fields) for key, fields in tuned.SPLIT.items()}
FASTEST_BACKWARD = {TunedCall(*key): form for key, form in tuned.FASTEST_BACKWARD.items()}
"""The best tunings found: of the forward, of both backwards, and the faster one of these."""


def resolve(tuning: MosaicGpuTuning | None, call: AttentionCall) -> MosaicGpuTuning:
    """Settles what a tuning leaves open. Pallas's interpreter, which has no atomics, can't run a fused backward."""
    tuning = tuning or MosaicGpuTuning()
    backward = "split" if tuning.interpret else tuning.backward or fastest_backward(call)
    return dataclasses.replace(
        tuning,
        backward=backward,
        forward_tiles=tuning.forward_tiles or forward_tiles(call),
        backward_tiles=tuning.backward_tiles or backward_tiles(call, backward),
    )


def forward_tiles(call: AttentionCall) -> MosaicForwardTuning:
    """The forward's tiles of a call."""
    return _likest(FORWARD, call)


def fastest_backward(call: AttentionCall) -> Literal["fused", "split"]:
    """The backward's faster form."""
    return _likest(FASTEST_BACKWARD, call)


def backward_tiles(call: AttentionCall, backward: Literal["fused", "split"] | None = None) -> MosaicBackwardTuning:
    """The backward's tiles of a call, in a form or in the faster one."""
    fused = (backward or fastest_backward(call)) == "fused"
    return _likest(FUSED if fused else SPLIT, call)


def _likest(table: Mapping[TunedCall, _T], call: AttentionCall) -> _T:
    """The row of the next head dim, if possible with the same kind of mask, and then of the nearest length."""
    widest = max(call.head_dim, call.value_dim)
    # Positions come beside the keys as segment ids do: in what packed documents leave of shared memory.
    family = call_family(call.mask, packed=call.has_segment_ids or call.has_positions)

    def unlikeness(key: TunedCall):
        return key.head_dim, key.family != family, key.family != "causal", abs(math.log(key.length / call.q_len))

    return table[min((key for key in table if key.head_dim >= widest), key=unlikeness)]
