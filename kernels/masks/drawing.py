"""Masks as pictures: a block map in text, or a PNG (the `plots` extra)."""

from __future__ import annotations

import os

import numpy as np

from kernels.block_plan import make_block_plan
from kernels.intervals import LAST_POSITION
from kernels.masks import Mask, MultiHeadMask, largest_parameter

_SYMBOLS = np.array(["·", "▒", "█"])  # EMPTY, PARTIAL, FULL
# Without a closed form a drawing evaluates the mask on every pair.
_LONGEST_EVALUATED = 4096
_LEGEND = "█ full  ▒ partial  · empty"


def block_map(mask: Mask, q_len: int | None = None, kv_len: int | None = None, *, num_tiles: int = 16) -> str:
    """The mask as text: one character a tile, queries downwards, keys to the right.

    Args:
      mask: any mask; a `MultiHeadMask` gives one map per distinct mask.
      q_len, kv_len: lengths to draw, in tokens; by default four times the mask's largest parameter
        (at most 4,096 where the mask has no closed form).
      num_tiles: characters on the longer side.

    >>> from kernels import CausalMask, LocalMask
    >>> print(block_map(CausalMask() & LocalMask(3, 0), 16, num_tiles=4))
    ▒···
    ▒▒··
    ·▒▒·
    ··▒▒
    16 queries × 16 keys, 4×4 a tile: █ full  ▒ partial  · empty
    """
    if isinstance(mask, MultiHeadMask):
        maps = []
        for distinct in dict.fromkeys(mask.masks):
            heads = ", ".join(str(head) for head, other in enumerate(mask.masks) if other == distinct)
            maps.append(f"head {heads}: {distinct!r}\n{block_map(distinct, q_len, kv_len, num_tiles=num_tiles)}")
        return "\n".join(maps)
    q_len, kv_len = _lengths(mask, q_len, kv_len, num_tiles)
    block = -(-max(q_len, kv_len) // num_tiles)
    lines = ["".join(row) for row in _SYMBOLS[make_block_plan(mask, q_len, kv_len, block, block).kinds()]]
    return "\n".join([*lines, f"{q_len} queries × {kv_len} keys, {block}×{block} a tile: {_LEGEND}"])


def save_png(
    mask: Mask,
    path: str | os.PathLike[str],
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    num_tiles: int = 64,
) -> None:
    """Draws the mask's tiles into a PNG, one panel per distinct mask.

    Args:
      mask: any mask.
      path: file to write.
      q_len, kv_len: lengths to draw, in tokens; by default four times the mask's largest parameter
        (at most 4,096 where the mask has no closed form).
      num_tiles: tiles on the longer side.

    Raises:
      ModuleNotFoundError: without matplotlib, with what to install.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing a mask needs matplotlib: pip install 'flax-longcontext[plots]'") from error

    distinct = list(dict.fromkeys(mask.masks)) if isinstance(mask, MultiHeadMask) else [mask]
    figure = Figure(figsize=(5 * len(distinct), 5), layout="constrained")
    for axes, each in zip(figure.subplots(1, len(distinct), squeeze=False)[0], distinct, strict=True):
        rows, cols = _lengths(each, q_len, kv_len, num_tiles)
        block = -(-max(rows, cols) // num_tiles)
        plan = make_block_plan(each, rows, cols, block, block)
        axes.imshow(
            plan.kinds(),
            cmap=ListedColormap(["#f4f4f4", "#9ecae1", "#08519c"]),
            vmin=0,
            vmax=2,
            extent=(0, plan.num_cols * block, plan.num_rows * block, 0),
        )
        axes.set(xlabel="key position", ylabel="query position")
        axes.set_title(f"{each!r}\n{plan.num_visited:,} of {plan.num_tiles:,} tiles visited", fontsize=9, wrap=True)
    figure.savefig(path, format="png", dpi=120)


def _lengths(mask: Mask, q_len: int | None, kv_len: int | None, num_tiles: int) -> tuple[int, int]:
    natural = 4 * largest_parameter(mask)
    if not mask.exact:
        natural = min(natural, _LONGEST_EVALUATED)
    natural = min(-(-natural // num_tiles) * num_tiles, LAST_POSITION + 1)
    q_len = q_len or kv_len or natural
    return q_len, kv_len or q_len
