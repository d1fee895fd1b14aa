"""The benchmark of many questions about one context, on a model of one small layer."""

import json

import pytest

from experiments.benchmarks.shared_context import main


def test_a_line_has_what_was_measured(tmp_path, capsys):
    sizes = {"length": 512, "num-questions": 3, "answer-length": 2, "num-layers": 1, "width": 128, "vocab-size": 64}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    output = tmp_path / "rows.jsonl"
    assert main([*words, "--num-repeats", "1", "--output", str(output)]) == 0
    row = json.loads(output.read_text())
    assert (row["length"], row["num_questions"]) == (512, 3)
    assert min(row["forward_s"], row["one_question_s"], row["many_questions_s"]) > 0
    # Keys and values in bfloat16 of one head of 128: those of the context, and a block for each question.
    assert row["one_question_cache_bytes"] == (512 + 128) * 128 * 2 * 2
    assert row["many_questions_cache_bytes"] == (512 + 3 * 128) * 128 * 2 * 2
    ratio = row["many_questions_s"] / row["one_question_s"]
    assert f"3 questions {row['many_questions_s']:.2f} s, {ratio:.2f} × one" in capsys.readouterr().out


def test_an_unknown_flag_ends_with_status_2():
    with pytest.raises(SystemExit) as ended:
        main(["--num-question", "3"])
    assert ended.value.code == 2
