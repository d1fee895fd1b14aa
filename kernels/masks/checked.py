"""The mask of a call, checked."""

from __future__ import annotations

from kernels.masks.algebra import Mask
from kernels.masks.shapes import FullMask


def checked_mask(mask: Mask | None, num_heads: int) -> Mask:
    """The mask that a call of `num_heads` query heads means: `FullMask` for None, one mask where all heads agree.

    Raises:
      ValueError: it isn't a mask, is for another number of heads, or its functions can't be evaluated on devices.
    """
    if mask is None:
        return FullMask()
    require_mask(mask)
    distinct = mask.distinct_heads(num_heads)
    mask.check_functions()
    return next(iter(distinct)) if len(distinct) == 1 else mask


def require_mask(mask: object) -> None:
    """Checks that an argument is a mask.

    Raises:
      ValueError: it isn't, with what to use.
    """
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask must be a kernels.Mask such as CausalMask(), got {type(mask).__name__}; "
            "wrap a dense boolean array in NumpyMask"
        )
