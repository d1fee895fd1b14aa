"""The masks that are compiled, and where a kernel has them from."""

from __future__ import annotations

from typing import Literal

from kernels import CausalMask, LocalMask, Mask, MultiHeadMask, PrefixMask, parse_mask

Source = Literal["dense", "upstream_lazy", "ours"]

WINDOW = CausalMask() & LocalMask(4095, 0)
# And "two_masks": causal and window_4096 in turn over the heads.
MASKS: dict[str, Mask] = {"causal": CausalMask(), "window_4096": WINDOW, "prefix_1024": CausalMask() | PrefixMask(1024)}


def read_mask(text: str, num_heads: int) -> Mask:
    """A mask by its name, or as Python writes it.

    Raises:
      ValueError: it is neither.
    """
    if text == "two_masks":
        return MultiHeadMask([CausalMask() if head % 2 == 0 else WINDOW for head in range(num_heads)])
    return MASKS[text] if text in MASKS else parse_mask(text)


def our_implementation(platform: str) -> str:
    """The attention backend that is timed on a platform."""
    return "splash" if platform == "tpu" else "blockwise"
