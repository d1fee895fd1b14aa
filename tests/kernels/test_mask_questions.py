"""A mask's answers about itself, against the pairs that it allows; and no caller asks for a mask's class."""

import ast
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import kernels.masks
from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    Mask,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    SplashTuning,
    dot_product_attention,
)
from tests.kernels.mask_strategies import any_masks

LENGTH = 150
MASK_CLASSES = {name for name in kernels.masks.__all__ if name.endswith("Mask") or name == "MaskFn"} - {"Mask"}
ROOT = Path(__file__).parents[2]


def allowed_pairs(mask):
    positions = np.arange(LENGTH)
    return np.broadcast_to(mask(positions[:, None], positions[None]), (LENGTH, LENGTH))


@given(mask=any_masks)
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_row_intervals_are_the_keys_of_each_query(xp, mask):
    positions = xp.arange(LENGTH, dtype=xp.int32)
    interval = mask.row_interval(positions)
    assert mask.has_row_intervals == (interval is not None)
    if interval is None:
        return
    first, last = (np.asarray(side) for side in interval)
    assert first.dtype == last.dtype == np.int32
    keys = np.arange(LENGTH)
    np.testing.assert_array_equal((first[:, None] <= keys) & (keys <= last[:, None]), allowed_pairs(mask))
    kept = first <= last
    assert (np.diff(first[kept]) >= 0).all()
    assert (np.diff(last[kept]) >= 0).all()


@given(mask=any_masks)
def test_lookback_and_looking_ahead_bound_every_pair(mask):
    q, kv = np.nonzero(allowed_pairs(mask))
    if mask.lookback is not None:
        assert (q - kv <= mask.lookback).all()
    if not mask.looks_ahead:
        assert (kv <= q).all()


@given(mask=any_masks)
def test_shapes_say_which_pairs_are_allowed(mask):
    pairs, positions = allowed_pairs(mask), np.arange(LENGTH)
    distance = positions[None] - positions[:, None]
    if mask.allows_all:
        assert pairs.all()
    if mask.window is not None:
        left, right = (LENGTH if side is None else side for side in mask.window)
        np.testing.assert_array_equal(pairs, (-left <= distance) & (distance <= right))
    if mask.causal_chunk_size is not None:
        chunk = positions // mask.causal_chunk_size
        np.testing.assert_array_equal(pairs, (distance <= 0) & (chunk[:, None] == chunk))
    if mask.same_keys_for_all_queries:
        assert (pairs == pairs[0]).all()


@pytest.mark.parametrize(
    ("mask", "question", "answer"),
    [
        (CausalMask() & LocalMask(5, None), "window", (5, 0)),
        (LocalMask(2**40, 0), "window", (None, 0)),
        (CausalMask() & PrefixMask(9), "window", None),
        (LocalMask(None, 2**31 - 1), "allows_all", True),
        (ChunkedCausalMask(8), "causal_chunk_size", 8),
        (ChunkedCausalMask(8) & LocalMask(3, 0), "causal_chunk_size", None),
        (PrefixMask(9), "same_keys_for_all_queries", True),
        (CausalMask(), "same_keys_for_all_queries", False),
        (CausalMask() | PrefixMask(9), "has_row_intervals", True),
        (CausalMask() | LocalMask(3, 3), "has_row_intervals", False),
        (ChunkedCausalMask(64) & LocalMask(9, 0), "lookback", 9),
        (CausalMask() & NumpyMask(np.ones((3, 3), bool)), "lookback", None),
        (ChunkedCausalMask(64) | LocalMask(9, 0), "lookback", 63),
        (CausalMask() & NumpyMask(np.ones((3, 3), bool)), "looks_ahead", False),
        (CausalMask() | ~CausalMask(), "looks_ahead", True),
        (CausalMask() & NumpyMask(np.ones((3, 3), bool)), "needs_lookup", True),
        (CausalMask() & LocalMask(9, 0), "needs_lookup", False),
        (MultiHeadMask([ChunkedCausalMask(64), LocalMask(9, 0)]), "lookback", 63),
        (MultiHeadMask([CausalMask(), ~CausalMask()]), "has_row_intervals", False),
        (LocalMask(3, 2**40) & CausalMask(-17), "largest_parameter", 17),
    ],
    ids=str,
)
def test_answers(mask, question, answer):
    assert getattr(mask, question) == answer


