"""Out of memory: told from other errors by genuine messages, and explained by what ran, what there is, what helps."""

import dataclasses
import json
import re
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask
from trainer.checkpoints.training_state import Checkpoints
from trainer.compile.out_of_memory import OutOfMemory, explained, reason_of, running
from trainer.compile.programs import CompiledSteps, compile_steps
from trainer.compile.stages import CompileReport, MemoryReport
from trainer.config import SamplesConfig
from trainer.config.file import load_config
from trainer.errors import TrainingFailed, UserMistake
from trainer.train import train
from trainer.workdir import claim_workdir

# As reported, with what follows in the first lines.
GENUINE = {
    # github.com/jax-ml/jax/issues/13428
    "GPU": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.\n"
    "BufferAssignment OOM Debugging.\nBufferAssignment stats:\n             parameter allocation:    6.00MiB\n",
    # github.com/google-deepmind/jax_privacy/issues/10
    "GPU, a single buffer": "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on "
    "device ordinal 0",
    # github.com/huggingface/diffusers/issues/8358
    "TPU, a single buffer": "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 4.39G. "
    "That was not possible. There are 2.30G free.; (0x0x0_HBM0)",
    # github.com/pytorch/xla/issues/1965
    "TPU, a program": "RESOURCE_EXHAUSTED: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve 3.95G at the "
    "bottom of memory. That was not possible. There are 1.92G free, 0B reserved, and 1.92G reservable.; \n"
    "HBM capacity 8.00G:\n",
    # github.com/LargeWorldModel/LWM/issues/60
    "TPU, compiling": "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21.95G of 15.48G hbm.\n Exceeded hbm capacity by 6.47G.\n\nTotal hbm usage >= 22.47G:\n",
    # github.com/EnzymeAD/Enzyme-JAX/pull/2422
    "TPU, compiling, of late": "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out "
    "of memory in memory space hbm. Used 215.17G of 31.25G hbm. Exceeded hbm capacity by 183.92G.",
    # jaxlib 0.10.2
    "CPU": "RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes.",
}
OTHERS = {
    "a kernel's tiles on a TPU": "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 32.42M of "
    "16.00M vmem.",
    "a kernel's tiles on a GPU": "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 264192, available: "
    "232448\nwhile allocating buffers",
    "a defect": "INTERNAL: Mosaic failed to compile TPU kernel: Unsupported",
    "another quota": "RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)",
}


@pytest.mark.parametrize("name", GENUINE)
@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])  # which transfers raise
def test_genuine_messages_are_known(name, kind):
    reason = reason_of(kind(GENUINE[name]))
    assert reason is not None
    assert GENUINE[name].startswith(reason.split(". ")[0].split(": ")[0])
    assert "\n" not in reason
    assert "BufferAssignment" not in reason
    with pytest.raises(OutOfMemory) as caught, running("outer"), running("train_step"):
        raise kind(GENUINE[name])
    assert (caught.value.program, caught.value.reason, caught.value.on_host) == ("train_step", reason, False)


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_stay_what_they_are(name):
    error = jax.errors.JaxRuntimeError(OTHERS[name])
    with pytest.raises(jax.errors.JaxRuntimeError) as caught, running("train_step"):
        raise error
    assert caught.value is error
    for told in (UserMistake(GENUINE["GPU"]), TrainingFailed(GENUINE["GPU"]), OSError(GENUINE["GPU"])):
        assert reason_of(told) is None, "a message, which was made for people"


def test_real_errors_of_this_machine_are_known():
    told = "init_state: RESOURCE_EXHAUSTED: Out of memory"
    with pytest.raises(OutOfMemory, match=told) as caught, running("init_state"):
        jax.block_until_ready(jax.jit(lambda x: jnp.broadcast_to(x, (2**25, 2**25)) + x)(1.0))
    assert not caught.value.on_host
    with pytest.raises(OutOfMemory, match="Unable to allocate") as caught, running("restoring"):
        np.ones((2**25, 2**25))
    assert caught.value.on_host


@pytest.fixture
def config(trainer_command):
    config = load_config(trainer_command.config)
    model = dataclasses.replace(config.model, num_layers=1, masks=(CausalMask(),))
    return dataclasses.replace(config, model=model, sequence_length=64)


SEARCH = "the smallest change with which the step fits is found by: python -m trainer.compile"
LONGEST = "the longest context that fits, by the same with --longest-context"
AGAIN = "then run the same command with it: it goes on from the newest checkpoint, if there is one"


