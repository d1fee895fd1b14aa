"""`python -m trainer.compare`: its numbers are those of an oracle in NumPy, and mistakes are one message each."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.compare import picture
from trainer.compare.__main__ import main
from trainer.config import EvaluationConfig, OptimizerConfig, Phase
from trainer.config.file import load_config
from trainer.terminal.units import format_bytes, format_seconds
from trainer.train import train
from trainer.workdir import claim_workdir

OTHER_DATA = "other data: no comparison"
AXES = ("steps", "tokens", "seconds")
WINDOW = 0.375  # three of the eight steps that both runs have made


@pytest.fixture(scope="module")
def runs(trainer_command, tmp_path_factory) -> tuple[Path, Path]:
    """Two finished runs. The second is in two phases, whose first has the first run's validation sequences."""
    plain = dataclasses.replace(
        load_config(trainer_command.config),
        num_steps=8,
        sequence_length=32,
        batch_size=4,
        log_every_num_steps=2,
        optimizer=OptimizerConfig(learning_rate=1e-3, num_warmup_steps=2),
        evaluation=EvaluationConfig(every_num_steps=2, num_sequences=2),
    )
    phases = (Phase(num_steps=4), Phase(sequence_length=64, batch_size=2))
    optimizer = dataclasses.replace(plain.optimizer, learning_rate=3e-3)
    phased = dataclasses.replace(plain, num_steps=10, optimizer=optimizer, phases=phases)
    folder = tmp_path_factory.mktemp("compared")
    for name, config in (("plain", plain), ("phased", phased)):
        workdir = claim_workdir(folder / name, config)
        assert train(config, workdir, command=["test"], started=time.perf_counter()) == 0
    return folder / "plain", folder / "phased"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def copies(runs, tmp_path) -> list[Path]:
    """The runs, to be changed."""
    return [Path(shutil.copytree(run, tmp_path / run.name)) for run in runs]


