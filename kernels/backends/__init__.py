"""The backends of attention and of decoding, in two literal tables: the only place that knows which exist.

Each table lists the fastest first for each platform. An entry imports its module when it is first asked about.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np

from flax_longcontext import require_ours
from kernels.masks import Mask
from kernels.tracing.mesh_axes import CHECK_VMA_REASON
from kernels.tracing.target import Target

# The distribution `kernels` on PyPI has a module of this name: installed over ours, it imports this folder for it.
require_ours("kernels", importer=__name__)

Task = Literal["attention", "decoding"]


class Call(Protocol):
    """The static description of a call, of either task, as far as the choice of a backend reads it."""

    @property
    def task(self) -> Task: ...

    @property
    def target(self) -> Target: ...

    @property
    def varying_axes(self) -> tuple[str, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def mask(self) -> Mask: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    @property
    def scale(self) -> float: ...


@dataclass(frozen=True)
class Backend:
    """An entry of a table.

    Attributes:
      name: what `implementation=` calls it.
      module: path within `kernels`. It has `unsupported_reason(call, tuning)`, whose tuning is None or the backend's
        own; it describes a kernel only if the tuning gives its tiles. For attention it has either
        `resolve(tuning, call)`, which leaves nothing of a tuning open, `fwd(inputs, call, tuning)` and
        `bwd(inputs, call, tuning, cotangent)`, or a function that JAX differentiates. For decoding it has
        `attend(inputs, call, tuning)`.
      platforms: where it runs.
      tuning: name of the class of its tuning objects; None if it has none.
      automatic: whether `implementation=None` may choose it.
      may_be_slower: whether the module has `slower_reason(call)`: why a backend further down is faster, or None.
      differentiable: name of its function of `(inputs, call)` that JAX differentiates; None if it has `fwd` and `bwd`.
      takes_masks_of_heads: whether one call of `fwd` and `bwd` serves heads with different masks.
      longest_tile: upper bound on `block_kv`, if `fwd` and `bwd` read at most one tile past `AttentionInputs.num_keys`;
        None if they may read every key.
      says_what_varies: whether `jax.shard_map` can check with `check_vma=True` over which mesh axes its outputs differ.
    """

    name: str
    module: str
    platforms: tuple[str, ...]
    tuning: str | None = None
    automatic: bool = True
    may_be_slower: bool = False
    differentiable: str | None = None
    takes_masks_of_heads: bool = False
    longest_tile: int | None = None
    says_what_varies: bool = False

    def load(self) -> ModuleType:
        """Imports the backend."""
        return importlib.import_module(f"kernels.{self.module}")

    def function(self) -> Callable[..., Any]:
        """The function of `(inputs, call)` that JAX differentiates."""
        assert self.differentiable is not None
        return getattr(self.load(), self.differentiable)

    def unsupported_reason(self, call: Call, tuning: Any = None) -> str | None:
        """Why the backend can't serve a call, or None if it can."""
        interpreted = getattr(tuning, "interpret", False)
        if call.target.platform not in self.platforms and not interpreted:
            return f"runs on {', '.join(self.platforms)}, not on {call.target.platform}"
        if call.varying_axes and not self.says_what_varies:
            return CHECK_VMA_REASON
        return self.load().unsupported_reason(call, tuning)

    def passed_over_reason(self, call: Call) -> str | None:
        """Why `implementation=None` doesn't choose the backend for a call, or None if it may."""
        reason = self.unsupported_reason(call)
        return self.load().slower_reason(call) if reason is None and self.may_be_slower else reason


_ALL = ("cpu", "gpu", "tpu")

BACKENDS = (
    Backend("splash", "backends.splash", ("tpu",), "SplashTuning", takes_masks_of_heads=True),
    Backend("mosaic_gpu", "backends.mosaic_gpu", ("gpu",), "MosaicGpuTuning", longest_tile=256),
    Backend("cudnn", "backends.cudnn", ("gpu",), differentiable="attention"),
    Backend("triton", "backends.triton", ("gpu",), "TritonTuning"),
    Backend("blockwise", "backends.blockwise", _ALL, "BlockwiseTuning", says_what_varies=True),
    Backend(
        "reference", "backends.reference", _ALL, automatic=False, differentiable="attention", says_what_varies=True
    ),
)

DECODE_BACKENDS = (
    Backend("dense", "decode.dense", _ALL, may_be_slower=True, says_what_varies=True),
    Backend("triton", "decode.triton", ("gpu",), "TritonDecodeTuning"),
    Backend("blockwise", "decode.blockwise", _ALL, says_what_varies=True),
)

TABLES: dict[Task, tuple[Backend, ...]] = {"attention": BACKENDS, "decoding": DECODE_BACKENDS}


def find_backend(implementation: Any, task: Task, argument: str = "implementation") -> Backend:
    """The backend of a task that a name or a tuning object asks for; ValueError, by the `argument`'s name, if none."""
    for backend in TABLES[task]:
        if implementation == backend.name or type(implementation).__name__ == backend.tuning:
            return backend
    names = [backend.name for backend in TABLES[task]]
    tunings = [backend.tuning for backend in TABLES[task] if backend.tuning is not None]
    near = difflib.get_close_matches(str(implementation), names, n=1)
    raise ValueError(
        f"{argument}={implementation!r} is no backend of {task}; expected one of {', '.join(names)}, a tuning object "
        f"({', '.join(tunings)}), or None for the fastest that serves the call"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )
