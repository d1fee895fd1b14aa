"""Two processes of 4 CPU devices each, over loopback: they train, save, stop and are lost as one run."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layers.pretrained import read_params
from tests.host_cpus import environment_of_cpus
from trainer.checkpoints.parameters import restore_params
from trainer.export.__main__ import main as export_main
from trainer.saved_run import abstract_params, open_saved_run

# In float32, losses on different meshes differ by its rounding alone.
ARGUMENTS = (
    *("--num-steps", 40, "--sequence-length", 64, "--batch-size", 8, "--log-every-num-steps", 1),
    *("--model.num-layers", 1, "--model.num-kv-heads", 2, "--model.compute-dtype", "float32"),
    *("--checkpoint.every-num-steps", 4, "--evaluation.every-num-steps", 3, "--evaluation.num-sequences", 8),
)
LOST_WITHIN_S = 30


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def start_two(trainer_command):
    """Starts two processes; each argument that is a pair has a value for each. None is left behind."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, modules: Sequence[str] = ("trainer",) * 2) -> list[subprocess.Popen[str]]:
        port = free_port()
        for index in range(2):
            own = [argument[index] if isinstance(argument, tuple) else argument for argument in arguments]
            place = ("--distributed", f"127.0.0.1:{port},2,{index}")
            given = (*ARGUMENTS, *place, *own)
            started.append(trainer_command.start(*given, module=modules[index], **environment_of_cpus(4)))
        return started[-2:]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def wait_until(processes, condition, what: str) -> None:
    """Waits for a condition, while every process runs."""
    deadline = time.monotonic() + 200
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            for process in processes:
                process.kill()
            pytest.fail(f"{what} never came:\n" + "\n".join("\n".join(each.communicate()) for each in processes))
        time.sleep(0.05)


