"""The decoding benchmark: what it counts, what it times, what it writes."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.decode.__main__ import DecodeArguments, main
from experiments.benchmarks.decode.forms import FORMS, compile_form
from experiments.benchmarks.decode.workloads import DecodeWorkload

SMALL = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
WORK = DecodeWorkload(num_sequences=2, prompt=130, num_generated=2, window=100, dtype="float32", **SMALL)


def test_a_run_writes_a_row_for_each_form(tmp_path):
    output = tmp_path / "new" / "rows.jsonl"
    how = {"generated": 3, "num_rounds": 2, "copy_gigabytes": 1e-4, "output": output}
    forms = ("unified", "xla_per_sequence")
    main(DecodeArguments(sequences=(2,), prompts=(9,), windows=(4,), forms=forms, **how, **SMALL))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["form"] for row in rows] == ["unified", "xla_per_sequence"]
    for row in rows:
        # Two sequences, windows of 4, 2 heads of 8 for key and value, in 2 bytes.
        assert row["bytes_per_step"] == 2 * 4 * 2 * (8 + 8) * 2
        assert row["bytes_per_s"] == pytest.approx(row["bytes_per_step"] / row["seconds_per_step"])
        assert row["copy_bytes_per_s"]["jax"] > 0
        assert row["fastest_s"] <= row["seconds_per_step"] <= row["slowest_s"]


def test_bytes_are_those_of_the_tokens_seen():
    work = DecodeWorkload(num_sequences=3, prompt=2, num_generated=4, window=None, **SMALL | {"num_layers": 2})
    assert work.bytes_per_step == 3 * 2 * np.mean([3, 4, 5, 6]) * 2 * 16 * 2


@pytest.fixture(scope="module")
def dense():
    """XLA's attention over slabs: the program that the other forms are held to."""
    return compile_form("xla_per_sequence", WORK, None).program


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"xla_per_sequence"}))
def test_every_form_attends_to_its_cache(form, dense):
    """A form's steps, against the dense ones over slabs filled with what the form holds for each sequence."""
    contender = compile_form(form, WORK, None)
    # Two blocks of 128 slots for each sequence, in order.
    own = [slice(None) if form == "per_sequence" else slice(256 * row, 256 * row + WORK.length) for row in range(2)]
    slabs = [
        tuple(jnp.stack([x[row] if x.ndim == 4 else x[own[row]] for row in range(2)]) for x in layer)
        for layer in contender.layers
    ]
    _, expected = dense(slabs, jnp.full(2, WORK.prompt, jnp.int32), contender.tokens)
    _, output = contender.program(contender.layers, contender.start, contender.tokens)
    np.testing.assert_allclose(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forms": ("paged",)}, "unknown forms paged; expected some of unified,"),
        ({"sequences": (1, 0)}, "sequences=(1, 0) must be at least 1"),
        ({"implementation": "paged"}, "implementation='paged' is no backend of decoding"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DecodeArguments(**arguments)
