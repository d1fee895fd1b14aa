"""A run that begins with a folder's parameters: a Hugging Face model's, or those of another run's checkpoint."""

import dataclasses
import hashlib
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, LocalMask
from layers import GPT
from layers.pretrained.table import parameter_shapes
from tests.host_cpus import environment_of_cpus
from tests.trainer.launch.test_several_processes import free_port
from trainer.checkpoints.parameters import restore_params
from trainer.checkpoints.training_state import Checkpoints
from trainer.cli.train_command import TrainCommand, parse_command_line
from trainer.compile.programs import compile_steps
from trainer.config import TrainConfig
from trainer.config.resume_changes import ConfigHistory
from trainer.data import load_corpus, make_train_iterator
from trainer.errors import UserMistake
from trainer.launch.peers import Peers
from trainer.loop.initial_params import load_initial_params
from trainer.saved_run import abstract_params, open_saved_run
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.terminal.console import Console
from trainer.train import train
from trainer.workdir import Workdir, claim_workdir


def parse(pretrained, *arguments: object) -> TrainCommand:
    return parse_command_line(["--config", str(pretrained.page), *map(str, arguments)])


def run(pretrained, *arguments: object, workdir: Workdir | None = None) -> Workdir:
    """A run of the page, in this process, which claims a workdir once."""
    command = parse(pretrained, *arguments)
    workdir = workdir or claim_workdir(command.workdir, command.train)
    assert train(command.train, workdir, command=["test"], started=time.perf_counter()) == 0
    return workdir


@pytest.fixture(scope="module")
def continued(pretrained, tmp_path_factory) -> Path:
    """The workdir of a run of two steps that began with the folder."""
    path = tmp_path_factory.mktemp("continued") / "run"
    return run(pretrained, "--init-from", pretrained.folder, "--workdir", path).path


def first_loss(config: TrainConfig, params) -> float:
    """Of the first batch, in nats per target: all logits at once, with nothing of the trainer's step."""
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    options = {"sequence_length": config.sequence_length, "batch_size": config.batch_size, "seed": config.seed}
    batches = make_train_iterator(corpus, **options, num_prefetch_batches=1)
    batch = next(batches).arrays
    batches.close()
    graphdef, state = nnx.split(GPT(config.model, rngs=nnx.Rngs(0)))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    model = nnx.merge(graphdef, state)
    logits = model.logits(model(batch["tokens"], batch["segment_ids"], batch["positions"]))
    nats = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return float(nats[batch["weights"] != 0].mean())


def saved_params(path: Path):
    """The parameters of a run's newest checkpoint."""
    saved = open_saved_run(path, setting="--workdir")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return restore_params(saved.checkpoint, abstract_params(saved.config.model, device))


def test_the_first_loss_is_the_pretrained_models(pretrained, continued, read_run):
    record, steps, _ = read_run(continued)
    config = parse(pretrained, "--init-from", pretrained.folder).train
    assert steps[0]["loss"] == pytest.approx(first_loss(config, pretrained.params), rel=1e-5)
    told = record["init_from"]
    assert told.pop("seconds") > 0
    assert len(told.pop("config_sha256")) == 64
    files = {"model.safetensors": (pretrained.folder / "model.safetensors").stat().st_size}
    known = {"family": "llama", "context_length": 128}
    assert told == {"path": str(pretrained.folder), "files": files, **known}
    assert record["data"]["tokenizer"] == str(pretrained.folder / "tokenizer.json")


def test_a_run_begins_with_another_runs_parameters_alone(pretrained, continued, tmp_path, read_run):
    workdir = run(pretrained, "--init-from", continued, "--workdir", tmp_path / "run", "--num-steps", 2)
    record, steps, _ = read_run(workdir.path)
    config = parse(pretrained, "--init-from", continued).train
    assert steps[0]["loss"] == pytest.approx(first_loss(config, saved_params(continued)), rel=1e-5)
    assert steps[0]["step"] == 1
    assert record["init_from"].pop("seconds") > 0
    checkpoint = continued / "checkpoints" / "2"
    assert record["init_from"] == {
        "path": str(continued),
        "checkpoint": str(checkpoint),
        "step": 2,
        "sha256": hashlib.sha256((checkpoint / "SHA256SUMS").read_bytes()).hexdigest(),
        "family": "llama",  # what these parameters began as
        "context_length": 128,
    }
    assert record["data"]["tokenizer"] == str(pretrained.folder / "tokenizer.json"), "the first folder's"


