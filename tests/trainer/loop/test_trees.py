"""A run on trees says what sharing saves, compiles once, and goes on where it was."""

import json
import re

import pytest

import trainer.train


@pytest.fixture
def arguments(tmp_path):
    """Of a run on trees of which each third is longer than a sequence of 256 tokens."""
    lines = []
    for number in range(30):
        completions = [{"text": f" {way}" * (20 + 10 * (number % 3)), "weight": 1 - way} for way in range(3)]
        lines.append({"prompt": f"{number}: " + "why " * 20, "completions": completions})
    (tmp_path / "trees.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ("--data.source", "trees", "--data.files", tmp_path / "trees.jsonl", "--evaluation.num-sequences", 2)
    return (*data, "--checkpoint.every-num-steps", 4, "--log-every-num-steps", 1)


NO_PROMPT = {"completions": [{"text": "a"}]}
NOT_FINITE = {"prompt": "p", "completions": [{"text": "a"}, {"text": "b", "weight": float("nan")}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, r"trees.jsonl:\d+: a branch has 165 tokens, more than .*=128 \(\d+ such trees\)"),
        (NO_PROMPT, "trees.jsonl:31: no field 'prompt' before the completions"),
        (NOT_FINITE, r"trees.jsonl:31: completions\[1\]: weight=nan is not a finite number"),
    ],
    ids=["branch longer than a sequence", "no prompt", "weight"],
)
def test_trees_are_refused_before_a_device_starts(line, message, trainer_command, tmp_path, arguments, monkeypatch):
    if line is not None:
        with (tmp_path / "trees.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    monkeypatch.setattr(trainer.train, "make_mesh", None)
    finished = trainer_command.run(*arguments, "--workdir", tmp_path / "run", "--sequence-length", 128)
    assert finished.status == 2
    assert re.search(message, finished.errors)


def test_a_run(trainer_command, read_run, tmp_path, arguments):
    losses = []
    for name, lengths in (("whole", [8]), ("in two parts", [4, 8])):
        for num_steps in lengths:
            finished = trainer_command.run(
                *arguments, "--workdir", tmp_path / name, "--num-steps", num_steps, "--optimizer.schedule", "wsd",
                "--optimizer.decay-fraction", 0, "--optimizer.final-learning-rate-fraction", 1,
            )  # fmt: skip
            assert finished.status == 0, finished.errors
            record, steps, evaluations = read_run(tmp_path / name)
            assert record["compile"]["recompiles"] == []
        losses.append([step["loss"] for step in steps])
        sharing = record["data"]["sharing"]
        saved, num_split, num_parts = (sharing[f"num_{of}"] for of in ("tokens_saved", "trees_split", "parts_of_split"))
        assert f"sharing saves {saved:,} of {saved + sharing['num_tokens']:,} tokens" in finished.output
        assert f"{num_split:,} longer than a sequence, split into {num_parts:,} parts" in finished.output
        assert 0 < num_split < sharing["num_trees"]
        assert evaluations[-1]["validation_nats_per_token"] > 0
    assert losses[0] == losses[1]
