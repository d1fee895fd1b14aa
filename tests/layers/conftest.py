"""Random inputs for layer tests."""

from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture
def packed(rng):
    """Two rows of packed documents: tokens, segment ids and positions counting up from 0 in each, padding last."""
    lengths = [[int(rng.integers(5, 15)), int(rng.integers(5, 15))] for _ in range(2)]
    length = 32
    segment_ids, positions = np.zeros((2, length), np.int32), np.zeros((2, length), np.int32)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for document, num_tokens in enumerate(row_lengths, start=1):
            segment_ids[row, start : start + num_tokens] = document
            positions[row, start : start + num_tokens] = np.arange(num_tokens)
            start += num_tokens
        positions[row, start:] = np.arange(length - start)
    tokens = rng.integers(0, 64, (2, length)).astype(np.int32)
    return SimpleNamespace(tokens=tokens, segment_ids=segment_ids, positions=positions, lengths=lengths)
