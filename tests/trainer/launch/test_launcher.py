"""How a process learns that there are others, and the example launch files."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from trainer.cli.train_command import parse_command_line
from trainer.compile.__main__ import main as compile_main
from trainer.errors import UserMistake
from trainer.export.__main__ import main as export_main
from trainer.launch.launcher import Launch, describe_launcher, find_launch
from trainer.launch.process_exit import PEER_LOST, PREEMPTED, STALLED
from trainer.sample.__main__ import main as sample_main

LAUNCH = Path(__file__).parents[3] / "experiments" / "launch"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("distributed", "environ", "launch"),
    [
        ("auto", {}, None),
        ("auto", SLURM, Launch()),
        ("auto", SLURM | {"SLURM_NTASKS": "1"}, None),
        ("auto", {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),
        ("auto", {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, Launch()),
        ("auto", {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ("auto", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, None),
        ("on", {}, Launch()),
        ("off", SLURM, None),
        ("10.0.0.1:9876,2,1", SLURM, Launch("10.0.0.1:9876", 2, 1)),
        ("[::1]:9876,2,0", {}, Launch("[::1]:9876", 2, 0)),
        ("node:9876,1,0", {}, None),
    ],
)
def test_the_launch_follows_from_the_flag_and_the_environment(distributed, environ, launch):
    assert find_launch(distributed, environ) == launch


@pytest.mark.parametrize(
    ("distributed", "reason"),
    [
        ("yes", "expected auto, on, off or HOST:PORT,PROCESSES,INDEX, got 'yes'"),
        ("node:1", "expected auto, on, off or HOST:PORT,PROCESSES,INDEX, got 'node:1'"),
        *(
            (f"{address},2,{index}", f"--distributed: expected HOST:PORT with a port from 1 to 65535.*{address!r}")
            for index in (0, 1)
            for address in (
                *("127.0.0.1:0", "node:99999", "node:65536", "node:00000", "node", "node:", ":9876", "::1:9876"),
                *("[::1]", "[]:9876", "http://node:9876", "a b:9876", "node:٣", "node:+1", "node:-1"),
            )
        ),
        ("node:1,2", "expected auto, on, off"),
        ("node:1,2,2", "of 2 processes the indices are 0 to 1, got 2"),
        ("node:1,0,0", "expected at least 1 process, got 0"),
    ],
)
def test_anything_else_is_refused(distributed, reason):
    start, _, end = reason.partition(".*")
    with pytest.raises(UserMistake, match=f"{re.escape(start)}.*{re.escape(end)}"):
        find_launch(distributed, {})


@pytest.mark.parametrize("name", ["JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"])
def test_an_address_in_the_environment_must_be_one_too(name):
    for distributed, environ in (("auto", SLURM), ("on", {})):
        assert find_launch(distributed, environ | {name: "[fe80::1%eth0]:65535"}) == Launch()
        with pytest.raises(UserMistake, match=f"{name}: expected HOST:PORT with a port from 1 to 65535.*'node0:0'"):
            find_launch(distributed, environ | {name: "node0:0"})
    assert find_launch("off", {name: "node0:0"}) is find_launch("auto", {name: "node0:0"}) is None


@pytest.mark.parametrize("main", [sample_main, compile_main, export_main])
def test_commands_for_one_process_refuse_several(main, monkeypatch, capsys):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert main(["--config", "nothing.py"]) == 2
    assert "is built for one process, and was started by SLURM, 2 tasks" in capsys.readouterr().err
    assert describe_launcher(SLURM) == "SLURM, 2 tasks"


def test_the_slurm_file_is_shell_and_its_flags_exist(monkeypatch):
    file = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", file], check=True)
    text = re.sub(r"^\s*#.*$", "", file.read_text(), flags=re.MULTILINE)
    mesh = text.partition("MESH=(")[2].partition(")")[0]
    command = text.partition("-m trainer")[2].partition('"$@"')[0].replace('"${MESH[@]}"', mesh).replace("\\\n", " ")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # the page refuses CPUs
    read = parse_command_line(["--config", "experiments/gpt_1b_32k.py", *shlex.split(command)])
    assert read.train.mesh.fsdp * read.train.mesh.context == 16
    assert read.distributed == "auto"
    assert f"{PEER_LOST} | {STALLED} | {PREEMPTED}) scontrol requeue" in text


def test_the_kubernetes_file_starts_two_processes_with_flags_that_exist(monkeypatch):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert service["kind"] == "Service"
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    container = pod["containers"][0]
    ignored = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert ignored == [[2], [PEER_LOST, STALLED, PREEMPTED]]
    command = container["command"][2].replace("$PROCESSES", container["env"][0]["value"])
    words = shlex.split(command.replace("$JOB_COMPLETION_INDEX", "1"))
    assert words[:5] == ["exec", "python", "-u", "-m", "trainer"]
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # the page refuses CPUs
    read = parse_command_line(words[5:])
    assert read.train.mesh.fsdp * read.train.mesh.context == 16
    name, port = job["metadata"]["name"], container["ports"][0]["containerPort"]
    assert find_launch(read.distributed, {}) == Launch(f"{name}-0.{pod['subdomain']}:{port}", 2, 1)
