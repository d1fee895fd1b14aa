"""Whole runs of the real command: what they write, what they compile, and how they stop."""

import dataclasses
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from kernels import CausalMask, LocalMask, ScheduledWindow, Target
from layers import LayerOverride
from trainer.__main__ import main
from trainer.config.file import load_config
from trainer.step.attention_plan import AttentionPlan, attention_calls, describe_attention
from trainer.step.functions import make_step_functions
from trainer.step.plan import make_plan
from trainer.step.sharding import make_mesh

NUM_STEPS = 60  # of the tiny config
WINDOW_ENDS = [1, 8, 16, 20, 24, 30, 32, 40, 48, 56, 60]  # first, logs, checkpoints, evaluations


@pytest.fixture(scope="module")
def first(trainer_command, tmp_path_factory):
    """A run from start to end, its compilations logged, with a compilation cache of its own."""
    workdir = tmp_path_factory.mktemp("first") / "run"
    cache = workdir.parent / "cache"
    finished = trainer_command.run_alone("--workdir", workdir, "--compilation.cache-dir", cache, JAX_LOG_COMPILES="1")
    assert finished.status == 0, finished.errors
    return finished, workdir, cache


@pytest.fixture(scope="module")
def second(trainer_command, first, tmp_path_factory):
    """The same command in another workdir, with the first one's cache."""
    _, _, cache = first
    workdir = tmp_path_factory.mktemp("second") / "run"
    finished = trainer_command.run("--workdir", workdir, "--compilation.cache-dir", cache)
    assert finished.status == 0, finished.errors
    return finished, workdir


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Reads the process's output until a line holds the text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    pytest.fail(f"{text!r} never came; output:\n{''.join(lines)}\nerrors:\n{process.stderr.read()}")


def test_each_step_is_compiled_exactly_once(first, read_run):
    finished, workdir, _ = first
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", finished.errors)
    assert (compiled.count("train_step"), compiled.count("eval_step")) == (1, 1)
    record, steps, _ = read_run(workdir)
    assert record["compile"]["recompiles"] == []
    assert not any("recompile_s" in row for row in steps)
    assert "warning" not in finished.output


def test_a_second_run_hits_the_compilation_cache_and_has_the_same_losses(first, second, read_run):
    (_, first_workdir, cache), (finished, second_workdir) = first, second
    for workdir, hit in ((first_workdir, False), (second_workdir, True)):
        told = read_run(workdir)[0]["compile"]
        assert told["cache_dir"] == str(cache)
        entries = sorted(path.name for path in cache.glob("jit_train_step*"))  # two: the programs differed
        assert told["train_step"]["cache_hit"] is hit, entries
        assert all(told["train_step"][name] > 0 for name in ("trace_s", "lower_s", "compile_s"))
        memory = told["train_step"]["memory"]
        assert set(memory) == {"arguments", "outputs", "aliased", "temporaries", "code", "peak", "host"}
        assert memory["peak"] >= memory["temporaries"]
    assert "(read from the cache)" in finished.output
    assert finished.errors == ""
    (_, steps, evaluations), (_, steps_again, evaluations_again) = read_run(first_workdir), read_run(second_workdir)
    assert [row["loss"] for row in steps] == [row["loss"] for row in steps_again]
    assert evaluations == evaluations_again


def test_the_record_tells_the_run(first, read_run):
    _, workdir, _ = first
    record, _, evaluations = read_run(workdir)
    expected = {
        "schema_version": 1,
        "status": "completed",
        "step": NUM_STEPS,
        "resumed_from": None,
        "attempts": [],
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1, "context": 1},
        "tokens_per_step": 512,
        "experts": None,
        "tensor": None,
        "loss": {"implementation": "xla", "passed_over": {}},
    }
    assert record | expected == record
    assert (record["devices"]["platform"], record["devices"]["peak_flops_per_s"]) == ("cpu", None)
    assert record["versions"]["jax"] == jax.__version__
    assert re.fullmatch(r"[0-9a-f]{64}", record["data"]["fingerprint"])
    [plan] = record["attention"]
    assert (plan["num_layers"], plan["backend"], "cudnn" in plan["passed_over"]) == (2, "blockwise", True)
    steps = record["steps"]
    assert steps["num_steps"] == NUM_STEPS
    assert 0 < steps["median_s"] <= steps["p90_s"]
    assert steps["mfu_causal"] is steps["mfu_noncausal"] is None, "no vendor tells a CPU's peak"
    assert min(steps["first_s"], steps["tokens_per_s"]) > 0
    assert record["evaluation"]["step"] == NUM_STEPS
    assert record["evaluation"]["validation_nats_per_token"] == evaluations[-1]["validation_nats_per_token"]
    assert record["memory"]["host_peak_bytes"] > 10_000_000