@pytest.mark.parametrize("kind", ["huggingface", "workdir"])
def test_the_state_has_these_parameters_and_is_fresh_otherwise(pretrained, continued, kind):
    folder, expected = (
        (pretrained.folder, pretrained.params) if kind == "huggingface" else (continued, saved_params(continued))
    )
    config = parse(pretrained, "--init-from", folder).train
    functions = make_step_functions(config, make_mesh(config.mesh))
    initial = load_initial_params(config, functions, Console(), Peers())
    state = compile_steps(functions, with_init=True, with_params=True, on_recompile=print).init_state(initial.params)
    random = functions.init_state()
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint32), np.asarray(theirs).view(np.uint32))
    assert jax.tree.structure(state) == jax.tree.structure(random)
    rest = (state._replace(params=()), random._replace(params=()))
    assert jax.tree.all(jax.tree.map(lambda ours, theirs: bool((ours == theirs).all()), *rest))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 2), (5, 1)], ids=["1 to 4", "3 to 2", "5 to 1"])
def test_another_runs_layers_get_masks_that_repeat_otherwise(pretrained, tmp_path, rng, before, after):
    """Local and global layers of a model that was trained without, say: each layer keeps its parameters."""

    def masks(period):
        return (*[CausalMask() & LocalMask(15, 0)] * (period - 1), CausalMask())

    config = parse(pretrained).train
    sizes = {"vocab_size": 260, "num_layers": 5, "width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    model = dataclasses.replace(config.model, mlp_width=24, **sizes)
    held = dataclasses.replace(config, model=dataclasses.replace(model, masks=masks(before)))
    workdir = claim_workdir(tmp_path / "run", held)
    shapes = parameter_shapes(held.model)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)
    checkpoints = Checkpoints(workdir.checkpoints, num_kept=1)
    of_data = {"tokenizer": "byte", "delimiters": [256, 256]}
    checkpoints.save(1, {"params": params}, of_data, ConfigHistory(held).to_json())
    checkpoints.close()
    changed = dataclasses.replace(model, masks=masks(after))
    config = dataclasses.replace(config, init_from=str(workdir.path), model=changed)
    functions = make_step_functions(config, make_mesh(config.mesh))
    loaded = load_initial_params(config, functions, Console(), Peers()).params
    wanted = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), functions.abstract_state.params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), loaded) == wanted
    for layer in range(5):
        ours = jax.tree.map(lambda leaf: np.asarray(leaf)[layer // after], loaded["blocks"][layer % after])  # noqa: B023
        theirs = jax.tree.map(lambda leaf: np.asarray(leaf)[layer // before], params["blocks"][layer % before])  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    np.testing.assert_array_equal(loaded["embedding"]["embedding"], params["embedding"]["embedding"])


def test_a_run_that_resumes_takes_its_checkpoint_and_not_the_folder(pretrained, tmp_path, capsys, read_run):
    folder = Path(shutil.copytree(pretrained.folder, tmp_path / "llama"))
    arguments = ("--init-from", folder, "--workdir", tmp_path / "run")
    workdir = run(pretrained, *arguments)
    assert f" parameters from {folder}: " in capsys.readouterr().out
    told = read_run(workdir.path)[0]["init_from"]
    (folder / "model.safetensors").unlink()
    run(pretrained, *arguments, "--num-steps", 3, workdir=workdir)
    output = capsys.readouterr().out
    assert "resumed at step 2/3" in output
    assert f"parameters from {folder}" not in output
    record, steps, _ = read_run(workdir.path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert record["init_from"] == told
    other = parse(pretrained, "--init-from", pretrained.folder, "--workdir", tmp_path / "copy")
    shutil.copytree(workdir.path, other.workdir, ignore=shutil.ignore_patterns(".lock"))
    with pytest.raises(UserMistake, match=r"init_from: .*/llama in workdir .*/copy, .* now\n.*doesn't load again"):
        claim_workdir(other.workdir, other.train)


@pytest.mark.timeout(300)
def test_two_processes_each_read_what_their_devices_hold(trainer_command, pretrained, read_run, tmp_path):
    arguments = ("--config", pretrained.page, "--init-from", pretrained.folder, "--workdir", tmp_path / "run")
    arguments += ("--batch-size", 4, "--mesh.fsdp", 4)
    port = free_port()
    together = [("--distributed", f"127.0.0.1:{port},2,{index}") for index in range(2)]
    pair = [trainer_command.start(*arguments, *each, **environment_of_cpus(2)) for each in together]
    outcomes = [trainer_command.finish(process) for process in pair]
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    _, steps, _ = read_run(tmp_path / "run")
    config = parse(pretrained, "--init-from", pretrained.folder, "--batch-size", 4).train
    assert steps[0]["loss"] == pytest.approx(first_loss(config, pretrained.params), rel=1e-5)
