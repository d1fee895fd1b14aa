"""Each step gives the same slice from slices as NumPy gives from the whole, and its inverse undoes it."""

from __future__ import annotations

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from layers.pretrained.mxfp4 import UnpackedTensor, with_unpacked_blocks
from layers.pretrained.safetensors_file import whole
from layers.pretrained.steps import Pattern, TensorRow, read_whole
from tests.layers.pretrained.samples import ArrayTensor, random_index

# A pattern, a parameter's shape, and how NumPy makes the parameter of the file's tensor.
PATTERNS = (
    ("W -> W", (5,), lambda x: x),
    ("F W -> W F", (5, 3), lambda x: x.T),
    ("(N H) W -> W N H", (5, 3, 4), lambda x: x.reshape(3, 4, 5).transpose(2, 0, 1)),
    ("W (N H) -> N H W", (3, 4, 5), lambda x: x.reshape(5, 3, 4).transpose(1, 2, 0)),
    ("(N H) -> N H", (3, 4), lambda x: x.reshape(3, 4)),
    ("E W F -> E W F", (2, 3, 4), lambda x: x),
)


@pytest.mark.parametrize(("pattern", "shape", "convert"), PATTERNS, ids=[pattern for pattern, *_ in PATTERNS])
def test_a_slice_of_a_pattern_is_read_from_a_slice(pattern, shape, convert, rng):
    row = TensorRow("tensor", "parameter", pattern)
    tensor = rng.standard_normal(Pattern(pattern).shape_in_file(shape))
    expected = convert(tensor)
    for _ in range(20):
        index = random_index(rng, shape)
        np.testing.assert_array_equal(
            row.read(ArrayTensor(tensor), 0, (shape,), index).transpose(row.order), expected[index]
        )
    np.testing.assert_array_equal(row.into_file([expected]), tensor)


@pytest.mark.parametrize(
    ("row", "shapes", "convert"),
    [
        (
            TensorRow("tensor", ("query", "key", "value"), "(N H) W -> W N H"),
            ((5, 4, 3), (5, 2, 3), (5, 2, 3)),
            lambda arrays: np.concatenate([x.reshape(5, -1).T for x in arrays]),
        ),
        (
            TensorRow("tensor", ("gate", "up"), "E W F -> E W F", join="interleaved", axis=2),
            ((2, 3, 4), (2, 3, 4)),
            lambda arrays: np.stack(arrays, -1).reshape(2, 3, 8),
        ),
    ],
    ids=["concatenated", "interleaved"],
)
def test_joined_parameters_are_parts_of_one_tensor(row, shapes, convert, rng):
    arrays = [rng.standard_normal(shape) for shape in shapes]
    tensor = row.into_file(arrays)
    np.testing.assert_array_equal(tensor, convert(arrays))
    assert row.shape_in_file(shapes) == tensor.shape
    for which, array in enumerate(arrays):
        for _ in range(20):
            index = random_index(rng, array.shape)
            part = row.read(ArrayTensor(tensor), which, shapes, index).transpose(row.order)
            np.testing.assert_array_equal(part, array[index])


def e2m1(bits: int) -> float:
    """A sign, two bits of exponent with bias 1, one of mantissa: OCP Microscaling Formats v1.0, 5.3.3."""
    sign, exponent, mantissa = -1.0 if bits & 8 else 1.0, (bits >> 1) & 3, bits & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks [expert, out, in / 32, 16] and their scales as float64 [expert, in, out], a value at a time."""
    values = np.empty((*scales.shape, 32))
    for place in np.ndindex(scales.shape):
        numbers = [e2m1(bits) for byte in blocks[place] for bits in (int(byte) & 15, int(byte) >> 4)]
        values[place] = np.array(numbers) * 2.0 ** (int(scales[place]) - 127)
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def test_mxfp4_values_are_those_of_the_standard(rng):
    blocks = rng.integers(0, 256, (2, 3, 2, 16)).astype(np.uint8)
    scales = rng.integers(0, 252, (2, 3, 2)).astype(np.uint8)
    expected = decode(blocks, scales)
    tensor = UnpackedTensor(ArrayTensor(blocks), ArrayTensor(scales))
    assert tensor.shape == expected.shape
    assert tensor.dtype == jnp.bfloat16
    np.testing.assert_array_equal(read_whole(tensor).astype(np.float64), expected)
    for _ in range(20):
        index = random_index(rng, expected.shape)
        np.testing.assert_array_equal(tensor.read(index).astype(np.float64), expected[index])


def test_every_mxfp4_byte_has_its_values_under_every_scale():
    # 16 blocks hold all bytes. 255 is no scale in the standard, and 252 to 254 take values past bfloat16's largest.
    scales = np.repeat(np.arange(255, dtype=np.uint8)[None, :, None], 16, axis=2)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (1, 255, 16, 16))
    expected = decode(blocks, scales)
    expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
    found = read_whole(UnpackedTensor(ArrayTensor(blocks), ArrayTensor(scales)))
    np.testing.assert_array_equal(found.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_interleaved_mxfp4_matrices_are_unpacked_one_at_a_time(rng):
    row = TensorRow("tensor", ("gate", "up"), "E W F -> E W F", join="interleaved", axis=2)
    blocks = rng.integers(0, 256, (3, 8, 2, 16)).astype(np.uint8)
    scales = rng.integers(100, 150, (3, 8, 2)).astype(np.uint8)
    tensor, expected, shapes = (
        UnpackedTensor(ArrayTensor(blocks), ArrayTensor(scales)),
        decode(blocks, scales),
        ((3, 64, 4),) * 2,
    )
    for which in range(2):
        for index in [whole((3, 64, 4)), *(random_index(rng, (3, 64, 4)) for _ in range(20))]:
            part = row.read(tensor, which, shapes, index)
            np.testing.assert_array_equal(part.astype(np.float64), expected[..., which::2][index])


def test_unpacking_mxfp4_takes_the_memory_of_its_values(rng):
    row = TensorRow("tensor", ("gate", "up"), "E W F -> E W F", join="interleaved", axis=2)
    blocks = rng.integers(0, 256, (8, 1024, 32, 16)).astype(np.uint8)
    tensor = UnpackedTensor(ArrayTensor(blocks), ArrayTensor(blocks[..., 0]))
    row.read(tensor, 0, ((8, 1024, 512),) * 2, (slice(0, 1),) * 3)  # makes the table
    tracemalloc.start()
    try:
        part = row.read(tensor, 0, ((8, 1024, 512),) * 2, whole((8, 1024, 512)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert part.nbytes == 8 * 1024 * 512 * 2
    assert peak < 1.25 * part.nbytes


def test_blocks_without_their_scales_are_refused():
    blocks, scales = ArrayTensor(np.zeros((1, 2, 3, 16), np.uint8)), ArrayTensor(np.zeros((1, 2, 3), np.uint8))
    unpacked = with_unpacked_blocks({"down_blocks": blocks, "down_scales": scales, "other": scales})
    assert set(unpacked) == {"down", "other"}
    assert unpacked["down"].read(whole((1, 96, 2))).shape == (1, 96, 2)
    with pytest.raises(ValueError, match="down_blocks, but not exactly one down_scales"):
        with_unpacked_blocks({"down_blocks": blocks})
    with pytest.raises(ValueError, match=r"expected \[E, N, B, 16\]"):
        with_unpacked_blocks({"down_blocks": blocks, "down_scales": blocks})
