"""Masks as pictures: a block map in text, or a PNG (the `plots` extra)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from kernels.masks.bounds import OF_QUERIES, Bounds, is_within
from kernels.masks.intervals import LAST_POSITION, TileKind, tile_kind

_SYMBOLS = np.array(["·", "▒", "█"])  # EMPTY, PARTIAL, FULL
# Without a closed form a drawing evaluates the mask on every pair.
_LONGEST_EVALUATED = 4096
# A wider picture has letters too small to read at the width of a page.
_MOST_COLUMNS = 2
_LEGEND = "█ full  ▒ partial  · empty"


class DrawnMask(Protocol):
    """A mask, as far as a drawing reads it: `kernels.masks.Mask` is one."""

    def __call__(self, q_pos: Any, kv_pos: Any) -> Any: ...

    @property
    def exact(self) -> bool: ...

    @property
    def num_heads(self) -> int | None: ...

    @property
    def largest_parameter(self) -> int: ...

    def distinct_heads(self, num_heads: int) -> Mapping[Any, list[int]]: ...

    def classify(self, q_lo: Any, q_hi: Any, kv_lo: Any, kv_hi: Any) -> Any: ...

    def count_allowed(self, q_lo: Any, q_hi: Any, kv_lo: Any, kv_hi: Any) -> tuple[Any, Any]: ...


class Panel(NamedTuple):
    """One mask of a picture.

    Attributes:
      title: above it.
      mask: of all heads.
      bounds: beside the mask, of one sequence.
    """

    title: str
    mask: DrawnMask
    bounds: Bounds | None = None


def block_map(
    mask: DrawnMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    bounds: Bounds | None = None,
    num_tiles: int = 16,
) -> str:
    """The mask as text: one character a tile, queries downwards, keys to the right.

    Args:
      mask: any mask; a `MultiHeadMask` gives one map per distinct mask.
      q_len, kv_len: lengths to draw, in tokens; by default four times the mask's largest parameter
        (at most 4,096 where the mask has no closed form), or those of the bounds.
      bounds: beside the mask, of one sequence. Every pair is evaluated.
      num_tiles: characters on the longer side.

    >>> from kernels import CausalMask, LocalMask
    >>> print(block_map(CausalMask() & LocalMask(3, 0), 16, num_tiles=4))
    ▒···
    ▒▒··
    ·▒▒·
    ··▒▒
    16 queries × 16 keys, 4×4 a tile: █ full  ▒ partial  · empty
    """
    for name, size in (("q_len", q_len), ("kv_len", kv_len), ("num_tiles", num_tiles)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if mask.num_heads is not None:
        maps = []
        for head, heads in mask.distinct_heads(mask.num_heads).items():
            of_head = block_map(head, q_len, kv_len, bounds=bounds, num_tiles=num_tiles)
            maps.append(f"head {', '.join(map(str, heads))}: {head!r}\n{of_head}")
        return "\n".join(maps)
    q_len, kv_len = _lengths(mask, bounds, q_len, kv_len, num_tiles)
    block = -(-max(q_len, kv_len) // num_tiles)
    lines = ["".join(row) for row in _SYMBOLS[_tile_kinds(mask, bounds, q_len, kv_len, block)]]
    return "\n".join([*lines, f"{q_len} queries × {kv_len} keys, {block}×{block} a tile: {_LEGEND}"])


def save_png(
    mask: DrawnMask,
    path: str | os.PathLike[str],
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    bounds: Bounds | None = None,
    num_tiles: int = 64,
) -> None:
    """Draws the mask's tiles into a PNG, one panel per distinct mask.

    Args:
      mask: any mask.
      path: file to write.
      q_len, kv_len: lengths to draw, in tokens; by default four times the mask's largest parameter
        (at most 4,096 where the mask has no closed form), or those of the bounds.
      bounds: beside the mask, of one sequence. Every pair is evaluated.
      num_tiles: tiles on the longer side.

    Raises:
      ModuleNotFoundError: without matplotlib, with what to install.
    """
    names = "" if bounds is None else f" with {', '.join(bounds.given)}"
    panels = [Panel(f"{each!r}{names}", each, bounds) for each in mask.distinct_heads(mask.num_heads or 1)]
    save_panels(panels, path, q_len, kv_len, num_tiles=num_tiles)


def save_panels(
    panels: Sequence[Panel],
    path: str | os.PathLike[str],
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    num_tiles: int = 64,
) -> None:
    """Draws several masks into one PNG. See `save_png`."""
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing a mask needs matplotlib: pip install -e '.[plots]' in the clone") from error

    num_columns = min(len(panels), _MOST_COLUMNS)
    num_lines = -(-len(panels) // num_columns)
    figure = Figure(figsize=(4.5 * num_columns, 4.5 * num_lines), layout="constrained")
    all_axes = figure.subplots(num_lines, num_columns, squeeze=False).ravel()
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, mask, bounds) in zip(all_axes, panels, strict=False):
        lengths = _lengths(mask, bounds, q_len, kv_len, num_tiles)
        block = -(-max(lengths) // num_tiles)
        tile_kinds = _tile_kinds(mask, bounds, *lengths, block)
        axes.imshow(
            tile_kinds,
            cmap=ListedColormap(["#f4f4f4", "#9ecae1", "#08519c"]),
            vmin=0,
            vmax=2,
            extent=(0, tile_kinds.shape[1] * block, tile_kinds.shape[0] * block, 0),
        )
        axes.set(xlabel="key position", ylabel="query position")
        num_visited = np.count_nonzero(tile_kinds != TileKind.EMPTY)
        axes.set_title(f"{title}\n{num_visited:,} of {tile_kinds.size:,} tiles visited", fontsize=9, wrap=True)
    figure.savefig(path, format="png", dpi=120)


def _lengths(
    mask: DrawnMask, bounds: Bounds | None, q_len: int | None, kv_len: int | None, num_tiles: int
) -> tuple[int, int]:
    for name in () if bounds is None else bounds.given:
        shape, given = np.shape(getattr(bounds, name)), q_len if name in OF_QUERIES else kv_len
        if len(shape) != 1 or given not in (None, *shape):
            raise ValueError(f"bounds.{name} must be of one sequence, [{given or 'length'}], got shape {shape}")
        q_len, kv_len = (*shape, kv_len) if name in OF_QUERIES else (q_len, *shape)
    natural = 4 * mask.largest_parameter
    if not mask.exact:
        natural = min(natural, _LONGEST_EVALUATED)
    natural = min(-(-natural // num_tiles) * num_tiles, LAST_POSITION + 1)
    q_len = q_len or kv_len or natural
    return q_len, kv_len or q_len


def _tile_kinds(mask: DrawnMask, bounds: Bounds | None, q_len: int, kv_len: int, block: int) -> np.ndarray:
    """`TileKind` of every tile, `[query tiles, key tiles]`: in closed form, and by evaluation where that is open."""
    if bounds is not None:
        rows = np.split(np.arange(q_len), range(block, q_len, block))
        return np.stack([_bounded_tile_kinds(mask, bounds, row, kv_len, block) for row in rows])
    q_lo, kv_lo = np.arange(0, q_len, block)[:, None], np.arange(0, kv_len, block)[None]
    q_hi, kv_hi = np.minimum(q_lo + block, q_len) - 1, np.minimum(kv_lo + block, kv_len) - 1
    corners = np.broadcast_arrays(q_lo, q_hi, kv_lo, kv_hi)
    with jax.ensure_compile_time_eval():
        tile_kinds = np.array(np.broadcast_to(np.asarray(mask.classify(*corners)), corners[0].shape))
    if not mask.exact:
        is_open = tile_kinds == TileKind.PARTIAL
        counts, areas = mask.count_allowed(*(corner[is_open] for corner in corners))
        tile_kinds[is_open] = tile_kind(counts > 0, counts == areas)
    return tile_kinds


def _bounded_tile_kinds(mask: DrawnMask, bounds: Bounds, row: np.ndarray, kv_len: int, block: int) -> np.ndarray:
    """`TileKind` of each tile of a row of tiles, by evaluation."""
    q, k = row[:, None], np.arange(kv_len)
    with jax.ensure_compile_time_eval():
        allowed = np.array(np.broadcast_to(np.asarray(mask(q, k)), (len(q), kv_len)))
    for name in bounds.given:
        bound = np.asarray(getattr(bounds, name))
        allowed &= is_within(name, k, bound[q]) if name in OF_QUERIES else is_within(name, q, bound)
    firsts = np.arange(0, kv_len, block)
    num_allowed = np.add.reduceat(allowed.sum(0), firsts)
    return tile_kind(num_allowed > 0, num_allowed == len(row) * np.diff(firsts, append=kv_len))