def saved_steps(workdir) -> list[int]:
    folder = workdir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def last_step(workdir) -> int:
    """The last step in the metrics log."""
    metrics = workdir / "metrics.jsonl"
    return sum('"loss"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0


def words_of_record(workdir) -> set[str]:
    """The record's fields, and its status."""
    record = json.loads((workdir / "record.json").read_text())
    return {*record, record["status"]}


def without_gloo(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "peer ranks" not in line)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_goes_on_from_two_processes_to_one(trainer_command, start_two, read_run, tmp_path):
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    eight = environment_of_cpus(8)
    finished = trainer_command.run_alone("--workdir", whole, "--mesh.data", 8, *ARGUMENTS, **eight)
    assert finished.status == 0, finished.errors
    _, expected_steps, expected_evaluations = read_run(whole)

    # A disk that is full for process 1 alone: no process saves, and the run goes on. With room, the next save succeeds.
    pair = start_two("--workdir", workdir, "--mesh.data", 2, "--mesh.fsdp", 4)
    resource.prlimit(pair[1].pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    wait_until(pair, lambda: last_step(workdir) >= 5, "step 5")
    assert saved_steps(workdir) == []
    resource.prlimit(pair[1].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(pair, lambda: len(saved_steps(workdir)) >= 2, "the second save")

    # A signal to one process stops both, saved.
    pair[1].send_signal(signal.SIGTERM)
    (output, errors), (other_output, other_errors) = (process.communicate(timeout=100) for process in pair)
    assert [process.returncode for process in pair] == [75, 75], errors + other_errors
    assert "saving checkpoint" in output
    assert "process 1" in output.partition("saving checkpoint")[2].partition("\n")[0]
    assert "SIGTERM to process 1" in output
    *warnings, answer = without_gloo(other_output).splitlines()
    failed = [re.match(r"process 1: warning: saving checkpoint \S+/(\d+) ", line) for line in warnings]
    failed_steps = [int(match[1]) for match in failed if match]
    # Each failed save has its one warning, and there are no others.
    assert failed_steps == list(range(4, 4 * len(warnings) + 1, 4)) != [], other_output
    assert min(saved_steps(workdir)) > failed_steps[-1]
    assert re.match(r"process 1: SIGTERM: finishing (\d+ steps?|what is under way).*, then saving", answer)
    # TensorStore's threads complain, in a traceback without a line of ours, of the event loop that Orbax has closed.
    assert not re.search("^error: |/trainer/", other_errors, re.MULTILINE), other_errors
    record, steps, _ = read_run(workdir)
    assert record["status"] == "preempted"
    assert record["devices"]["processes"] == 2
    assert saved_steps(workdir)[-1] == record["step"] == steps[-1]["step"] < 40
    assert not list((workdir / "checkpoints").glob("*.tmp"))

    # Process 1 is killed. The survivor ends by itself, and says why.
    stopped_at = record["step"]
    pair = start_two("--workdir", workdir, "--mesh.data", 4, "--mesh.tensor", 2)
    wait_until(pair, lambda: last_step(workdir) > stopped_at + 4, "a step after the next save")
    pair[1].kill()
    begun = time.monotonic()
    output, errors = pair[0].communicate(timeout=100)
    assert time.monotonic() - begun < LOST_WITHIN_S
    assert pair[0].returncode == 69, output + errors
    assert f"resumed at step {stopped_at}/40" in output
    assert "is gone: no sign of life" in errors
    record, _, _ = read_run(workdir)
    assert record["status"] == "failed"
    assert record["message"].startswith("process 1 (")

    # Process 0 is killed. JAX aborts the survivor.
    pair = start_two("--workdir", workdir, "--mesh.data", 8)
    # Both processes are past their first exchange once the record names the devices.
    wait_until(pair, lambda: {"devices", "running"} <= words_of_record(workdir), "the next attempt")
    pair[0].kill()
    _, errors = pair[1].communicate(timeout=100)
    assert pair[1].returncode == -signal.SIGABRT, errors

    # One process of 8 devices goes on, on another mesh, over the same tokens. It tells how the one before ended.
    others = ("--mesh.fsdp", 2, "--mesh.tensor", 2, "--mesh.context", 2)
    finished = trainer_command.run_alone("--workdir", workdir, *others, *ARGUMENTS, **eight)
    assert finished.status == 0, finished.errors
    assert "the last attempt ended without a word" in finished.output
    record, steps, evaluations = read_run(workdir)
    assert record["status"] == "completed"
    assert [attempt["status"] for attempt in record["attempts"]] == ["preempted", "failed", "killed"]
    assert [row["step"] for row in steps] == list(range(1, 41))
    assert [row["num_targets"] for row in steps] == [row["num_targets"] for row in expected_steps]
    assert len({(row["loss"], row["grad_norm"]) for row in expected_steps}) == 40  # two losses may be alike by chance
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in steps] == pytest.approx([row[name] for row in expected_steps], rel=1e-4), name
    losses, expected = (
        [row["validation_nats_per_token"] for row in rows] for rows in (evaluations, expected_evaluations)
    )
    assert len(expected) == 14  # every third step's, most of them made by two processes, and the last one's
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_bug_in_one_process_has_its_traceback_and_ends_both(start_two, tmp_path):
    pair = start_two("--workdir", tmp_path / "run", "--mesh.data", 8, modules=faulty("none", "raise:6"))
    (_, errors), (_, other_errors) = (process.communicate(timeout=200) for process in pair)
    assert [process.returncode for process in pair] == [1, 1], errors + other_errors
    assert re.search(r"^error: process 1 \(.+\): ZeroDivisionError: a bug$", errors, re.MULTILINE)
    assert "faulty_run.py" in other_errors
    assert "ZeroDivisionError: a bug" in other_errors
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "failed"
    assert record["message"].endswith("ZeroDivisionError: a bug")


@pytest.mark.full
def test_two_processes_whose_mixture_ends_save_the_last_step(trainer_command, start_two, tmp_path):
    page = tmp_path / "page.py"
    page.write_text(
        "import dataclasses\n"
        "from trainer.config import SourceConfig\n"
        "from trainer.config.file import load_config\n\n\n"
        "def get_config():\n"
        f"    config = load_config({str(trainer_command.config)!r})\n"
        "    sources = (SourceConfig('only', config.data.files, when_exhausted='stop'),)\n"
        "    data = dataclasses.replace(config.data, source='stdlib', files=(), sources=sources)\n"
        "    return dataclasses.replace(config, data=data)\n"
    )
    own = ("--config", page, "--mesh.data", 8, "--num-steps", 5000, "--checkpoint.every-num-steps", 5000)
    pair = start_two("--workdir", tmp_path / "run", *own, "--evaluation.every-num-steps", 5000)
    outcomes = [process.communicate(timeout=200) for process in pair]
    assert [process.returncode for process in pair] == [1, 1], outcomes
    assert "all documents of data.sources (only) are used up after" in outcomes[0][1]
    assert saved_steps(tmp_path / "run") == [last_step(tmp_path / "run")]


@pytest.mark.full
def test_one_process_exports_what_two_have_saved(start_two, tmp_path):
    workdir, output = tmp_path / "run", tmp_path / "exported"
    own = ("--num-steps", 4, "--model.mlp", "swiglu")  # the last of --num-steps counts
    pair = start_two("--workdir", workdir, "--mesh.data", 2, "--mesh.fsdp", 4, *own)
    outcomes = [process.communicate(timeout=200) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outcomes
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= {path.name for path in workdir.glob("checkpoints/4/state/*")}
    assert export_main(["--workdir", str(workdir), "--output", str(output)]) == 0
    saved = open_saved_run(workdir, setting="--workdir")
    device = SingleDeviceSharding(jax.devices()[0])
    params = restore_params(saved.checkpoint, abstract_params(saved.config.model, device))
    jax.tree.map(np.testing.assert_array_equal, read_params(output, saved.config.model), params)


def test_processes_of_different_runs_are_refused(start_two, tmp_path):
    pair = start_two("--workdir", tmp_path / "run", "--mesh.data", 8, "--optimizer.learning-rate", (1e-3, 2e-3))
    outcomes = [process.communicate(timeout=200) for process in pair]
    assert [process.returncode for process in pair] == [2, 2], outcomes
    for _, errors in outcomes:
        assert errors.count("error:") == 1
        assert "differ in their config:\n  optimizer.learning_rate: 0.001 and 0.002\n" in errors
    assert not (tmp_path / "run").exists()


def test_a_process_that_does_not_come_is_told_and_waited_for_no_longer(tmp_path):
    program = (
        "import os\n"
        "from trainer.errors import TrainingFailed\n"
        "from trainer.launch.together import connect\n"
        "from trainer.launch.launcher import Launch\n"
        "try:\n"
        f"    connect(Launch('127.0.0.1:{free_port()}', 2, int(os.environ['INDEX'])), timeout_s=2)\n"
        "except TrainingFailed as failure:\n"
        "    print(failure, flush=True)\n"
        "    os._exit(7)\n"
    )
    for index in range(2):
        environment = environment_of_cpus(1) | {"INDEX": str(index)}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
        )
        assert ended.returncode == 7, ended.stderr
        assert "the processes haven't all met at 127.0.0.1:" in ended.stdout
        assert "within 2 s: time is over; see that each is started" in ended.stdout


def faulty(*faults: str) -> list[str]:
    return [f"tests.trainer.loop.faulty_run {fault}" for fault in faults]


@pytest.mark.full
def test_a_process_whose_data_hang_ends_both_and_each_leaves_its_stacks(start_two, tmp_path, read_run):
    limits = ("--watchdog.min-seconds", 8, "--watchdog.first-seconds", 8)
    pair = start_two("--workdir", tmp_path, "--mesh.data", 8, *limits, modules=faulty("none", "hang-data:12"))
    outcomes = [process.communicate(timeout=200) for process in pair]
    assert [process.returncode for process in pair] == [70, 70], outcomes
    record, _, _ = read_run(tmp_path)
    assert record["status"] == "failed"
    assert re.match(r"(process 1 \(.*\): )?stalled: ", record["message"])
    assert f"stacks are in {tmp_path}/stacks-*.txt; run the same command again" in record["message"]
    stacks = [(tmp_path / f"stacks-{index}.txt").read_text() for index in range(2)]
    assert ["faulty_run.py" in text and " in __next__" in text for text in stacks] == [False, True], "the cause"


@pytest.mark.full
def test_a_process_that_is_stopped_ends_the_other_within_half_a_minute(start_two, tmp_path):
    pair = start_two("--workdir", tmp_path, "--mesh.data", 8, "--num-steps", 100_000)
    wait_until(pair, lambda: last_step(tmp_path) >= 1, "the first step")
    pair[1].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    _, errors = pair[0].communicate(timeout=100)
    assert time.monotonic() - begun < LOST_WITHIN_S
    assert pair[0].returncode == 69, errors
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["status"] == "failed"
    assert re.match(r"process 1 \(.*\) is gone: no sign of life for 12 s ", record["message"])
    assert f"error: {record['message']}\n" in errors
