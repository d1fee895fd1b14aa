"""Mistakes end in one readable message, soon, and before any device starts; everything else reaches the config."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from kernels import CausalMask, LocalMask, PrefixMask, TritonTiles, TritonTuning
from trainer.cli.train_command import parse_command_line
from trainer.compile.command.compile_command import parse_command_line as parse_compile_command
from trainer.config.file import config_from_json, config_to_json, flag_types, load_config
from trainer.errors import UserMistake, name_flags
from trainer.hardware import expected_platform
from trainer.sample.sample_command import parse_command_line as parse_sample_command
from trainer.workdir import claim_workdir


def refusal(*arguments: object) -> str:
    with pytest.raises(UserMistake) as caught:
        parse_command_line([str(argument) for argument in arguments])
    return str(caught.value)


@pytest.fixture
def config_file(tmp_path):
    """Writes a config file from its text."""

    def write(text: str):
        path = tmp_path / "experiment.py"
        path.write_text(text)
        return path

    return write


def run_python(script: str, **environment: str) -> str:
    """What a script prints, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optimizer.learning-rat", "1"],
            "unknown option --optimizer.learning-rat; did you mean --optimizer.learning-rate?",
        ),
        (["--config", "experiments/no_such_file.py"], "config experiments/no_such_file.py does not exist"),
        (["--mesh.context", "3"], "sequence_length=256 is not a multiple of --mesh.context=3"),
        (
            ["--model.num-heads", "3", "--model.num-kv-heads", "2"],
            "--model.num-heads=3 is not a multiple of --model.num-kv-heads=2",
        ),
    ],
)
def test_the_command_stops_with_one_message_and_status_2(trainer_command, tmp_path, arguments, message):
    finished = trainer_command.run("--workdir", tmp_path / "run", *arguments)
    assert finished.status == 2
    assert finished.errors.startswith(f"error: {message}")
    assert finished.errors.count("\n") == 1
    assert finished.output == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.serial
def test_the_command_refuses_a_workdir_that_it_cannot_write(trainer_command, tmp_path):
    (tmp_path / "file").write_text("")
    finished = trainer_command.run_alone("--workdir", tmp_path / "file" / "run")
    assert finished.status == 2
    assert finished.errors == (
        f"error: workdir {tmp_path}/file/run can't be written: Not a directory; choose another with --workdir\n"
    )
    assert finished.seconds < 5


def test_no_device_starts_while_the_command_is_checked(trainer_command, tmp_path):
    # JAX fails at its first device if it is told to use a platform that doesn't exist.
    script = (
        "import sys; from trainer.cli.train_command import parse_command_line\n"
        "from trainer.workdir import claim_workdir\n"
        f"command = parse_command_line(['--config', {str(trainer_command.config)!r}, '--workdir', {str(tmp_path)!r}])\n"
        "claim_workdir(command.workdir, command.train)\n"
        "print(sorted({'flax', 'orbax', 'grain'} & sys.modules.keys()))"
    )
    assert run_python(script, JAX_PLATFORMS="no_such_platform") == "[]\n"


