"""JAX's splash attention with its lazy masks (`upstream`)."""

from __future__ import annotations

import functools

from kernels.backends.splash.upstream import attend, lazy_mask, unsupported_reason

__all__ = ["attention", "unsupported_reason"]

attention = functools.partial(attend, lazy_mask)