def test_a_step_that_is_too_large_ends_the_run_with_one_message(config, tmp_path, monkeypatch):
    class TrainStep:
        is_compiling = False

        def __call__(self, *_):
            raise jax.errors.JaxRuntimeError(GENUINE["GPU"])

    memory = MemoryReport(arguments=3_000, outputs=2_000, aliased=1_500, temporaries=70_000, code=100, peak=73_600)
    report = CompileReport("train_step", 0.0, 0.0, 0.0, cache_hit=False, memory=memory)
    programs = CompiledSteps(lambda: jnp.zeros(()), TrainStep(), TrainStep(), (report,))
    monkeypatch.setattr("trainer.loop.training_loop.compile_steps", lambda *_, **__: programs)
    workdir = claim_workdir(tmp_path, config)
    command = ["python", "-m", "trainer", "--config", "a page.py", "--workdir", str(tmp_path), "--seed", "1"]
    with pytest.raises(TrainingFailed) as caught:
        train(config, workdir, command=command, started=time.perf_counter())
    record = json.loads(workdir.record.read_text())
    assert (record["status"], record["message"]) == ("failed", str(caught.value))
    refused, needed, there_is, *remedies = str(caught.value).split("\n  ")
    assert refused == (
        "train_step: out of memory on cpu: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes."
    )
    assert needed == (
        "it needs 73.6 kB on each device: arguments 3.0 kB, outputs 2.0 kB (1.5 kB written over arguments), "
        "temporaries 70.0 kB, code 100 B"
    )
    assert re.fullmatch(r"there is [\d.]+ [GT]B on each device \(this machine's\)", there_is)
    assert remedies == [f"{SEARCH} --config 'a page.py' --seed 1", LONGEST, AGAIN]


def explain(config, error: OutOfMemory) -> list[str]:
    with pytest.raises(TrainingFailed) as caught, explained(config, [], {}):
        raise error
    return str(caught.value).split("\n  ")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("eval_step", ["what helps: a smaller --loss.chunk-size, a larger --gradient-accumulation, or more"]),
        ("sampling", ["what helps: fewer or shorter samples.prompts, a smaller --samples.num-tokens, or"]),
        ("init_state", [f"{SEARCH} --config FILE", LONGEST]),
        ("restoring", [f"{SEARCH} --config FILE", LONGEST]),
    ],
)
def test_each_program_is_told_what_helps_it(config, program, told):
    *_, remedy = lines = explain(config, OutOfMemory(program, GENUINE["CPU"], on_host=False))
    assert remedy == AGAIN
    assert all(line.startswith(start) for line, start in zip(lines[-1 - len(told) : -1], told, strict=True))


def test_what_a_compiler_or_the_host_refuses_is_told(config):
    lines = explain(config, OutOfMemory("train_step", GENUINE["TPU, compiling"], on_host=False))
    assert lines[1] == "it needs about 23.6 GB on each device, by the compiler's estimate"
    lines = explain(config, OutOfMemory("train_step", "Unable to allocate 8.00 PiB", on_host=True))
    assert lines[0] == "train_step: this machine is out of memory: Unable to allocate 8.00 PiB"
    assert re.fullmatch(r"there is [\d.]+ [GT]B; this process held [\d.]+ [MG]B at its peak", lines[1])
    assert "--data.num-prefetch-batches 4" in lines[2]
    (first, *_) = explain(config, MemoryError())
    assert first == "the run: this machine is out of memory: Python got no memory for an object"


@pytest.mark.parametrize(
    ("program", "where"),
    [
        ("restoring", "trainer.checkpoints.training_state.Checkpoints.restore_newest"),
        ("init_state", None),
        ("eval_step", "trainer.loop.evaluator.evaluate"),
        ("sampling", "trainer.sample.during_training.Samples.write"),
    ],
)
def test_the_run_names_what_ran(config, tmp_path, monkeypatch, program, where):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(GENUINE["CPU"])

    config = dataclasses.replace(config, num_steps=3, samples=SamplesConfig(prompts=("a",), num_tokens=1))
    if where is None:
        programs = SimpleNamespace(init_state=fail)
        monkeypatch.setattr("trainer.loop.training_loop.compile_steps", lambda *_, **__: programs)
    else:
        monkeypatch.setattr(where, fail)
    with pytest.raises(TrainingFailed, match=f"^{program}: out of memory on cpu: RESOURCE_EXHAUSTED"):
        train(config, claim_workdir(tmp_path, config), command=[], started=time.perf_counter())


def test_a_checkpoint_that_memory_is_too_small_for_is_not_called_unreadable(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError(GENUINE["TPU, a single buffer"])

    checkpoints = Checkpoints(tmp_path, num_kept=1)
    state = {"x": jnp.ones(3)}
    checkpoints.save(1, state, {"tokenizer": "byte"})
    checkpoints.wait()
    monkeypatch.setattr(checkpoints._orbax, "restore", fail)
    with pytest.raises(OutOfMemory, match="Attempting to allocate 4"), running("restoring"):
        checkpoints.restore_newest(lambda _: state)
    checkpoints.close()


@pytest.mark.parametrize("name", ["init_state", "train_step", "eval_step"])
def test_a_compilation_that_is_refused_is_named(monkeypatch, name):
    def compile_in_stages(*_, **named):
        if named["name"] == name:
            raise jax.errors.JaxRuntimeError(GENUINE["TPU, compiling"])
        return None, None

    monkeypatch.setattr("trainer.compile.programs.compile_in_stages", compile_in_stages)
    monkeypatch.setattr("trainer.compile.programs.RecompilingFunction", compile_in_stages)
    with pytest.raises(OutOfMemory) as caught:
        compile_steps(MagicMock(), with_init=True, on_recompile=print)
    assert caught.value.program == name
