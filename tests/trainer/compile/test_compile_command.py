"""`python -m trainer.compile`: what it says of a step, for this machine and devices that aren't there, and refuses."""

import dataclasses
import importlib.util
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_compiler import needs_gpu_compiler
from tests.host_cpus import environment_of_cpus
from tests.trainer.compile.step_profiles import make_profile
from trainer.cli.train_command import parse_command_line as parse_train_command
from trainer.compile.__main__ import DOES_NOT_FIT, main
from trainer.compile.changes import Changes
from trainer.compile.command.compile_command import parse_command_line
from trainer.compile.command.worker import CompileRequest, profile_in_fresh_process
from trainer.config.file import flag_types
from trainer.errors import TrainingFailed, UserMistake

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: the `tpu` extra, on Linux x86-64"
)
# For what XLA takes longest: optimising, on CPUs, and sorting many tokens for the embedding's gradient, on TPUs.
TINY = """
    from layers import GPTConfig
    from trainer.config import CompilationConfig, DataConfig, LossConfig, TrainConfig


    def get_config():
        print("making the config")
        return TrainConfig(
            name="tiny",
            description="A GPT small enough for a test.",
            num_steps=1000,
            sequence_length=128,
            batch_size=2,
            data=DataConfig(source="text", files=("/no/such/folder/*.txt",)),
            loss=LossConfig(chunk_size=128),
            compilation=CompilationConfig(cache_dir=""),
            model=GPTConfig(
                vocab_size=256, num_layers=4, width=64, num_heads=2, num_kv_heads=2, head_dim=32, mlp_width=128,
                implementation="reference",
            ),
        )
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config whose data doesn't exist."""
    path = tmp_path_factory.mktemp("compile") / "tiny.py"
    path.write_text(textwrap.dedent(TINY))
    return path


@pytest.fixture(autouse=True)
def fast_compilation_on_cpus(monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, environment_of_cpus(8)[name])


@pytest.fixture
def compile_step(config, tmp_path):
    """Runs the command, whose exit status must be the one told, and returns its JSON report."""

    def run(*arguments: object, page: Path | None = config, status: int = 0) -> dict[str, Any]:
        pages = [] if page is None else ["--config", page]
        output = tmp_path / "report.json"
        assert main([*map(str, [*pages, *arguments]), "--output", str(output)]) == status
        return json.loads(output.read_text())

    return run


