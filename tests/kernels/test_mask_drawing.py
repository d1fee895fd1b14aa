"""Masks as pictures."""

import numpy as np
import pytest

from kernels import Bounds, CausalMask, FullMask, LocalMask, MultiHeadMask, tree_bounds_of_ends, window_bounds
from kernels.masks.drawing import block_map, save_png


def test_a_mask_prints_as_its_block_map():
    text = str(CausalMask() & LocalMask(15, 0))
    assert text.startswith("CausalMask(offset=0) & LocalMask(left=15, right=0)\n")
    rows = text.splitlines()[1:-1]
    assert len(rows) == 16
    assert rows[0] == "▒" + "·" * 15
    assert rows[-1] == "·" * 11 + "▒███▒"


def test_each_distinct_head_is_drawn_once():
    text = block_map(MultiHeadMask([CausalMask(), LocalMask(0, 0), CausalMask()]), 8, num_tiles=2)
    assert text.count("head 0, 2: CausalMask(offset=0)\n▒·\n█▒\n") == 1
    assert text.count("head 1: LocalMask(left=0, right=0)\n▒·\n·▒\n") == 1


def test_bounds_are_drawn_beside_the_mask():
    tree = tree_bounds_of_ends(np.array([12] * 4 + [8] * 4 + [12] * 4))
    assert block_map(CausalMask(), bounds=tree, num_tiles=3).startswith("▒··\n█▒·\n█·▒\n12 queries × 12 keys")
    # Two PARTIAL tiles that share no pair, and ragged ones at the ends.
    assert (
        block_map(LocalMask(0, 0), bounds=Bounds(k_start=np.arange(10) + 1), num_tiles=3).count("▒") == 1
    )  # the legend
    heads = block_map(MultiHeadMask([FullMask(), CausalMask()]), 7, 5, bounds=Bounds(k_end=np.full(7, 2)), num_tiles=4)
    assert "FullMask()\n█··\n" in heads
    assert "CausalMask(offset=0)\n▒··\n█··\n" in heads
    for bounds, q_len in ((window_bounds(np.array([2, 3]), 9), None), (window_bounds(2, 9), 8)):
        with pytest.raises(
            ValueError, match=r"bounds.k_start must be of one sequence, \[\w+\], got shape \((2, )?9,?\)"
        ):
            block_map(FullMask(), q_len, bounds=bounds)


def test_png(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots extra isn't installed")
    sizes = []
    for num_masks in (1, 2, 3):
        path = tmp_path / f"{num_masks}.png"
        save_png(MultiHeadMask([LocalMask(100 * (i + 1), 0) for i in range(num_masks)]), path, 4096)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        sizes.append(tuple(int.from_bytes(content[at : at + 4]) for at in (16, 20)))
    save_png(CausalMask(), path, bounds=window_bounds(9, 100))
    assert path.read_bytes() != content
    # Two panels in a line at most: a page shrinks wider pictures until nobody can read them.
    assert sizes == [(540, 540), (1080, 540), (1080, 1080)]