def test_the_time_account_sums_to_the_run(first, read_run):
    finished, workdir, _ = first
    told = read_run(workdir)[0]["time"]
    parts = {name: seconds for name, seconds in told.items() if name != "total_s"}
    assert set(parts) == {"compile_s", "data_wait_s", "step_s", "evaluation_s", "checkpoint_s", "other_s"}
    assert sum(parts.values()) == pytest.approx(told["total_s"])
    assert all(seconds > 0 for seconds in parts.values())
    assert told["total_s"] < finished.seconds


def test_metrics_hold_every_step_and_every_evaluation(first, read_run):
    _, steps, evaluations = read_run(first[1])
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 and row["num_targets"] > 0 for row in steps)
    assert [row["step"] for row in evaluations] == [30, NUM_STEPS]
    assert evaluations[-1]["validation_nats_per_token"] < steps[0]["loss"]
    assert all(row["validation_bits_per_byte"] > 0 for row in evaluations)
    assert [row["step"] for row in steps if "tokens_per_s" in row] == WINDOW_ENDS


def test_tensorboard_holds_the_same_values(first, read_run, read_tensorboard):
    _, workdir, _ = first
    record, steps, evaluations = read_run(workdir)
    shown = read_tensorboard(workdir / "tensorboard")
    assert shown["train/loss"] == pytest.approx({row["step"]: row["loss"] for row in steps}, rel=1e-6)
    losses = {row["step"]: row["validation_nats_per_token"] for row in evaluations}
    assert shown["validation/nats_per_token"] == pytest.approx(losses, rel=1e-6)
    assert set(shown["speed/tokens_per_s"]) == {row["step"] for row in steps if "tokens_per_s" in row}
    for program in ("init_state", "train_step", "eval_step"):
        told = record["compile"][program]
        values = {stage: told[stage] for stage in ("trace_s", "lower_s", "compile_s", "cache_hit")}
        values |= {f"memory_{category}_bytes": count for category, count in told["memory"].items()}
        for name, value in values.items():
            assert shown[f"compile/{program}/{name}"] == pytest.approx({0: float(value)}, rel=1e-6)


def test_the_output_is_plain_lines_with_the_description_first(first):
    finished, workdir, _ = first
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f╭│╰━]", finished.output) is None
    lines = finished.output.splitlines()
    assert lines[0] == "A GPT small enough for a test."
    for label in ("devices", "mesh", "model", "attention", "data", "step", "memory", "workdir"):
        assert any(line.startswith(f"  {label}: ") for line in lines), label
    windows = [line for line in lines if re.match(r"step \d+/60  loss \d", line)]
    assert [line.split("/")[0] for line in windows] == [f"step {step}" for step in WINDOW_ENDS]
    assert all("tokens/s" in line and "MFU" not in line and line.endswith("left") for line in windows)
    closing = finished.output[finished.output.index("completed: step 60 of 60") :]
    assert re.search(r"validation: \d\.\d{4} nats/token, .* unigram entropy is \d\.\d{4} nats/token", closing)
    drawn = ("loss.png",) if importlib.util.find_spec("matplotlib") else ()
    for name in ("config.json", "record.json", "metrics.jsonl", "tensorboard/", "checkpoints/60/", *drawn):
        assert f"  written: {workdir}/{name}" in closing
        assert (workdir / name).exists()