def test_every_field_of_every_section_is_a_flag(trainer_command, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--config", str(trainer_command.config), "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    names = list(flag_types())
    assert {"num_steps", "model.rope_scaling.factor", "optimizer.learning_rate", "compilation.cache_dir"} <= set(names)
    assert [name for name in names if f"--{name.replace('_', '-')}" not in printed] == []
    assert "Peak learning rate." in printed


def test_help_needs_no_config_and_requires_nothing_else(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed.count("(required)") == 1, "--config alone"
    assert "Where the run's files go. (default: runs/NAME)" in printed
    assert printed.count("from-config") == 2, "--name and --num-steps"


def test_help_opens_with_the_flags_that_people_use(capsys):
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    opening = capsys.readouterr().out.partition("-h, --help")[0]
    shown = [line.split()[0] for line in opening.splitlines() if line.startswith("  --")]
    assert len(shown) == 13
    assert {flag.removeprefix("--").replace("-", "_") for flag in shown} <= {
        "config",
        "workdir",
        "resume",
        *flag_types(),
    }


@pytest.mark.parametrize("parse", [parse_command_line, parse_compile_command, parse_sample_command])
def test_version_is_told_whatever_else_is_asked(parse, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--version", "--no-such-flag"])
    assert caught.value.code == 0
    assert re.fullmatch(r"flax-longcontext .+, jax \d.+, flax \d.+\n", capsys.readouterr().out)


def test_flags_override_the_config_file(trainer_command, tmp_path):
    command = parse_command_line(
        [
            *("--config", str(trainer_command.config), "--workdir", str(tmp_path)),
            *("--optimizer.learning-rate", "3e-4", "--model.tie-embeddings", "False", "--num_steps=77"),
            *("--model.masks", "CausalMask() & LocalMask(1023, 0)", "~PrefixMask(3) | CausalMask(2)"),
        ]
    )
    default = load_config(trainer_command.config)
    assert command.workdir == tmp_path
    assert command.train == dataclasses.replace(
        default,
        num_steps=77,
        optimizer=dataclasses.replace(default.optimizer, learning_rate=3e-4),
        model=dataclasses.replace(
            default.model,
            tie_embeddings=False,
            masks=(CausalMask() & LocalMask(1023, 0), ~PrefixMask(3) | CausalMask(2)),
        ),
    )


def test_the_workdir_is_named_for_the_run_unless_given(trainer_command):
    command = parse_command_line(["--config", str(trainer_command.config), "--name", "other"])
    assert command.workdir == Path.cwd() / "runs" / "other"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            (
                "--config FILE is missing; for example: python -m trainer --config experiments/smoke.py; "
                "python -m trainer --config lists the pages"
            ),
        ),
        (["--confg", "x.py"], "unknown option --confg; did you mean --config?"),
        (["--config", "--num-steps", "3"], "--config: expected one argument"),
        (["--config="], "--config: expected a path, got the empty text"),
        (["--config", "x.py", "--workdir", ""], "--workdir: expected a path, got the empty text"),
        (["--lr", "1"], "unknown option --lr; did you mean --optimizer.learning-rate?"),
    ],
)
def test_a_missing_config_is_explained(arguments, message):
    assert refusal(*arguments) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.learning-rate", "fast"], "--optimizer.learning-rate: could not convert string to float: 'fast'"),
        (["--optimizer.schedule", "cosin"], "invalid choice 'cosin' for argument '--optimizer.schedule'"),
        (["--optimizer.learning-rate", "-1"], "optimizer.learning_rate=-1.0 must be positive"),
        (["--num-steps", "1"], "optimizer.num_warmup_steps=2 leaves too few of num_steps=1"),
        (["--model.implementation", "flash"], "model.implementation='flash' is no backend of"),
        (["--model.decode-implementation", "splash"], "model.decode_implementation='splash' is no backend of decoding"),
        (["--model.implementation"], "Missing value for argument '--model.implementation'; expected NAME|None"),
        (
            ["--model.implementation.block-q", "512"],
            "unknown option --model.implementation.block-q; --model.implementation takes a name, and a config file a",
        ),
        (
            ["--mesh.fsdp", "5", "--batch-size", "5"],
            "model.width=32 is not a multiple of mesh.fsdp × mesh.context = 5; use 35",
        ),
        (["--batch-size", "3", "--mesh.data", "2"], "a micro-batch of 3 sequences is not a multiple of mesh.data"),
        (
            ["--model.masks", "CausalMask()", "CausalMsk()"],
            "--model.masks: cannot read 'CausalMsk()' in a mask; expected",
        ),
        (["--model.moe", "8"], "--model.moe: got '8', and only a config file can say it"),
        (["--model.layer-overrides", "x"], "--model.layer-overrides: got 'x', and only a config file can say it"),
        (["--samples.top-k", "few"], "--samples.top-k: expected INT or None, got 'few'"),
        (["--num-steps"], "Missing value for argument '--num-steps'"),
        (["--num-steps", "5", "6"], "Unrecognized options: '6'; --num-steps takes one value"),
        (["stray"], "Unrecognized options: stray"),
        (["--num-steps", "--help"], "Missing value for argument '--num-steps'"),
    ],
)
def test_a_bad_value_is_told_in_one_sentence_without_a_box(trainer_command, arguments, message):
    told = refusal("--config", trainer_command.config, *arguments)
    assert told.startswith(message)
    assert not set("╭│╰─\n") & set(told)


@pytest.mark.parametrize(
    ("message", "arguments", "told"),
    [
        ("seed=-1 must not be negative", ["--seed=-1"], "--seed=-1 must not be negative"),
        ("samples.seed=-1 must not be", ["--seed", "2"], "samples.seed=-1 must not be"),
        ("seed=-1 must not be", ["--samples.seed", "2"], "seed=-1 must not be"),
        ("model.width=3 and width=3", ["--model.width", "3"], "--model.width=3 and --model.width=3"),
        ("num_steps=0; lower num_steps", ["--num_steps", "0"], "--num-steps=0; lower num_steps"),
        ("config x.py: seed=1.5 is of type float", ["--seed", "1"], "config x.py: seed=1.5 is of type float"),
    ],
)
def test_what_was_typed_is_named_by_its_flag(message, arguments, told):
    assert name_flags(message, arguments) == told


