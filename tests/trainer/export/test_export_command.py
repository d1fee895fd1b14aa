"""`python -m trainer.export`: the folder holds every bit of a run's parameters, or a message says why there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.pretrained import config_from_huggingface, read_params
from tests.seeds import seeded_rng
from tests.trainer.checkpoint_files import set_config
from trainer.checkpoints.training_state import Checkpoints
from trainer.cli.train_command import parse_command_line
from trainer.config import TrainConfig
from trainer.config.file import config_to_json
from trainer.config.resume_changes import ConfigHistory
from trainer.data import load_tokenizer
from trainer.export import export_run
from trainer.export.__main__ import main
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.workdir import Workdir, claim_workdir


def data_state(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint tells of the tokens."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    return {"tokenizer": tokenizer.identity, "delimiters": [tokenizer.delimiters.end] * 2}


@pytest.fixture(scope="module")
def trained(pretrained, tmp_path_factory):
    """What a run that began with the folder leaves, its steps left out: the workdir, and its parameters."""
    path = tmp_path_factory.mktemp("trained") / "run"
    arguments = ["--config", str(pretrained.page), "--init-from", str(pretrained.folder), "--workdir", str(path)]
    config = parse_command_line(arguments).train
    workdir = claim_workdir(path, config)
    rng = seeded_rng("trained")
    abstract = make_step_functions(config, make_mesh(config.mesh)).abstract_state
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), abstract)
    checkpoints = Checkpoints(workdir.checkpoints, num_kept=2)
    checkpoints.save(40, state, data_state(config), ConfigHistory(config).to_json())
    checkpoints.close()
    return SimpleNamespace(path=path, config=config, params=state.params)


@pytest.fixture
def with_config(trained, tmp_path):
    """A workdir beside the run's, with the same checkpoints and another config."""

    def make(**changed: object) -> Path:
        config = dataclasses.replace(trained.config, init_from=None, **changed)
        path = tmp_path / "changed"
        path.mkdir()
        shutil.copytree(trained.path / "checkpoints", path / "checkpoints")
        set_config(path, config_to_json(config))
        return path

    return make