def test_a_finished_run_is_left_as_it_is(trainer_command, second, read_run):
    _, workdir = second
    record, steps, evaluations = read_run(workdir)
    changes = ("--log-every-num-steps", 3, "--description", "Another word for it.")
    again = trainer_command.run("--workdir", workdir, *changes)
    assert again.status == 0, again.errors
    assert "resumed at step 60/60" in again.output
    assert "no step is left to make" in again.output
    after, steps_after, evaluations_after = read_run(workdir)
    assert (steps_after, evaluations_after) == (steps, evaluations)
    assert after["steps"] == record["steps"]
    assert [attempt["status"] for attempt in after["attempts"]] == ["completed"]
    assert after["evaluation"] == record["evaluation"]


@pytest.mark.usefixtures("heeds_sighup")
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_signal_saves_and_exits_75_and_the_same_command_goes_on(
    trainer_command, first, tmp_path, read_run, name
):
    # On a busy machine the signal may come after the last step: such a run shows nothing, and another one is started.
    # After SIGHUP the run isn't compared with an undisturbed one, so that it may be as long as it takes.
    num_steps = NUM_STEPS if name == "SIGTERM" else 100 * NUM_STEPS
    for attempt in range(5):
        workdir = tmp_path / str(attempt)
        arguments = ("--workdir", workdir, "--compilation.cache-dir", first[2], "--checkpoint.every-num-steps", 10_000)
        process = trainer_command.start(*arguments, "--num-steps", num_steps)
        wait_for(process, f"step 1/{num_steps}")
        if name == "SIGHUP":  # nobody reads any more
            process.stdout.close()
            process.stderr.close()
            process.stdout = process.stderr = None
        process.send_signal(signal.Signals[name])
        stopped = trainer_command.finish(process)
        record, steps, _ = read_run(workdir)
        if len(steps) < num_steps:
            break
    assert stopped.status == 75, stopped.errors
    if name != "SIGHUP":
        assert stopped.errors == ""
        finishing = rf"{name}: finishing (\d steps? \(about .*s\)|what is under way), then saving; Ctrl-C \(again\)"
        assert re.search(finishing, stopped.output)
        assert "run the same command again to go on" in stopped.output
    assert record["status"] == "preempted"
    assert record["step"] == len(steps) < num_steps
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == [str(record["step"])]
    if name == "SIGHUP":
        return  # from here on both are alike

    resumed = trainer_command.run(*arguments)
    assert resumed.status == 0, resumed.errors
    after, all_steps, evaluations = read_run(workdir)
    assert after["status"] == "completed"
    assert after["resumed_from"] == {"step": record["step"], "passed_over": {}}
    assert [attempt["status"] for attempt in after["attempts"]] == ["preempted"]
    _, expected_steps, expected_evaluations = read_run(first[1])
    assert [row["loss"] for row in all_steps] == [row["loss"] for row in expected_steps]
    assert evaluations == expected_evaluations


@pytest.mark.serial
def test_ctrl_c_while_compiling_leaves_at_once(trainer_command, tmp_path):
    process = trainer_command.start("--workdir", tmp_path / "run", "--compilation.cache-dir", tmp_path / "empty")
    wait_for(process, "workdir:")
    time.sleep(0.5)
    begun = time.perf_counter()
    process.send_signal(signal.SIGINT)
    stopped = trainer_command.finish(process, begun)
    assert stopped.status == 75
    assert stopped.seconds < 2
    assert "SIGINT: stopped before the first step" in stopped.output
    assert "Traceback" not in stopped.errors
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "preempted"