def test_a_config_file_may_hold_a_tuning_object_and_a_flag_another_choice(trainer_command, tmp_path, capsys):
    path = tmp_path / "tuned.py"
    path.write_text(
        f"""import dataclasses
from kernels import TritonTiles, TritonTuning
from trainer.config.file import load_config
from pathlib import Path
def get_config():
    config = load_config(Path({str(trainer_command.config)!r}))
    tuning = TritonTuning("split", forward=TritonTiles(64, 32))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, implementation=tuning))
"""
    )
    config = load_config(path)
    tuning = TritonTuning("split", forward=TritonTiles(64, 32))
    assert config.model.implementation == tuning
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    for words, expected in (([], tuning), (["None"], None), (["splash"], "splash")):
        flags = ["--model.implementation", *words] if words else []
        assert parse_command_line(["--config", str(path), *flags]).train.model.implementation == expected
    with pytest.raises(SystemExit):
        parse_command_line(["--config", str(path), "--help"])
    assert "TritonTuning(backward=" in capsys.readouterr().out


_USABLE = """from kernels import LocalMask
from layers import GPTConfig, LayerOverride
from trainer.config import *
"""


def returning(expression: str) -> str:
    """A page whose fifth line returns this."""
    return f"{_USABLE}def get_config():\n    return {expression}\n"


def run_of(arguments: str) -> str:
    """A page of 500 steps with these settings besides."""
    return returning(f"TrainConfig('x', GPTConfig(), 500, {arguments})")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def config():\n    pass\n", "config {path} defines no get_config(); add `def get_config() -> TrainConfig`"),
        ("def get_config():\n    return {}['model']\n", "config {path}:2: KeyError: 'model'"),
        ("def get_config(:\n", "config {path}:1: SyntaxError"),
        ("import no_such_module\n", "config {path}:1: ModuleNotFoundError: No module named 'no_such_module'"),
        (returning("3"), "get_config() in {path} returned int; expected a trainer.config.TrainConfig"),
        ("def get_config(size):\n    return 3\n", "config {path}: get_config() needs size; say --config {path}:size="),
        (
            returning("OptimizerConfig(learning_rat=1)"),
            "config {path}:5: OptimizerConfig has no field 'learning_rat'; did you mean learning_rate?",
        ),
        (run_of("lr=1"), "config {path}:5: TrainConfig has no field 'lr'; did you mean optimizer.learning_rate?"),
        (
            returning("GPTConfig(is_causal=True)"),
            "config {path}:5: GPTConfig has no field 'is_causal'; did you me",
        ),
        (returning("(CausalMsk(),)"), "config {path}:5: NameError: name 'CausalMsk' is not defined; did you mean Caus"),
        (returning("TrainingConfig()"), "config {path}:5: NameError: name 'TrainingConfig' is not defined; did you me"),
        (
            returning("LocalMask(1024)"),
            "config {path}:5: LocalMask needs left and right, two numbers: a causal window over W tokens is",
        ),
        (run_of("sequence_length=0"), "config {path}:5: sequence_length=0 must be at least 1"),
        (
            run_of("optimizer=OptimizerConfig(schedule='cosin')"),
            "config {path}: optimizer.schedule='cosin' is not one of cosine, wsd; did you mean cosine?",
        ),
        (
            returning("TrainConfig('x', GPTConfig(sinks='yes'), 500)"),
            "config {path}: model.sinks='yes' is of type str; expected bool",
        ),
        (
            returning("TrainConfig('x', GPTConfig(layer_overrides=(LayerOverride(num_kv_heads=2.0),)), 500)"),
            "config {path}: model.layer_overrides[0].num_kv_heads=2.0 is of type float; expected",
        ),
        (run_of("seed=1.5"), "config {path}: seed=1.5 is of type float; expected int"),
        ("import sys\nsys.exit(0)\n", "config {path}:2: ends Python (exit status 0)"),
        ("raise GeneratorExit('odd')\n", "config {path}:1: GeneratorExit: odd"),
        ("class E(Exception):\n    __str__ = None\nraise E\n", "config {path}:3: E"),
        ("raise TypeError('an unexpected keyword argument')\n", "config {path}:1: TypeError: an unexpected keyword"),
        ("def get_config():\n    return get_config()\n", "config {path}:2: RecursionError"),
        ("x = '\0'\n", "config {path}"),
        (returning(r"TrainConfig('\0', GPTConfig(), 500)"), r"config {path}:5: name='\x00'"),
        (run_of(r"description='\0'"), r"config {path}: description='\x00' holds a NUL character"),
        (
            run_of(r"data=DataConfig('text', files=('\udcff',))"),
            r"config {path}: data.files=('\udcff',) holds a NUL character, or what UTF-8 can't write",
        ),
        (run_of("seed=10**5000"), "config {path}:5: "),
    ],
)
def test_a_broken_config_file_is_told_with_its_place(config_file, text, told):
    path = config_file(text)
    assert refusal("--config", path).startswith(told.format(path=path))


def test_a_mask_that_is_misspelt_in_an_import_is_told(config_file):
    assert refusal("--config", config_file("from kernels import LocalMaks\n")).endswith("; did you mean LocalMask?")