@pytest.fixture
def export(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run_command(workdir: Path, output: Path, *arguments: object) -> tuple[int, str, str]:
        status = main(["--workdir", str(workdir), "--output", str(output), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


def refusal(outcome: tuple[int, str, str]) -> str:
    """The message of a refusal, which must be one and all that is said."""
    status, output, errors = outcome
    assert (status, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.endswith("\n")
    return errors.removeprefix("error: ").rstrip("\n")


def assert_same_bits(ours, theirs) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, one), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8), str(path))


def test_what_is_exported_and_read_again_has_every_bit(pretrained, trained, export, tmp_path):
    output = tmp_path / "models" / "own"
    status, told, errors = export(trained.path, output)
    assert (status, errors) == (0, "")
    assert told.startswith(f"exported continued at step 40 to {output} as llama: 35.0k parameters, ")
    assert config_from_huggingface(output) == pretrained.model
    assert_same_bits(read_params(output, pretrained.model), trained.params)
    files = sorted(path.name for path in output.iterdir())
    others = ("tokenizer.json", "tokenizer_config.json")  # without which transformers may add a BOS of its own
    assert files == ["config.json", "generation_config.json", "model.safetensors", *others]
    tokenizer = pretrained.folder / "tokenizer.json"
    assert (output / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    values = json.loads((output / "config.json").read_text())
    # What llama3's scaling goes up to, which is more than the run was trained on.
    assert values["max_position_embeddings"] == 128 > trained.config.sequence_length
    end = load_tokenizer(str(tokenizer)).delimiters.end
    assert (values["bos_token_id"], values["eos_token_id"]) == (end, end)
    # The folder is one that a run can begin with.
    arguments = ["--config", str(pretrained.page), "--init-from", str(output)]
    assert parse_command_line(arguments).train.model == trained.config.model


@pytest.fixture
def with_record(with_config):
    """A workdir whose record says what the run began as."""

    def make(**began_as: object) -> Path:
        path = with_config()
        Workdir(path).record.write_text(json.dumps({"init_from": began_as or None}))
        return path

    return make


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_run_is_exported_as_the_family_that_it_began_with(family, with_record, pretrained, trained, export, tmp_path):
    output = tmp_path / "out"
    status, told, errors = export(with_record(family=family, context_length=4096), output)
    assert (status, errors) == (0, "")
    assert f" as {family}: " in told
    values = json.loads((output / "config.json").read_text())
    assert (values["model_type"], values["max_position_embeddings"]) == (family, 4096)
    assert_same_bits(read_params(output, pretrained.model), trained.params)


def test_a_model_that_its_family_no_longer_expresses_is_told_of(with_record, export, tmp_path):
    status, told, _ = export(with_record(family="gemma2", context_length=None), tmp_path / "out")
    assert status == 0
    assert " as llama: " in told
    message = " ".join(told.split())
    assert "the run began with a gemma2, and goes out as a llama: gemma2 has model.mlp=geglu (here swiglu)" in message
    assert "no family of transformers" not in message


def test_a_run_that_began_as_no_family_is_the_first_that_can_be(with_record, export, tmp_path):
    path = with_record()
    Workdir(path).record.write_text('{"init_from": null}')  # of random parameters
    status, told, errors = export(path, tmp_path / "out")
    assert (status, errors) == (0, "")
    assert " as llama: " in told


@pytest.mark.parametrize(
    "text",
    [
        *("{", "{}", "null", "[]", '{"init_from": "x"}', '{"init_from": {"family": 3}}'),
        *(
            f'{{"init_from": {{"context_length": {odd}}}}}'
            for odd in ('"8"', "1e400", "NaN", "-1", "2.5", "true", 2**31)
        ),
    ],
)
def test_a_damaged_record_is_refused(text, with_record, export, tmp_path):
    path = with_record()
    Workdir(path).record.write_text(text)
    assert "which says what the run began with, can't be read: " in refusal(export(path, tmp_path / "out"))


def test_a_workdir_may_be_named_by_way_of_its_parent(pretrained, trained, export, tmp_path, monkeypatch):
    beside = tmp_path / "beside"
    beside.mkdir()
    monkeypatch.chdir(beside)
    (tmp_path / "run").symlink_to(trained.path)
    status, _, errors = export(Path("../run"), tmp_path / "model")
    assert (status, errors) == (0, "")
    assert_same_bits(read_params(tmp_path / "model", pretrained.model), trained.params)


def test_another_dtype_rounds_once(pretrained, trained, export, tmp_path):
    assert export(trained.path, tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trained.params)
    assert_same_bits(read_params(tmp_path / "out", pretrained.model, dtype="bfloat16"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 85_000


def test_a_folders_own_generation_config_goes_along(pretrained, trained, with_config, export, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own.json").write_bytes((pretrained.folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_bytes((pretrained.folder / "tokenizer.json").read_bytes())
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8], "top_p": 0.9}')
    data = dataclasses.replace(trained.config.data, tokenizer=str(folder / "tokenizer.json"))
    assert export(with_config(data=data), tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["top_p"] == 0.9
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [7, 8]
    # A tokenizer of another name gets Hugging Face's, and what lies beside it isn't its own.
    assert export(trained.path, tmp_path / "again", "--tokenizer", folder / "own.json")[0] == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (folder / "own.json").read_bytes()
    assert "top_p" not in (tmp_path / "again" / "generation_config.json").read_text()


def test_a_run_without_a_tokenizer_file_is_exported_without_one(trained, with_config, export, tmp_path):
    data = dataclasses.replace(trained.config.data, source="bin", tokenizer=None)
    status, told, _ = export(with_config(data=data), tmp_path / "out")
    assert status == 0
    assert told.endswith("without a tokenizer: the run's is no tokenizer.json\n")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_cannot_be_exported_is_told_and_leaves_nothing(pretrained, trained, with_config, export, tmp_path):
    output = tmp_path / "out"
    assert refusal(export(tmp_path / "none", output)) == (
        f"workdir {tmp_path}/none does not exist; --workdir takes the folder that a run of `python -m trainer` wrote to"
    )
    with_sinks = with_config(model=dataclasses.replace(trained.config.model, sinks=True))
    told = refusal(export(with_sinks, output))
    first, *nearest = told.splitlines()
    assert first.startswith(f"workdir {with_sinks} can't be exported: no family of transformers that is known here ")
    assert nearest == [f"  {family} has model.sinks=False (here True)" for family in ("llama", "mistral")]
    other = with_sinks / "other.json"
    other.write_text((pretrained.folder / "tokenizer.json").read_text() + "\n")
    assert refusal(export(trained.path, output, "--tokenizer", other)).startswith(
        f"the {other} tokenizer is not the one that the run was trained with: expected "
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed"]
    output.mkdir()
    assert refusal(export(trained.path, output)) == (
        f"--output {output} exists already; name a folder that is to be made, or remove it"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--workdir DIR is missing; for example: python -m trainer.export --workdir runs/smoke --output"),
        ("--workdir x", "--output DIR is missing; for example: "),
        ("--out x", "unknown option --out; did you mean --output?"),
        ("--workdir x --output y --dtype float16", "invalid choice 'float16' for argument '--dtype'"),
    ],
)
def test_mistakes_in_the_command_are_told(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_full_disk_is_told_and_leaves_nothing(trained, export, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_run, "write_huggingface", full)
    status, output, errors = export(trained.path, tmp_path / "out")
    assert (status, output) == (1, "")
    assert errors == f"error: --output {tmp_path}/out can't be written: No space left on device; nothing is left\n"


def test_a_real_command_starts_no_accelerator(trained, tmp_path):
    line = [sys.executable, "-m", "trainer.export", "--workdir", trained.path, "--output", tmp_path / "out"]
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "model.safetensors").is_file()


EXPORT_BOTH = """
import sys
from trainer.export.__main__ import main
from trainer.hardware import peak_resident_bytes

for workdir in sys.argv[1:]:
    assert main(["--workdir", workdir, "--output", workdir + "-exported"]) == 0
    print(peak_resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a child's peak memory is known on Linux alone")
def test_memory_is_that_of_a_tensor_and_not_of_the_model(trained, tmp_path):
    # 50 MB of layers and 400 MB, of which no tensor has more than 4 MB.
    workdirs = []
    for num_layers in (4, 32):
        path = tmp_path / f"of-{num_layers}"
        model = dataclasses.replace(trained.config.model, num_layers=num_layers, width=512, head_dim=64, mlp_width=2048)
        config = dataclasses.replace(trained.config, init_from=None, model=model)
        workdir = claim_workdir(path, config)
        abstract = make_step_functions(config, make_mesh(config.mesh)).abstract_state.params
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        checkpoints = Checkpoints(workdir.checkpoints, num_kept=1)
        checkpoints.save(1, {"params": params}, data_state(config), ConfigHistory(config).to_json())
        checkpoints.close()
        workdirs.append(path)
    line = [sys.executable, "-c", EXPORT_BOTH, *workdirs]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    small, large = (int(line) for line in done.stdout.splitlines() if line.isdigit())
    num_bytes = (tmp_path / "of-32-exported" / "model.safetensors").stat().st_size
    assert num_bytes > 380e6
    assert large - small < 50e6