@pytest.fixture
def compare(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()  # what fixtures have printed, such as a seed
        status = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


@pytest.fixture
def table(compare):
    """The table as {(section, label): cells}. A cell may go over several lines."""

    def read(*arguments: object) -> dict[tuple[str, str], list[str]]:
        status, output, errors = compare(*arguments)
        assert (status, errors) == (0, "")
        lines = output.split("\n")
        starts = [match.start() for match in re.finditer(r"(?<=\s\s)\S", lines[0])]  # of the columns
        rows, section, cells = {}, "", [""]
        for line in lines:
            label, *found = (line[a:b].strip() for a, b in zip([0, *starts], [*starts, None], strict=True))
            if line and not line.startswith(" "):
                section = line if line is not lines[0] else ""
            if label and line.startswith("  "):
                cells = rows[section, label] = found
            elif any(found) and line.startswith("  "):
                cells[:] = [f"{one} {other}".strip() for one, other in zip(cells, found, strict=True)]
        return rows

    return read


def refusal(outcome: tuple[int, str, str]) -> str:
    status, output, errors = outcome
    assert (status, output) == (2, "")
    assert errors.startswith("error: ")
    return errors.removeprefix("error: ").rstrip("\n")


def logged(run: Path) -> tuple[list[dict], list[dict]]:
    """The entries of steps, and those of evaluations."""
    entries = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    return [each for each in entries if "loss" in each], [each for each in entries if "loss" not in each]


def set_speeds(run: Path, make) -> None:
    """Writes other speeds into the last entry of each log window, by the window's index."""
    entries = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    for index, entry in enumerate(each for each in entries if "step_s" in each):
        entry |= make(index)
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def places(steps: list[dict]) -> dict[str, list[float]]:
    """The oracle of the axes: what was done after each step, counted step by step."""
    found = {axis: [] for axis in AXES}
    for index, entry in enumerate(steps):
        closing = next(each for each in steps[index:] if each.get("step_s") is not None)
        before = [found[axis][-1] if found[axis] else 0.0 for axis in AXES]
        for axis, was, more in zip(AXES, before, (1, entry["num_tokens"], closing["step_s"]), strict=True):
            found[axis].append(was + more)
    return found


def mean_at(steps: list[dict], axis: str, x: float, width: float) -> float:
    """The oracle of the training loss: means over windows, then a line between the two nearest steps."""
    done, losses = places(steps)[axis], [each["loss"] for each in steps]
    means = [np.mean([loss for at, loss in zip(done, losses, strict=True) if end - width < at <= end]) for end in done]
    after = next(index for index, at in enumerate(done) if at >= x)
    if done[after] == x:
        return float(means[after])
    part = (x - done[after - 1]) / (done[after] - done[after - 1])
    return float((1 - part) * means[after - 1] + part * means[after])


def label(axis: str, x: float) -> str:
    return {"steps": f"step {x:,.0f}", "tokens": f"{x:,.0f} tokens", "seconds": format_seconds(x)}[axis]


def assert_losses(cells: list[str], expected: list[float | None]) -> None:
    """Losses of two runs that compare: each as expected, and their difference."""
    first, second = expected
    assert re.fullmatch(r"[\d.]+", cells[0])
    assert float(cells[0]) == pytest.approx(first, abs=6e-5)
    shown, difference = re.fullmatch(r"([\d.]+) \(([+-][\d.]+)\)", cells[1]).groups()
    assert float(shown) == pytest.approx(second, abs=6e-5)
    assert float(difference) == pytest.approx(second - first, abs=6e-5)


@pytest.mark.parametrize("axis", AXES)
def test_training_losses_at_equal_places(copies, table, axis):
    for run, rng in zip(copies, np.random.default_rng(0).spawn(2), strict=True):
        set_speeds(run, lambda _, rng=rng: {"step_s": rng.uniform(1, 2)})  # the real first step may take half of all
    rows = table(*copies, "--window", WINDOW)
    steps = [logged(run)[0] for run in copies]
    end = min(places(each)[axis][-1] for each in steps)
    for part in (0.25, 0.5, 0.75, 1):
        x = part * end if axis == "seconds" else np.ceil(part * end)
        expected = [mean_at(each, axis, x, WINDOW * end) for each in steps]
        section = f"training loss, nats per token, mean over {100 * WINDOW:g}% of the way"
        assert_losses(rows[section, label(axis, x)], expected)


def test_validation_losses_compare_on_the_same_sequences_alone(runs, table):
    rows = table(*runs)
    losses = [{each["step"]: each["validation_nats_per_token"] for each in logged(run)[1]} for run in runs]
    digests = [{each["step"]: each["validation_digest"] for each in logged(run)[1]} for run in runs]
    assert digests[0][4] == digests[1][4] != digests[1][6], "the second phase has other sequences"
    section = "validation loss, nats per token"
    for step in (2, 4):
        assert_losses(rows[section, f"step {step}"], [each[step] for each in losses])
    for step in (6, 8):
        assert rows[section, f"step {step}"] == [f"{losses[0][step]:.4f}", f"{losses[1][step]:.4f} ({OTHER_DATA})"]


def test_a_validation_loss_at_equal_tokens_lies_between_two_evaluations(copies, table, rng):
    """At the first quarter the second run is between the evaluations after steps 2 and 4, of its first phase."""
    for run, (least, most) in zip(copies, ((140, 160), (115, 128)), strict=True):
        entries = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        for entry in entries:
            if "loss" in entry:
                entry["num_tokens"] = int(rng.integers(least, most))
        (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    losses = [{each["step"]: each["validation_nats_per_token"] for each in logged(run)[1]} for run in copies]
    tokens = [places(logged(run)[0])["tokens"] for run in copies]
    x = np.ceil(min(each[-1] for each in tokens) / 4)
    assert tokens[1][1] < x < tokens[1][3]
    part = (x - tokens[1][1]) / (tokens[1][3] - tokens[1][1])
    between = (1 - part) * losses[1][2] + part * losses[1][4]
    cell = table(*copies)["validation loss, nats per token", label("tokens", x)][1]
    assert float(cell.split()[0]) == pytest.approx(between, abs=6e-5)


def test_no_loss_is_made_up_between_two_sets_of_sequences(copies, table):
    """Nor beyond the last evaluation, nor where a loss wasn't finite, nor does an unknown set compare."""
    path = copies[1] / "metrics.jsonl"
    lines = []
    for entry in map(json.loads, path.read_text().splitlines()):
        if "loss" not in entry:
            if entry["step"] == 2:
                entry["validation_digest"] = "another"
            if entry["step"] == 4:
                continue
            if entry["step"] == 8:
                entry["validation_nats_per_token"] = None
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines))
    rows = table(*copies)
    cells = [rows["validation loss, nats per token", f"step {step}"][1] for step in (2, 4, 6, 8)]
    assert cells[1] == "–"
    assert [OTHER_DATA in cell for cell in cells] == [True, False, True, False]
    assert cells[3] == "not finite"


