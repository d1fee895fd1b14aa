"""JAX's TPU splash attention, fed by our block plan: the mask costs no compile time, at any length.

The plan says in closed form which tiles each of the three passes visits, and the mask's own predicate is traced into
the kernel, so no tile of any mask is evaluated ahead of time or kept in memory. The exceptions look positions up in
arrays, a `NumpyMask` and a `MaskFn` that captures some: their PARTIAL tiles are. Packed documents skip the tiles
between documents, too, which upstream's kernel doesn't.
"""

from __future__ import annotations

from kernels.backends.splash.passes import bwd, fwd
from kernels.backends.splash.support import unsupported_reason
from kernels.backends.splash.tuning import resolve

__all__ = ["bwd", "fwd", "resolve", "unsupported_reason"]