def test_a_page_that_imports_one_that_exits_is_told_with_its_own_line(config_file, monkeypatch):
    path = config_file("x = 1\nimport page_that_exits\n")
    path.with_name("page_that_exits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(path.parent)
    assert refusal("--config", path) == (
        f"config {path}:2: ends Python (exit status 0), before anything is trained; leave that out"
    )


def test_a_page_may_define_dataclasses_and_is_read_afresh(config_file):
    page = (
        "from __future__ import annotations\n" + _USABLE + "import dataclasses\n"
        "@dataclasses.dataclass\nclass Size:\n    steps: int = {steps}\n"
        "def get_config():\n    return TrainConfig('x', GPTConfig(), Size().steps)\n"
    )
    for steps in (500, 600):  # of one length, and written within a second
        assert load_config(config_file(page.format(steps=steps))).num_steps == steps
        os.utime(config_file(page.format(steps=steps)), (1, 1))


@pytest.mark.parametrize("path", ["x" * 5000, "x" * 300, "a\0b", "/dev/null/x"])
@pytest.mark.parametrize("flag", ["--config", "--workdir"])
def test_no_path_ends_in_a_traceback(trainer_command, path, flag):
    def claim() -> None:  # which alone tells whether a workdir can be made
        command = parse_command_line(["--config", str(trainer_command.config), flag, path])
        claim_workdir(command.workdir, command.train)

    with pytest.raises(UserMistake, match=r"^[^\n]+$"):
        claim()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_makes_a_config_or_one_message(trainer_command, data):
    numbers = f"0 -1 1 2147483647 2147483648 {2**63} {'9' * 20} {'9' * 5000} 1e309 nan -inf 1e-60".split()
    long = "~" * 5000
    words = ["", " ", long, "x" * 5000, "..", "a/b", "\udcff", "None", "True", f"{long}CausalMask()", "()", "-"]
    flag = data.draw(st.sampled_from(sorted(flag_types())))
    value = data.draw(st.sampled_from(numbers + words) | st.text(max_size=9).filter(lambda text: "\0" not in text))
    assume(not value.startswith("-h"))
    try:
        train = parse_command_line(
            ["--config", str(trainer_command.config), f"--{flag.replace('_', '-')}", value]
        ).train
    except UserMistake:
        event("refused")
    else:
        event("valid")
        assert config_from_json(json.loads(json.dumps(config_to_json(train)))) == train


def test_a_config_of_another_kind_in_the_workdir_is_refused_and_named(trainer_command, tmp_path):
    config = load_config(trainer_command.config)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)))
    finished = trainer_command.run(
        *("--workdir", tmp_path, "--seed", config.seed + 1, "--model.width", 64, "--log-every-num-steps", 99)
    )
    assert finished.status == 2
    assert finished.errors == (
        f"error: workdir {tmp_path} is of another config:\n"
        f"  model.width: 32 in workdir {tmp_path}, 64 now\n"
        f"  seed: {config.seed} in workdir {tmp_path}, {config.seed + 1} now\n"
        "the parameters are of another model; the parameters and the order of the data are made from it already; "
        "samples.seed may change; choose another with --workdir\n"
    )
    assert json.loads((tmp_path / "config.json").read_text()) == config_to_json(config)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"name": "\xff"}', b"[]", b'"text"', b"3", b"null"])
def test_checkpoints_without_a_readable_config_are_refused(trainer_command, tmp_path, content):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserMistake, match=r"holds checkpoints, but no readable config\.json"):
        claim_workdir(tmp_path, load_config(trainer_command.config))


def test_config_json_holds_every_field(trainer_command):
    config = load_config(trainer_command.config)
    masks = (CausalMask() & LocalMask(63, 0), CausalMask())
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, masks=masks))
    stored = json.loads(json.dumps(config_to_json(config)))
    assert stored["model"]["masks"] == ["CausalMask(offset=0) & LocalMask(left=63, right=0)", "CausalMask(offset=0)"]
    assert stored["optimizer"] == dataclasses.asdict(config.optimizer)
    assert set(stored) == {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("requested", "platform"), [("cpu", "cpu"), ("cuda,cpu", "gpu"), ("tpu", "tpu"), ("rocm", "gpu"), ("gpu", "gpu")]
)
def test_the_expected_platform_follows_what_jax_was_told(monkeypatch, requested, platform):
    monkeypatch.setenv("JAX_PLATFORMS", requested)
    assert expected_platform() == platform


def test_the_expected_platform_is_the_one_that_jax_chooses():
    script = (
        "from trainer.hardware import expected_platform; expected = expected_platform()\n"
        "import jax; print(expected, jax.default_backend())"
    )
    expected, chosen = run_python(script).split()
    assert expected == chosen
