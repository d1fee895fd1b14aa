"""Masks as pictures."""

import pytest

from kernels import CausalMask, LocalMask, MultiHeadMask
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


def test_png(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots extra isn't installed")
    sizes = []
    for num_masks in (1, 2, 3):
        path = tmp_path / f"{num_masks}.png"
        save_png(MultiHeadMask([LocalMask(100 * (i + 1), 0) for i in range(num_masks)]), path, 4096)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        sizes.append(tuple(int.from_bytes(content[at : at + 4]) for at in (16, 20)))
    # Two panels in a line at most: a page shrinks wider pictures until nobody can read them.
    assert sizes == [(540, 540), (1080, 540), (1080, 1080)]
