"""Profiles a training step in a fresh process: the asking side and the worker.

A fresh process keeps a compilation from using another's caches, and its memory can be measured. If the compiler crashes
(libtpu ends the process when one of its checks fails), the asking process can say so. It starts no device itself.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.compile.changes import Changes
from trainer.compile.step_profile import StepProfile, profile_step
from trainer.compile.topology import Topology
from trainer.errors import TrainingFailed, UserMistake
from trainer.hardware import expected_platform


@dataclass(frozen=True)
class CompileRequest:
    """A program for the worker to compile."""

    arguments: tuple[str, ...]
    """`--config FILE` and the overrides, as on a command line."""
    topology: Topology | None
    """None: the local devices."""
    use_cache: bool = True
    """False: the persistent cache is off, whatever the config says. It is never used for a topology: JAX
    (0.10.2 to 0.12) can write the program of a device that isn't attached, but can't read it."""
    phase: int | None = None
    """The phase to compile, from 0; None: the run has no phases."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the phase's config that are set to other values."""


# What libtpu says on standard error wherever there is no TPU, and JAX's GPU plugin where there is no driver.
_NOISE = re.compile(
    r"Failed to find host bounds|could not determine TPU accelerator type|absl::InitializeLog"
    r"|Could not find cuda drivers"
)


def profile_in_fresh_process(request: CompileRequest) -> StepProfile:
    """Calls `profile_step` in a new process. Its standard error is passed on, without the compilers' noise.

    Raises:
      UserMistake, TrainingFailed: as `profile_step`; also TrainingFailed if the process dies.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-compile-") as folder:
        answer = Path(folder) / "answer"
        finished = subprocess.run(
            [sys.executable, "-m", "trainer.compile.command.worker", str(answer)],
            input=pickle.dumps(request),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # what a config file prints was printed when the command was read
            env=_environment(request.topology),
            check=False,
        )
        said = [line for line in finished.stderr.decode(errors="replace").splitlines() if not _NOISE.search(line)]
        if said:
            print("\n".join(said), file=sys.stderr, flush=True)
        if finished.returncode:
            raise TrainingFailed(_describe_death(finished.returncode, said))
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def _environment(topology: Topology | None) -> dict[str, str]:
    # A compilation needs no arrays, and a run on the same GPU may need the memory.
    defaults = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if topology is None and expected_platform() == "cpu":
        defaults["JAX_PLATFORMS"] = "cpu"  # otherwise JAX asks libtpu, if it is installed, which complains
    return defaults | dict(os.environ) | (topology.environment() if topology else {})


def _describe_death(status: int, said: list[str]) -> str:
    if -status == signal.SIGKILL:
        return "the compiling process was killed; most likely this machine's memory was too small for it"
    # libtpu goes on with a list of addresses.
    check = next((line for line in said if "Check fail" in line), said[-1] if said else "it said nothing")
    return f"the compiler crashed (status {status}): {check[:300]}"


def main(answer: Path) -> None:
    """The worker: reads the request from standard input, and writes the profile or the error to a file."""
    from trainer.cli.train_command import parse_command_line
    from trainer.compile.persistent_cache import use_compilation_cache
    from trainer.hardware import compiling_for

    request: CompileRequest = pickle.load(sys.stdin.buffer)
    result: StepProfile | Exception
    try:
        with compiling_for(request.topology.platform if request.topology else None):
            config = parse_command_line(request.arguments).train
        use_cache = request.use_cache and request.topology is None
        use_compilation_cache(config.compilation.cache_dir if use_cache else "")
        devices = request.topology.devices() if request.topology else None
        if request.phase is None:
            result = profile_step(config, devices)
        else:
            phase = config.in_phases()[request.phase]
            changed = Changes(request.changes).apply(phase.config)
            result = profile_step(changed, devices, schedule_from=phase.schedule_from)
    except (UserMistake, TrainingFailed) as error:
        result = error
    answer.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
