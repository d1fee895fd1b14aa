"""The benchmark of sequence sharding: what it draws, what it counts, what it writes."""

import json

import numpy as np
import pytest

from experiments.benchmarks.sequence_sharding import (
    DISTRIBUTIONS,
    MASKS,
    ShardingArguments,
    main,
    measure_sharding,
    random_sequence,
)


def test_a_run_writes_a_row_for_each_distribution_and_number_of_ranks(tmp_path, capsys):
    output = tmp_path / "new" / "rows.jsonl"
    names = ("log-normal, median 300", "all of 1,000")
    main(ShardingArguments(num_sequences=3, ranks=(2, 4), length=8192, distributions=names, output=output))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    expected = [(name, ranks) for name in names for ranks in (2, 4)]
    assert [(row["distribution"], row["num_ranks"]) for row in rows] == expected
    for row in rows:
        assert row["num_sequences"] == 3
        assert 1 <= row["imbalance_mean"] <= row["imbalance_max"]
        assert 1 <= row["imbalance_small_tiles_mean"] <= row["imbalance_small_tiles_max"]
        assert row["num_ranks"] <= row["num_spans_median"] <= 8192 // 512
        assert 0 <= row["short_documents_parted"] <= 1
        assert row["seconds_median"] > 0
    assert "3 sequences each of 8,192 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sequences_are_documents_and_then_padding(name, rng):
    ids, positions = random_sequence(8192, DISTRIBUTIONS[name], rng)
    num_tokens = int((ids != 0).sum())
    assert 8192 - 81 <= num_tokens <= 8192
    assert not ids[num_tokens:].any()
    assert not positions[num_tokens:].any()
    assert set(np.diff(ids[:num_tokens])) <= {0, -1}
    assert ids[num_tokens - 1] == 1
    for document in range(1, ids.max() + 1):
        of_document = positions[ids == document]
        np.testing.assert_array_equal(of_document, np.arange(len(of_document)))


def test_a_document_on_two_ranks_is_parted():
    """Documents of 300 and 724 tokens on two ranks of 512: the first is shorter than a chunk, and whole."""
    positions = np.concatenate([np.arange(300), np.arange(724)]).astype(np.int32)
    whole = measure_sharding((np.repeat([1, 2], [300, 724]).astype(np.int32), positions), MASKS["global"], 2)
    assert (whole.parted, whole.num_spans) == (0.0, 2)
    three = np.repeat([1, 2, 3], [400, 224, 400]).astype(np.int32)
    middle = measure_sharding((three, np.concatenate([np.arange(n) for n in (400, 224, 400)])), MASKS["global"], 2)
    assert middle.parted == pytest.approx(1 / 3)
    assert middle.imbalance >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distributions": ("uniform",)}, r"unknown distributions \['uniform'\]; expected some of log-normal"),
        ({"masks": "none"}, "masks='none' is not one of global, window and global"),
        ({"num_sequences": 0}, "num_sequences=0 must be at least 1"),
        ({"length": 100}, "length=100 is not a multiple of 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShardingArguments(**arguments)