def collectives_of(profile: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """What each collective sends, all of it exact. Parameters are gathered in each trip of the layers' scan."""
    collectives = {total["operation"]: total for total in profile["collectives"]}
    assert collectives.keys() >= {"all-gather", "all-reduce", *kinds}
    assert all(total["is_exact"] and total["bytes"] > 0 for total in collectives.values())
    assert collectives["all-gather"]["count"] >= collectives["all-gather"]["num_instructions"] + 2 * (4 - 1)
    return collectives


def refused(capsys, *arguments: object) -> str:
    """The one message of a command that is refused."""
    assert main([*map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_the_step_of_a_config_on_this_machine(config, compile_step, capsys):
    report = compile_step("--mesh.fsdp", 2, "--mesh.tensor", 2, "--mesh.context", 2)
    profile, printed = report["profile"], capsys.readouterr().out
    assert printed.count("making the config") == 1
    assert report["schema_version"] == 2
    assert report["command"][:5] == ["python", "-m", "trainer.compile", "--config", str(config)]
    assert set(report["versions"]) >= {"jax", "jaxlib", "libtpu", "flax"}
    assert report["config"]["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2, "context": 2} == profile["mesh"]
    assert (report["topology"], report.keys() & {"search", "comparison", "longest_context"}) == (None, set())
    assert profile["devices"] == {"platform": "cpu", "kind": "cpu", "count": 8, "used": 8}
    assert [plan["backend"] for plan in profile["attention"]] == ["reference"]
    assert profile["tensor"] == {"collectives": "xla", "xla_for": [], "passed_over": {}}
    assert profile["tokens_per_step"] == 256
    assert min(profile["compile"][stage] for stage in ("trace_s", "lower_s", "compile_s")) > 0
    assert profile["compile"]["cache_hit"] is False
    assert min(profile["program"].values()) > 100

    state, memory, verdict = profile["state"], profile["compile"]["memory"], profile["verdict"]
    # Two moments of every parameter, and some counters. fsdp, context and tensor split the parameters; the norms don't.
    assert 2 * state["parameters"] <= state["optimizer_state"] < 2 * state["parameters"] + 100
    assert profile["num_parameters"] / 2 <= state["parameters"] < 1.1 * profile["num_parameters"] / 2
    # Five arrays of int32, the token order among them, since the sequence is sharded; and the weights, of float32.
    assert state["batch"] == 6 * 4 * 256 // 4
    assert memory["arguments"] == pytest.approx(sum(state.values()), rel=0.05)
    assert (verdict["fits"], verdict["needed"]) == (True, memory["peak"])
    assert verdict["spare"] == verdict["available"]["size"] - verdict["needed"] > 0
    gathered = collectives_of(profile)["all-gather"]["count"]
    for line in ("  tensor: xla\n", "time: trace ", "verdict: fits", f"collectives: all-gather: {gathered:,} a step"):
        assert line in printed


def test_the_cache_is_used_as_the_config_says_and_told_of(compile_step, tmp_path, capsys):
    arguments = ("--compilation.cache-dir", tmp_path / "cache")
    assert [compile_step(*arguments)["profile"]["compile"]["cache_hit"] for _ in "12"] == [False, True]
    printed = capsys.readouterr().out
    assert "collectives: none" in printed
    assert "(read from the cache)" in printed


def test_a_step_that_does_not_fit_has_a_status_of_its_own(compile_step, capsys):
    assert DOES_NOT_FIT == 3
    report = compile_step("--batch-size", 2**20, "--model.remat", "none", "--search-seconds", 0, status=DOES_NOT_FIT)
    verdict = report["profile"]["verdict"]
    assert (verdict["fits"], verdict["is_refused"], "search" in report) == (False, False, False)
    assert verdict["spare"] < 0
    assert "verdict: does not fit: " in capsys.readouterr().out


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[str, ...]]:
    """The arguments of what was compiled, without compiling: a token needs one of the 100 bytes, one in ten with remat.

    Parameters and activations are those of the test's imagination; the command line is real.
    """
    requests = []

    def profile(request: CompileRequest):
        requests.append(request.arguments)
        made = parse_train_command(request.arguments).train
        if request.phase is not None:
            made = Changes(request.changes).apply(made.in_phases()[request.phase].config)
        needed = made.sequence_length // (1 if made.model.remat == "none" else 10)
        return dataclasses.replace(
            make_profile(needed, 1), num_parameters=made.model.num_parameters, tokens_per_step=made.sequence_length
        )

    monkeypatch.setattr("trainer.compile.command.run_task.profile_in_fresh_process", profile)
    return requests


def test_the_longest_context_is_found_and_told_with_its_flags(compile_step, compiled, capsys):
    report = compile_step("--longest-context", "--model.remat", "none", "--sequence-length", 128)
    longest = report["longest_context"]
    assert (longest["as_is"]["tokens"], longest["as_is"]["found"]) == (None, None), "128 are the fewest"
    # 1,009 tokens fit into 100 bytes of ten each; of the lengths in eighths of a power of two, 960 is the longest.
    flags = ["--sequence-length", "960", "--model.remat", "save_matmuls"]
    assert longest["changed"]["found"]["arguments"] == flags
    assert (longest["changed"]["tokens"], longest["changed"]["too_long"]) == (960, 1024)
    assert (longest["is_complete"], len(longest["tries"]), "search" in report) == (True, len(compiled), False)
    printed = capsys.readouterr().out
    assert "longest context as the config is: none (128 don't fit)\n" in printed
    assert f"longest context with changes: 960 tokens (1,024 don't fit):\n  {' '.join(flags)}\n" in printed
    assert f"tiny with {' '.join(flags)}\n" in printed


def test_no_context_that_fits_has_the_status_of_a_step_that_does_not(config, compiled, capsys):
    arguments = ["--config", str(config), "--longest-context", "--sequence-length", "4096", "--model.num-layers", "1"]
    assert main([*arguments, "--search-seconds", "1e-9"]) == DOES_NOT_FIT
    assert len(compiled) == 1
    assert "no context that fits was found\n" in capsys.readouterr().out


def test_pages_can_be_compared(config, compile_step, compiled, tmp_path, capsys):
    wider = tmp_path / "wider.py"
    wider.write_text(
        config.read_text().replace("width=64", "width=128").replace("sequence_length=128", "sequence_length=64")
    )
    pages = (str(config), str(wider))
    arguments = ("--compare", f"config={','.join(pages)}", "--batch-size", 1, "--model.remat", "full")
    report = compile_step(*arguments, page=None)
    assert report["comparison"]["field"] == "config"
    assert [variant["value"] for variant in report["comparison"]["variants"]] == [*pages]
    assert [each.count("--config") for each in compiled] == [1, 1]
    assert all("--batch-size" in each for each in compiled)
    few, many = (variant["profile"]["num_parameters"] for variant in report["comparison"]["variants"])
    assert few < many
    *printed, header, first, second = capsys.readouterr().out.splitlines()
    for page, num_tokens in ((config, 128), (wider, 64)):
        assert any(line.startswith(f"  {page}: ") and f"{num_tokens} tokens a step" in line for line in printed)
    assert header.split()[:4] == ["config", "trace", "lower", "XLA"]
    assert (first.split()[0], second.split()[0]) == pages
    assert "missing.py does not exist" in refused(capsys, "--compare", f"config={config},{tmp_path}/missing.py")


@pytest.fixture
def phased(config, tmp_path) -> Path:
    """The config in three phases. By the imagined need the first fits, and the others don't."""
    path = tmp_path / "phased.py"
    phases = (
        'phases=(Phase(num_steps=300), Phase(num_steps=400, sequence_length=512, batch_size=4, remat="none"), '
        "Phase(sequence_length=2048)),"
    )
    text = config.read_text().replace("num_steps=1000,", f"num_steps=1000, {phases}", 1)
    path.write_text(text.replace("LossConfig, TrainConfig", "LossConfig, Phase, TrainConfig"))
    return path


def test_every_phase_is_judged_and_the_first_that_does_not_fit_is_helped(compile_step, compiled, phased, capsys):
    report = compile_step(page=phased, status=DOES_NOT_FIT)
    judged = [(each["phase"], each["sequence_length"], each["profile"]["verdict"]["fits"]) for each in report["phases"]]
    assert judged == [(1, 128, True), (2, 512, False), (3, 2048, False)]
    search = report["search"]
    assert (search["phase"], search["found"]["arguments"]) == (2, [])
    assert search["found"]["phase_settings"] == {"phases[1].remat": "save_matmuls"}
    assert (len(compiled), search["found"]["profile"]["verdict"]["needed"]) == (4, 51)
    printed = capsys.readouterr().out
    assert "  phase 2 of 3, steps 301 to 700, 4 × 512 tokens: does not fit: 512 B for 100 B on each device" in printed
    assert "smallest single change that makes it fit:\n  phases[1].remat='save_matmuls'\n" in printed


def test_a_phase_alone(compile_step, compiled, phased):
    [only] = compile_step("--phase", 1, page=phased)["phases"]
    assert (only["phase"], only["last_step"]) == (1, 300)
    longest = compile_step("--phase", 2, "--longest-context", page=phased)["longest_context"]
    settings = {"phases[1].sequence_length": 960, "phases[1].remat": "save_matmuls"}
    assert longest["changed"]["found"]["phase_settings"] == settings
    assert (longest["phase"], longest["as_is"]["tokens"], longest["changed"]["tokens"]) == (2, None, 960)
    compared = compile_step("--phase", 1, "--compare", "model.num-layers=1,3", page=phased)["comparison"]
    few, many = (variant["profile"]["num_parameters"] for variant in compared["variants"])
    assert few < many


def test_the_compiling_process_takes_the_phase(phased):
    arguments = ("--config", str(phased), "--model.num-layers", "1")
    request = CompileRequest(arguments, None, phase=1, changes=(("sequence_length", 32), ("model.remat", "full")))
    assert profile_in_fresh_process(request).tokens_per_step == 4 * 32
    with pytest.raises(UserMistake, match="needs 16 device"):
        profile_in_fresh_process(dataclasses.replace(request, changes=(("mesh.context", 16),)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--longest-context",), "--longest-context expects one step, and tiny has those of 3 phases; --phase 1 to"),
        (("--compare", "model.remat=none,full"), "--compare expects one step, and tiny has those of 3 phases; "),
        (("--phase", "4"), "--phase 4 is none of the phases of tiny; use a number from 1 to 3"),
        (("--phase", "0"), "--phase 0 is none of the phases of tiny; use a number from 1 to 3"),
        (("--phase", "2", "--compare", "model.remat=none,full"), "expects a field that phase 2 takes from the run"),
    ],
)
def test_what_phases_refuse(phased, capsys, arguments, message):
    assert message in refused(capsys, "--config", phased, *arguments)


@pytest.mark.full
def test_any_field_can_be_compared(compile_step, tmp_path, capsys):
    cache = ("--compilation.cache-dir", tmp_path / "cache")
    comparison = compile_step("--compare", "model.num-layers=1,3", *cache)["comparison"]
    assert comparison["field"] == "model.num_layers"
    expected = [["--model.num-layers", number] for number in "13"]
    assert [variant["arguments"] for variant in comparison["variants"]] == expected
    few, many = (variant["profile"]["num_parameters"] for variant in comparison["variants"])
    assert few < many
    assert not (tmp_path / "cache").exists()  # each is compiled afresh
    *_, header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["model.num_layers", "trace", "lower", "XLA"]
    assert (first.split()[0], second.split()[0]) == ("1", "3")
    assert second.count("1.00×") == 4


@pytest.mark.full
@needs_libtpu
def test_what_is_offloaded_is_counted_on_the_host_and_is_not_on_the_device(compile_step, capsys):
    # Mostly parameters, few activations.
    sizes = ("--model.width", 256, "--model.mlp-width", 1024, "--model.num-layers", 8, "--sequence-length", 256)
    offloads = ("--model.remat", "offload_inputs", "--optimizer.offload-moments", True)
    report = compile_step("--topology", "v5p:2x2x1", "--mesh.fsdp", 2, *sizes, *offloads)
    state, memory = report["profile"]["state"], report["profile"]["compile"]["memory"]
    moments, inputs = 2 * state["parameters"], 8 * 256 * 256 * 2
    assert state["optimizer_state_on_host"] == moments
    assert state["optimizer_state"] < 100
    assert moments + inputs <= memory["host"] < 1.1 * (moments + inputs)
    assert memory["arguments"] < 1.1 * state["parameters"]
    # The gradients, the matrices in bfloat16, and no more than some layers' moments.
    assert memory["temporaries"] < 1.5 * state["parameters"] + moments / 4
    assert "memory: on the host" in capsys.readouterr().out


@needs_libtpu
def test_a_slice_of_tpus_that_are_not_there(compile_step, tmp_path, capfd):
    mesh = ("--mesh.fsdp", 2, "--mesh.context", 2, "--model.implementation", "splash")
    report = compile_step("--topology", "v5p:2x2x1", "--compilation.cache-dir", tmp_path / "cache", *mesh)
    profile = report["profile"]
    assert profile["devices"] == {"platform": "tpu", "kind": "TPU v5", "count": 4, "used": 4}
    assert [plan["backend"] for plan in profile["attention"]] == ["splash"]
    assert (profile["verdict"]["fits"], profile["verdict"]["available"]["size"]) == (True, round(95.74 * 2**30))
    collectives_of(profile, "reduce-scatter")  # libtpu doesn't state the trips of a loop; they are read from it
    assert profile["state"]["parameters"] == pytest.approx(4 * profile["num_parameters"] / 4, rel=0.1)
    told = capfd.readouterr()
    assert told.err == ""  # nothing of libtpu's
    assert "4 × TPU v5 (tpu) of v5p:2x2x1" in told.out
    assert not (tmp_path / "cache").exists()


@pytest.mark.full
@needs_gpu_compiler
def test_hosts_of_gpus_that_are_not_there(compile_step, capfd, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    profile = compile_step("--topology", "h200:2x2", "--mesh.fsdp", 2, "--mesh.context", 2)["profile"]
    assert profile["devices"] == {"platform": "gpu", "kind": "NVIDIA H200", "count": 4, "used": 4}
    assert (profile["verdict"]["fits"], profile["verdict"]["available"]["size"]) == (True, round(0.5 * 139.8 * 2**30))
    collectives_of(profile)
    assert profile["state"]["parameters"] == pytest.approx(4 * profile["num_parameters"] / 4, rel=0.1)
    assert "4 × NVIDIA H200 (gpu) of h200:2x2" in capfd.readouterr().out


@pytest.mark.full
@needs_gpu_compiler
@pytest.mark.jax_0_11
def test_two_gpus_reach_each_others_memory(config, compile_step, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    two_gpus = ("--topology", "h200:2", "--mesh.tensor", 2, "--sequence-length", 256)
    two_gpus += ("--model.num-layers", 3, "--model.head-dim", 64, "--model.remat", "none", "--model.scan-layers", False)
    profile = compile_step(*two_gpus)["profile"]
    assert profile["tensor"]["collectives"] == "mosaic_gpu"
    assert "  tensor: mosaic_gpu\n" in capsys.readouterr().out
    collectives = {total["operation"]: total for total in profile["collectives"]}
    # Attention and MLP gather tokens and sum products, forward and backward: [2, 256, 64] in bfloat16.
    kernels = ("all_gather_matmul", "matmul_reduce_scatter")
    for kind in kernels:
        assert (collectives[kind]["count"], collectives[kind]["bytes"]) == (3 * 4, 3 * 4 * 2 * 256 * 64 * 2)

    by_xla = compile_step(*two_gpus, "--tensor.collectives", "xla")["profile"]
    assert not {total["operation"] for total in by_xla["collectives"]} & {*kernels}
    assert "  tensor: xla\n" in capsys.readouterr().out
    wish = ("--sequence-length", 144, "--tensor.collectives", "mosaic_gpu")
    assert refused(capsys, "--config", config, *two_gpus, *wish).startswith(
        "error: --tensor.collectives='mosaic_gpu' can't serve: it takes a GPU's tokens in multiples of 128, "
    )


@pytest.mark.full
@needs_libtpu
@pytest.mark.timeout(600)
def test_too_big_gets_the_verdict_and_a_change_that_fits(compile_step, capsys):
    too_big = ("--model.num-layers", 500, "--model.width", 512, "--model.mlp-width", 2048)
    report = compile_step("--topology", "v5e:2x2", *too_big, status=DOES_NOT_FIT)
    verdict, search = report["profile"]["verdict"], report["search"]
    assert (verdict["fits"], verdict["is_refused"]) == (False, True)
    assert verdict["needed"] > verdict["available"]["size"] == round(15.75 * 2**30)
    assert (report["profile"]["program"], report["profile"]["collectives"]) == (None, [])
    # What it is short of is state, of which other activations are no part.
    assert [(attempt["arguments"], attempt["fits"]) for attempt in search["tries"]] == [
        (["--model.remat", "offload_attention"], False),
        (["--model.remat", "offload_inputs"], False),
        (["--optimizer.offload-moments", "True"], True),
    ]
    assert search["found"]["arguments"] == ["--optimizer.offload-moments", "True"]
    assert search["is_complete"]
    changed = search["found"]["profile"]
    assert (changed["devices"]["used"], changed["verdict"]["fits"]) == (1, True)
    assert changed["state"]["optimizer_state"] < 0.01 * report["profile"]["state"]["optimizer_state"]
    printed = capsys.readouterr().out
    assert "devices: 1 × TPU v5 lite (tpu) of v5e:2x2, which has 4" in printed
    assert "verdict: does not fit: libtpu refused it" in printed
    assert "smallest single change that makes it fit:\n  --optimizer.offload-moments True\n" in printed


@needs_libtpu
def test_a_page_is_made_for_the_tpu_compiled_for():
    arguments = ["--config", "experiments/gpt_32k.py"]
    there, here = (
        parse_command_line([*arguments, *topology]).options.train for topology in (["--topology", "v5p:2x2x1"], [])
    )
    assert (there.model.num_layers, there.model.vocab_size) == (12, 50_304)
    assert here.model.vocab_size == 320


def of_libtpu(topology: str, *arguments: str, told: str):
    return pytest.param(("--topology", topology, *arguments), told, marks=needs_libtpu)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v9:2x2"), "unknown topology 'v9:2x2'; expected a TPU generation and the shape of a slice"),
        (("--topology", "h100:16"), "topology 'h100:16': a host has at most 8 GPUs, got 16; name the hosts and"),
        (("--mesh.fsdp", "16", "--batch-size", "16"), "the mesh data=1 × fsdp=16 × tensor=1 × context=1 needs 16 dev"),
        (("--model.num-layer", "2"), "unknown option --model.num-layer; did you mean --model.num-layers?"),
        (("--topolgy", "v5e:2x2"), "unknown option --topolgy; did you mean --topology?"),
        (("--search-seconds", "long"), "--search-seconds: invalid float value: 'long'"),
        (("--model.remat", "ful"), "model.remat='ful': 'ful' is not one of none, "),
        (("--compare", "model.remat=none"), "--compare model.remat=none: expected a field and two or more values"),
        (("--compare", "modle.remat=none,full"), "the config has no field modle.remat; did you mean model.remat?"),
        (("--compare", "model.remat=none,ful"), "model.remat='ful': 'ful' is not one of none, "),
        (("--compare", "model.implementation=cudnn,reference"), "implementation='cudnn' can't serve this call: runs"),
        (("--output", "no/such/folder/report.json"), "--output no/such/folder/report.json can't be written"),
        (("--output", "x" * 300), f"--output {'x' * 300} can't be written"),
        (("--search-seconds", "nan"), "--search-seconds nan must not be negative"),
        (("--longest-context", "yes"), "--longest-context: expected True or False, or nothing, got 'yes'"),
        (("--longest-context", "--compare", "model.remat=none,full"), "--longest-context doesn't go with --compare"),
        (("--longest-context", "--search-seconds", "0"), "--longest-context doesn't go with --search-seconds 0"),
        (("--phase", "1"), "--phase 1 expects a run with phases, and tiny has none; leave it out"),
        (("--compare", "config=a.py,b.py"), "--compare names the pages already; leave --config "),
        of_libtpu("v5p:3x3x1", told="topology 'v5p:3x3x1': libtpu knows none of this shape"),
        of_libtpu("v5p:2x2x1", "--mesh.fsdp=8", "--batch-size=8", told="needs 8 device(s), got 4 (tpu)"),
        of_libtpu("v5p:2x2x1", "--mesh.data=3", "--batch-size=3", told="their product is a power of two"),
    ],
)
def test_mistakes_are_one_message(config, capsys, arguments, message):
    assert message in refused(capsys, "--config", config, *arguments)


def test_no_config_names_the_program(capsys):
    assert refused(capsys) == (
        "error: --config FILE is missing; for example: python -m trainer.compile --config experiments/smoke.py; "
        "python -m trainer.compile --config lists the pages\n"
    )


def test_help_lists_the_options_and_every_field(config, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(config), "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    options = ["topology", "output", "compare", "phase", "longest-context", "search-seconds"]
    names = [*options, *(name.replace("_", "-") for name in flag_types())]
    assert [name for name in names if f"--{name}" not in printed] == []


@pytest.mark.parametrize(
    ("library", "topology", "told"),
    [
        ("libtpu", "v5p:2x2x1", r'pip install -e "\.\[tpu\]"'),
        ("cuda", "h100:8", r"--topology h100:8 needs JAX's plugin .*pip install jax-cuda13-plugin==[\d.]+ nv"),
    ],
)
def test_a_compiler_that_is_missing_is_told_with_what_installs_it(config, capsys, monkeypatch, library, topology, told):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if library in name else find(name, *rest))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert re.search(told, refused(capsys, "--config", config, "--topology", topology))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "import os, sys; os.write(2, b'F1121 x.cc:1] Check failed: a == b\\n'); os.abort()",
            "status -6.*Check failed: a",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed; most likely this machine's memory"),
        ("import posix; posix._exit(7)", "the compiler crashed .status 7."),
    ],
)
def test_a_compiler_that_dies_leaves_a_message(tmp_path, code, told):
    path = tmp_path / "dying.py"
    path.write_text(f"def get_config():\n    {code}\n")
    with pytest.raises(TrainingFailed, match=told):
        profile_in_fresh_process(CompileRequest(("--config", str(path)), None))


def test_standard_error_is_passed_on_less_libtpus_noise(config, tmp_path, capsys):
    path = tmp_path / "talking.py"
    talk = "import os; os.write(2, b'Failed to find host bounds for accelerator type: WARNING\\nheard\\n')"
    path.write_text(f"{talk}\n{config.read_text()}")
    profile_in_fresh_process(CompileRequest(("--config", str(path)), None))
    assert capsys.readouterr().err == "heard\n"


def test_the_command_itself_starts_no_device(config, capsys, monkeypatch):
    # JAX fails at its first device if it is told to use a platform that doesn't exist, and says so from where it is.
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    assert main(["--config", str(config)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: JAX can't start its devices: ")
    assert "Traceback" not in said