def test_heads_share_equal_masks():
    mask = MultiHeadMask([CausalMask(), FullMask(), CausalMask()])
    assert mask.for_each_head(3) == (CausalMask(), FullMask(), CausalMask())
    assert mask.distinct_heads(3) == {CausalMask(): [0, 2], FullMask(): [1]}
    assert CausalMask().for_each_head(2) == (CausalMask(), CausalMask())
    with pytest.raises(ValueError, match="has 3 masks for num_heads=4 query heads; give one per head"):
        mask.for_each_head(4)


@dataclass(frozen=True)
class DilatedMask(Mask):
    """Every `stride`-th key up to the query: the class that somebody adds, and all that they write."""

    stride: int

    def __call__(self, q_pos, kv_pos):
        return (kv_pos <= q_pos) & ((q_pos - kv_pos) % self.stride == 0)


@pytest.mark.parametrize("tuning", ["blockwise", SplashTuning.square(128, interpret=True)], ids=["blockwise", "splash"])
def test_a_new_mask_is_one_class(rng, tuning):
    query, key, value = rng.standard_normal((3, 1, 200, 2, 16), np.float32)
    mask = DilatedMask(3) & LocalMask(100, 0)
    q_pos, kv_pos = np.arange(200)[:, None], np.arange(200)
    pairs = (kv_pos <= q_pos) & ((q_pos - kv_pos) % 3 == 0) & (q_pos - kv_pos <= 100)
    logits = np.where(pairs, np.einsum("btnh,bsnh->bnts", query, key, dtype=np.float64) / 4, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), value)
    output = dot_product_attention(query, key, value, mask, implementation=tuning)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    assert (mask.lookback, mask.looks_ahead, mask.has_row_intervals) == (100, False, False)


@dataclass(frozen=True)
class EveryOtherRow(Mask):
    """A mask that somebody adds, and that asks another one: no composition of ours."""

    inner: Mask

    def __call__(self, q_pos, kv_pos):
        return self.inner(q_pos, kv_pos) & (q_pos % 2 == 0)


def test_nothing_is_taken_for_granted_of_a_mask_within_a_new_one():
    mask = EveryOtherRow(CausalMask() & LocalMask(3, 0))
    assert mask.parts == ()
    assert not mask.translation_invariant
    assert (mask.lookback, mask.looks_ahead, mask.has_row_intervals) == (None, True, False)
    assert (EveryOtherRow(CausalMask()) | CausalMask()).parts == (EveryOtherRow(CausalMask()), CausalMask())


def questions_of_class(tree):
    """Where code asks which class a mask is, or for its closed form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "band":
            yield node.lineno, ".band"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
            asked = {name.id for argument in node.args[1:] for name in ast.walk(argument) if isinstance(name, ast.Name)}
            yield from ((node.lineno, f"isinstance {name}") for name in sorted(asked & MASK_CLASSES))
        if isinstance(node, ast.Compare):
            compared = {ast.unparse(side) for side in node.comparators if "type(" in ast.unparse(node.left)}
            yield from ((node.lineno, f"type is {name}") for name in sorted(compared & MASK_CLASSES))
        if isinstance(node, ast.MatchClass) and ast.unparse(node.cls) in MASK_CLASSES:
            yield node.lineno, f"case {ast.unparse(node.cls)}"


def test_nobody_asks_which_class_a_mask_is():
    files = [
        path
        for package in ("kernels", "layers", "trainer", "experiments")
        for path in (ROOT / package).rglob("*.py")
        if ROOT / "kernels" / "masks" not in path.parents
    ]
    assert len(files) > 150
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in questions_of_class(ast.parse(path.read_text()))
    ]
    assert not found, "ask a method of Mask; see kernels/masks/algebra.py"


def test_such_a_question_would_be_found():
    source = """
if isinstance(mask, (FullMask, int)) or type(mask) is CausalMask:
    mask.band
match mask:
    case LocalMask(left=left):
        pass
"""
    assert {what for _, what in questions_of_class(ast.parse(source))} == {
        "isinstance FullMask",
        "type is CausalMask",
        ".band",
        "case LocalMask",
    }
