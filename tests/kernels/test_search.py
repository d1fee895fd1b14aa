"""The first and the last column in a range that a row is looking for, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.plan.search import search

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def draw(rng, num_kinds, num_columns, num_rows):
    """Values, thresholds and ranges of a batch of two: some ranges are empty, some numbers int32's ends."""
    highest = int(rng.choice([2, 10, MOST]))
    values, thresholds = (
        rng.integers(-highest - 1, highest, (num_kinds, 2, length), np.int32, endpoint=True)
        for length in (num_columns, num_rows)
    )
    for numbers in (values, thresholds):
        numbers[rng.random(numbers.shape) < 0.05] = rng.choice([LEAST, MOST])
    start, stop = rng.integers(0, num_columns, (2, 2, num_rows), np.int32, endpoint=True)
    return values, thresholds, start, stop


def wanted(values, thresholds, start, stop, above):
    """Whether each row is looking for each column, [B, R, C]."""
    compare = np.greater if above else np.greater_equal
    is_met = compare(values[:, :, None, :], thresholds[..., None]).all(0)
    columns = np.arange(values.shape[-1])
    return is_met & (start[..., None] <= columns) & (columns < stop[..., None])


def within(first, after_last, num_columns):
    columns = np.arange(num_columns)
    return (np.asarray(first)[..., None] <= columns) & (columns < np.asarray(after_last)[..., None])


@pytest.mark.parametrize("num_columns", [1, 2, 3, 4, 5, 16, 17, 97, 300])
@pytest.mark.parametrize("above", [False, True])
def test_of_one_number_it_finds_the_first_and_the_last_column(num_columns, above, rng):
    num_rows = int(rng.integers(1, 40))  # one for all draws, since each is compiled
    for _ in range(20):
        drawn = draw(rng, 1, num_columns, num_rows)
        columns = wanted(*drawn, above)
        hull = np.maximum.accumulate(columns, -1) & np.maximum.accumulate(columns[..., ::-1], -1)[..., ::-1]
        found = search(*map(jnp.asarray, drawn), above=above)
        np.testing.assert_array_equal(within(*found, num_columns), hull)


@pytest.mark.parametrize("num_rounds", [2, 3])
@pytest.mark.parametrize("num_columns", [1, 6, 17, 97, 300])
def test_of_two_numbers_it_loses_no_column(num_columns, num_rounds, rng):
    num_rows = int(rng.integers(1, 40))
    for _ in range(20):
        drawn = draw(rng, 2, num_columns, num_rows)
        *_, start, stop = drawn
        found = search(*map(jnp.asarray, drawn), num_rounds=num_rounds)
        narrowed = within(*found, num_columns)
        assert not (wanted(*drawn, False) & ~narrowed).any()
        assert not (narrowed & ~within(start, stop, num_columns)).any()


def test_each_round_passes_over_a_group_in_which_no_column_has_both_numbers():
    # Groups of four: the first two hold columns with the one number or the other, the third one with both.
    one = jnp.array([[[1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]]])
    other = jnp.array([[[0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]]])
    values = jnp.concatenate([one, other])
    thresholds, start, stop = jnp.ones((2, 1, 1), int), jnp.zeros((1, 1), int), jnp.full((1, 1), 16)
    firsts = [int(search(values, thresholds, start, stop, num_rounds=rounds)[0][0, 0]) for rounds in (1, 2, 3)]
    assert firsts == [4, 8, 9]