@pytest.mark.parametrize("before", ["pass", "stop._requested.set()"], ids=["alone", "another process's signal before"])
def test_a_second_ctrl_c_leaves_at_once_whatever_the_main_thread_does(before):
    # The main thread waits inside C, as it does while XLA compiles or steps, where no handler of Python's can run.
    script = (
        "import ctypes, os, time; from trainer.launch.signals import StopRequest\n"
        "def leave(): os.write(1, b'leaving\\n'); time.sleep(30)  # on a disk that hangs, for example\n"
        "with StopRequest(lambda name, _: os.write(1, f'{name}\\n'.encode()), leave) as stop:\n"
        f"    {before}\n"
        "    os.write(1, b'ready\\n'); ctypes.PyDLL(None); libc = ctypes.CDLL(None)\n"
        "    while True: libc.sleep(30)"
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None, "only Ctrl-C gives up what isn't saved yet"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "leaving\n"
    assert process.wait(timeout=10) == 130
    process.stdout.close()


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(trainer_command, first, tmp_path, read_run):
    workdir = tmp_path / "run"
    shutil.copytree(first[1], workdir)
    expected_record, expected_steps, expected_evaluations = read_run(workdir)
    newest = workdir / "checkpoints" / "60"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"\0" * largest.stat().st_size)
    held = {path.relative_to(newest): path.read_bytes() for path in newest.rglob("*") if path.is_file()}

    resumed = trainer_command.run("--workdir", workdir, "--compilation.cache-dir", first[2])
    assert resumed.status == 0, resumed.errors
    reason = f"{largest.relative_to(newest)} is not what was written"
    assert f"checkpoint {newest} is damaged ({reason}); it is kept" in resumed.output
    assert "resumed at step 40/60" in resumed.output
    assert resumed.errors == ""
    record, steps, evaluations = read_run(workdir)
    assert record["resumed_from"] == {"step": 40, "passed_over": {str(newest): reason}}
    assert [row["loss"] for row in steps] == [row["loss"] for row in expected_steps]
    assert evaluations == expected_evaluations
    assert record["evaluation"] == expected_record["evaluation"]
    aside = newest.with_name("60.damaged")
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == held
    assert sorted(path.name for path in newest.parent.iterdir()) == ["40", "60", "60.damaged"]


@pytest.mark.parametrize(
    "arguments",
    [("--mesh.data=64", "--batch-size=64"), ("--data.files", "no/such/*.txt"), ("--model.implementation", "cudnn")],
)
def test_what_only_devices_or_data_can_tell_is_a_mistake_too(trainer_command, tmp_path, arguments, capsys):
    assert main(["--config", str(trainer_command.config), "--workdir", str(tmp_path), *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, LocalMask(63, 0)),
        ({}, ScheduledWindow(16, 64, 10)),
        ({"keep_documents_apart": False}, LocalMask(63, 0)),
        ({"source": "trees"}, LocalMask(63, 0)),
    ],
    ids=["documents", "scheduled", "as one", "trees"],
)
def test_the_planned_attention_is_what_the_model_calls(trainer_command, monkeypatch, changes, window):
    """The plan is made from the config, ahead of tracing; here the tracing is watched, and must agree."""
    from kernels.attention import dispatch

    config = load_config(trainer_command.config)
    model = dataclasses.replace(
        config.model,
        masks=(CausalMask() & window, CausalMask()),
        layer_overrides=(LayerOverride(num_kv_heads=2), LayerOverride(rope_base=None, head_dim=8)),
        query_scale=0.3,
    )
    data = dataclasses.replace(config.data, **changes)
    config = dataclasses.replace(config, model=model, data=data)
    seen = []
    choose = dispatch.select_backend

    def watch(call, implementation=None):
        seen.append(call)
        return choose(call, implementation)

    monkeypatch.setattr(dispatch, "select_backend", watch)
    mesh = make_mesh(config.mesh)
    functions = make_step_functions(config, mesh)
    jax.eval_shape(functions.eval_step, functions.abstract_state.params, functions.abstract_batch, 0)
    device = mesh.devices.flat[0]
    assert set(seen) == set(attention_calls(config, Target.of(device)))
    plans = make_plan(config, mesh).attention
    assert {plan.mask for plan in plans} == {repr(mask) for mask in config.model.masks}
    assert [plan.to_json()["num_layers"] for plan in plans] == [1, 1]


def test_each_reason_to_pass_a_backend_over_is_told_once():
    tpu, odd = {"splash": "runs on tpu, not on gpu"}, {"triton": "needs one interval"}
    plans = [AttentionPlan("CausalMask()", 3, "triton", tpu), AttentionPlan("MaskFn(odd)", 1, "blockwise", tpu | odd)]
    assert describe_attention(plans) == [
        "triton for 3 layers of CausalMask()",
        "blockwise for 1 layer of MaskFn(odd)",
        "  splash passed over: runs on tpu, not on gpu",
        "  triton passed over for MaskFn(odd): needs one interval",
    ]
