"""A run on chats of two sources: killed twice, it ends as if nothing had happened; cuts are told and recorded."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.trainer.data.chat_templates import STYLES, make_folder, random_chat
from tests.trainer.loop.test_kill_and_resume import OPTIMISED, final_state, kill, wait_until

pytest.importorskip("jinja2", reason="renders chat templates")

NUM_STEPS = 120
PAGE = """
import dataclasses
from pathlib import Path

from trainer.config import ChatConfig, SourceConfig
from trainer.config.file import load_config


def get_config():
    base = load_config(Path({tiny!r}))
    sources = tuple(
        SourceConfig(name, ({folder!r} + name + ".jsonl",), "chats", weight=weight)
        for name, weight in (("short", 2.0), ("long", 1.0))
    )
    data = dataclasses.replace(
        base.data, source="stdlib", files=(), sources=sources, tokenizer={tokenizer!r}, chat=ChatConfig()
    )
    model = dataclasses.replace(base.model, vocab_size=1024)
    return dataclasses.replace(base, data=data, model=model, sequence_length=256, num_steps={num_steps})
"""


def newest_step(checkpoints: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    return max((int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()), default=0)


@pytest.mark.full
def test_a_chat_run_that_is_killed_twice_is_the_same_to_the_bit(trainer_command, tmp_path, read_run, rng):
    tokenizer = make_folder(tmp_path / "folder", STYLES["llama"], rng)
    for name, most in (("short", 2), ("long", 9)):
        rows = [{"messages": random_chat(rng, most), "weight": float(rng.choice([0.5, 1.0]))} for _ in range(150)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.py"
    values = {"tiny": str(trainer_command.config), "folder": f"{tmp_path}/", "tokenizer": str(tokenizer)}
    page.write_text(PAGE.format(**values, num_steps=NUM_STEPS))
    command = dataclasses.replace(trainer_command, config=page)
    arguments = ("--checkpoint.every-num-steps", 3, "--evaluation.every-num-steps", 40)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished = command.run_alone("--workdir", whole, *arguments, **OPTIMISED)
    assert finished.status == 0, finished.errors
    for _ in range(2):
        process = command.start("--workdir", killed, *arguments, **OPTIMISED)
        later = newest_step(killed / "checkpoints") + int(rng.integers(3, 30))
        wait_until(process, lambda step=later: newest_step(killed / "checkpoints") >= step)
        assert kill(process)[0], "it was running"
    resumed = command.run_alone("--workdir", killed, *arguments, **OPTIMISED)
    assert resumed.status == 0, resumed.errors
    assert "resumed at step" in resumed.output

    (record, steps, evaluations), (expected, *rows) = read_run(killed), read_run(whole)
    assert [{name: row[name] for name in ("loss", "num_targets")} for row in steps] == [
        {name: row[name] for name in ("loss", "num_targets")} for row in rows[0]
    ]
    assert evaluations == rows[1]
    assert record["mixture"] == expected["mixture"]
    leaves, expected_leaves = (jax.tree.leaves(final_state(workdir, NUM_STEPS)) for workdir in (killed, whole))
    assert len(leaves) == len(expected_leaves) > 20
    for got, want in zip(leaves, expected_leaves, strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()

    counts = expected["data"]["chats"]
    assert counts["num_chats"] == expected["data"]["train"]["num_documents"]
    assert counts["num_chats_cut"] > 0
    assert f"{counts['num_chats_cut']} cut at a turn" in finished.output
    assert sum(row["num_targets"] for row in rows[0]) < sum(
        source["num_tokens"] for source in expected["mixture"].values()
    ), "the loss is of the assistant's tokens alone"