def test_losses_of_unknown_sequences_do_not_compare(copies, table):
    for run in copies:
        entries = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        for entry in entries:
            entry.pop("validation_digest", None)
        (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    rows = table(*copies)
    assert all(OTHER_DATA in rows["validation loss, nats per token", f"step {step}"][1] for step in (2, 4, 6, 8))


def test_a_training_loss_that_is_not_finite_is_left_out_of_the_mean(copies, table):
    entries = list(map(json.loads, (copies[0] / "metrics.jsonl").read_text().splitlines()))
    for entry in entries:
        if entry["step"] == 4 and "loss" in entry:
            entry["loss"] = None
    (copies[0] / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    mean = np.mean([entry["loss"] for entry in logged(copies[0])[0] if entry["step"] in (2, 3)])
    for window, expected in ((WINDOW, f"{mean:.4f}"), (0, "not finite")):
        section = f"training loss, nats per token, mean over {100 * window:g}% of the way"
        assert table(*copies, "--window", window)[section, "step 4"][0] == expected


def test_speed_memory_and_compilation_are_the_records(runs, table):
    rows = table(*runs)
    records = [json.loads((run / "record.json").read_text()) for run in runs]
    assert rows["speed", "tokens/s, phase 1"][0] == f"{records[0]['steps']['tokens_per_s']:,.0f}"
    assert rows["speed", "tokens/s, phase 2"] == ["–", f"{records[1]['steps']['tokens_per_s']:,.0f}"]
    assert rows["speed", "step, median, phase 1"][0] == format_seconds(records[0]["steps"]["median_s"])
    assert rows["speed", "step, median, phase 2"][1] == format_seconds(records[1]["steps"]["median_s"])
    peaks = [records[0]["compile"]["train_step"]["memory"]["peak"]]
    phases = (records[1]["compile"], *records[1]["compile"]["phases"])
    peaks.append(max(each["train_step"]["memory"]["peak"] for each in phases))
    ratio = f"({peaks[1] / peaks[0]:.2f}×)"
    assert rows["memory", "a step needs, per device"] == [format_bytes(peaks[0]), f"{format_bytes(peaks[1])} {ratio}"]
    names = ("init_state", "train_step", "eval_step")
    programs = [[record["compile"][name] for name in names] for record in records]
    programs[1] += [each for each in records[1]["compile"]["phases"][0].values() if isinstance(each, dict)]
    seconds = [sum(each["trace_s"] + each["lower_s"] + each["compile_s"] for each in found) for found in programs]
    cells = rows["compilation, newest attempt", "all programs"]
    assert cells[0] == format_seconds(seconds[0])
    assert cells[1] == f"{format_seconds(seconds[1])} ({seconds[1] / seconds[0]:.2f}×)"
    hits = [f"{sum(each['cache_hit'] for each in found)} of {len(found)} programs" for found in programs]
    assert rows["compilation, newest attempt", "from the cache"] == hits


def test_mfu_is_the_mean_over_the_time_after_the_first_window(copies, table):
    """A CPU has no known peak; a GPU's run has these numbers."""
    expected = []
    for run, mfu in zip(copies, (0.2, 0.4), strict=True):
        set_speeds(run, lambda i, mfu=mfu: {"mfu_causal": mfu + i / 100, "mfu_noncausal": mfu, "step_s": 1.0 + i})
        last = 8 if run is copies[0] else 4  # of the first phase
        windows = [entry for entry in logged(run)[0] if "step_s" in entry]
        steady = [entry for entry in windows if entry["step"] <= last]
        weights = [each["step_s"] * (each["step"] - before["step"]) for before, each in pairwise(steady)]
        steady = steady[1:]
        expected.append(np.average([each["mfu_causal"] for each in steady], weights=weights))
    cells = table(*copies)["speed", "MFU, causal, phase 1"]
    assert cells == [f"{expected[0]:.1%}", f"{expected[1]:.1%} ({expected[1] / expected[0]:.2f}×)"]


def test_the_fields_that_differ_and_no_others(runs, table):
    rows = {name: cells for (section, name), cells in table(*runs).items() if section == "config, where it differs"}
    assert rows == {
        "num_steps": ["8", "10"],
        "optimizer.learning_rate": ["0.001", "0.003"],
        "phases[0].num_steps": ["–", "4"],
        "phases[1].sequence_length": ["–", "64"],
        "phases[1].batch_size": ["–", "2"],
    }


def test_phases_show_where_they_begin(runs, table):
    done = places(logged(runs[1])[0])
    [(_, cells)] = [each for each in table(*runs).items() if each[0] == ("a later phase begins after", "phase 2")]
    assert cells == ["–", ", ".join(label(axis, done[axis][3]) for axis in AXES)]


def test_a_long_value_is_whole(copies, table):
    description = " ".join(f"word{number}" for number in range(30))
    config = json.loads((copies[0] / "config.json").read_text())
    (copies[0] / "config.json").write_text(json.dumps(config | {"description": description}))
    assert table(*copies)["config, where it differs", "description"][0] == repr(description)


def line(step: int, **fields: object) -> dict:
    return {"kind": "retrieval", "length": 4096, "task": "niah_single", "num_examples": 4, "step": step} | fields


def test_evaluations_of_the_newest_step(copies, table):
    lines = [line(2, depth=0.0, accuracy=0.0)]
    lines += [line(8, depth=0.0, accuracy=0.25), line(8, depth=1.0, accuracy=0.75, num_examples=12)]
    losses = [{"kind": "loss_of_last_tokens", "length": 1000, "loss": loss, "num_tokens": 512} for loss in (3.0, 2.5)]
    short = {"kind": "short_context_loss", "length": 32, "num_tokens": 90}
    ours = [*lines, losses[0] | {"step": 8}, short | {"loss": 2.0, "step": 8}]
    theirs = [line(10, depth=0.0, accuracy=1.0), line(10, depth=1.0, accuracy=1.0, num_examples=12)]
    theirs += [losses[1] | {"step": 10}, short | {"loss": 1.5, "step": 10, "num_tokens": 80}]
    for run, made in zip(copies, (ours, theirs), strict=True):
        (run / "evaluations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
    rows = {name: cells for (section, name), cells in table(*copies).items() if section == "evaluation, newest step"}
    assert rows == {
        "after step": ["8", "10"],
        "accuracy, retrieval niah single, 4k": ["62.5%", "100.0% (+37.5 points)"],
        "loss, loss of last tokens, 1,000": ["3.0000", "2.5000 (-0.5000)"],
        "loss, short context loss, 32": ["2.0000", f"1.5000 ({OTHER_DATA})"],
    }


def test_a_picture_is_written_and_nothing_in_the_workdirs(runs, compare):
    pytest.importorskip("matplotlib", reason="the plots extra isn't installed")
    before = {path: path.stat().st_mtime_ns for run in runs for path in (run, *run.rglob("*"))}
    status, output, _ = compare(*runs)
    assert status == 0
    assert output.endswith("\nwritten: compare.png\n")
    content = Path("compare.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert {path: path.stat().st_mtime_ns for run in runs for path in (run, *run.rglob("*"))} == before
    # The runs may stand on both sides of a flag, and another window makes another picture.
    assert compare(runs[0], "--output", "other.png", runs[1], "--window", 1)[0] == 0
    assert Path("other.png").read_bytes() != content


def test_the_picture_is_written_although_the_reader_leaves(runs):
    pytest.importorskip("matplotlib", reason="the plots extra isn't installed")
    command = [sys.executable, "-m", "trainer.compare", *map(str, runs)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"}
    read, write = os.pipe()
    os.close(read)  # nobody reads what it prints
    with os.fdopen(write) as output:
        assert subprocess.run(command, stdout=output, env=environment).returncode == 0
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_so(runs, compare, monkeypatch):
    monkeypatch.setattr(picture, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    status, output, _ = compare(*runs)
    assert status == 0
    assert "no picture: matplotlib isn't installed" in output
    assert not list(Path().iterdir())


def test_a_run_that_has_just_begun(copies, table):
    for name in ("record.json", "metrics.jsonl"):
        (copies[1] / name).unlink()
    rows = table(*copies)
    assert rows["run", "steps"] == ["8 of 8", "0 of 10"]
    assert rows["run", "status"] == ["completed", "–"]
    assert rows["a later phase begins after", "phase 2"] == ["–", "step 4, not reached"]
    assert not [section for section, _ in rows if "loss" in section]
    assert Path("compare.png").is_file()


def test_runs_of_one_name_are_told_apart(runs, table, compare):
    for name in ("one", "two"):
        shutil.copytree(runs[0], Path(name) / "plain")
    assert ("config, where it differs", "nothing differs") in table("one/plain", "two/plain")
    _, output, _ = compare("one/plain", "two/plain", runs[1])
    assert output.splitlines()[0].split()[-3:] == ["one/plain", "two/plain", "phased"]


def test_mistakes_are_told(runs, copies, compare, tmp_path):
    one, two = runs
    assert "got 0 of the two or more workdirs" in refusal(compare())
    assert "got 1 of the two or more workdirs" in refusal(compare(one))
    assert f"a run is given twice, as {one} and as {one}/../plain; " in refusal(compare(one, two, f"{one}/../plain"))
    assert f"{tmp_path} is no workdir: it holds no config.json" in refusal(compare(one, tmp_path))
    assert "runs/none is no workdir: it does not exist" in refusal(compare("runs/none", one))
    assert "unknown option --outptu; did you mean --output?" in refusal(compare(one, two, "--outptu", "x.png"))
    assert "--window=2.0 must be a fraction, from 0 to 1" in refusal(compare(one, two, "--window", 2))
    assert "--window: invalid float value: 'wide'" in refusal(compare(one, two, "--window", "wide"))
    assert "--output=x.pdf is to be a PNG file" in refusal(compare(one, two, "--output", "x.pdf"))
    inside = copies[0] / "compare.png"
    assert f"--output {inside} lies in workdir" in refusal(compare(*copies, "--output", inside))
    (copies[1] / "record.json").write_text("[]")
    assert f"{copies[1]}/record.json can't be read: it is no object" in refusal(compare(*copies))
    status, _, errors = compare(one, two, "--output", tmp_path / "none" / "x.png")
    assert (status, "x.png can't be written: No such file" in errors) == (1, True)


def test_the_help_names_the_window(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "a mean over a window that ends there" in " ".join(capsys.readouterr().out.replace("│", " ").split())
