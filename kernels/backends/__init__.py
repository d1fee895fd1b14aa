"""The backends, in one literal table: the only place that knows which exist.

Listed fastest first for each platform; a row imports its module when it is first asked about.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from flax_longcontext import require_ours
from kernels.call import AttentionCall
from kernels.tuning import Tuning
from kernels.varying import CHECK_VMA_REASON

# The distribution `kernels` on PyPI has a module of this name: installed over ours, it imports this folder for it.
require_ours("kernels", importer=__name__)


@dataclass(frozen=True)
class Backend:
    """A row of the table.

    Attributes:
      name: what `implementation=` calls it.
      module: has `unsupported_reason(call, tuning)`, whose tuning is None or the backend's own, and either
        `resolve(tuning, call)`, which leaves nothing of a tuning open, and the two halves that `kernels.attention.core`
        describes, or `attention(inputs, call)`.
      platforms: where it runs.
      automatic: whether `implementation=None` may choose it.
      differentiates_itself: whether it has `attention`, which JAX differentiates.
      takes_masks_of_heads: whether one call of its halves serves heads with different masks.
      says_what_varies: whether `jax.shard_map` can check with `check_vma=True` over which mesh axes its outputs differ.
    """

    name: str
    module: str
    platforms: tuple[str, ...]
    automatic: bool = True
    differentiates_itself: bool = False
    takes_masks_of_heads: bool = False
    says_what_varies: bool = False

    def load(self) -> ModuleType:
        """Imports the backend."""
        return importlib.import_module(self.module)

    def unsupported_reason(self, call: AttentionCall, tuning: Tuning | None = None) -> str | None:
        """Why the backend can't serve a call, or None if it can."""
        interpreted = getattr(tuning, "interpret", False)
        if call.target.platform not in self.platforms and not interpreted:
            return f"runs on {', '.join(self.platforms)}, not on {call.target.platform}"
        if call.varying_axes and not self.says_what_varies:
            return CHECK_VMA_REASON
        return self.load().unsupported_reason(call, tuning)


BACKENDS = (
    Backend("splash", "kernels.backends.splash", platforms=("tpu",), takes_masks_of_heads=True),
    Backend("mosaic_gpu", "kernels.backends.mosaic_gpu", platforms=("gpu",)),
    Backend("cudnn", "kernels.backends.cudnn", platforms=("gpu",), differentiates_itself=True),
    Backend("triton", "kernels.backends.triton", platforms=("gpu",)),
    Backend("blockwise", "kernels.backends.blockwise", platforms=("cpu", "gpu", "tpu"), says_what_varies=True),
    Backend(
        "reference",
        "kernels.backends.reference",
        platforms=("cpu", "gpu", "tpu"),
        automatic=False,
        differentiates_itself=True,
        says_what_varies=True,
    ),
    Backend(
        "splash_upstream_lazy",
        "kernels.backends.splash.upstream_lazy",
        platforms=("tpu",),
        automatic=False,
        takes_masks_of_heads=True,
    ),
    Backend(
        "splash_dense", "kernels.backends.splash.dense", platforms=("tpu",), automatic=False, takes_masks_of_heads=True
    ),
)
