"""A run that trains adapters of a folder: its checkpoints, what reads them, and the bases that it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers import LoRAConfig
from layers.lora import merge_adapters
from layers.pretrained import read_params
from layers.pretrained.peft import read_peft
from layers.pretrained.table import flat
from tests.trainer.loop.test_init_from import first_loss, parse, run
from trainer.checkpoints.parameters import find_newest
from trainer.errors import UserMistake
from trainer.export.__main__ import main as export
from trainer.launch.peers import Peers
from trainer.loop.initial_params import load_initial_params
from trainer.saved_run import abstract_params, open_saved_run
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.terminal.console import Console
from trainer.train import prepare
from trainer.workdir import Workdir

LORA = LoRAConfig(rank=3, alpha=6.0, targets=("attention.*", "mlp.down"))
ARGUMENTS = ("--lora.rank", 3, "--lora.alpha", 6.0, "--lora.targets", "attention.*", "mlp.down")
ARGUMENTS += ("--optimizer.learning-rate", 0.05, "--num-steps", 3, "--checkpoint.every-num-steps", 2)


@pytest.fixture(scope="module")
def adapted(pretrained, tmp_path_factory) -> Workdir:
    """A run of three steps, with checkpoints of the second and the third, that began with a copy of the folder."""
    path = tmp_path_factory.mktemp("adapted")
    shutil.copytree(pretrained.folder, path / "base")
    return run(pretrained, "--init-from", path / "base", "--workdir", path / "run", *ARGUMENTS)


def saved(workdir: Workdir):
    """All parameters of the newest checkpoint, merged, and those that trained."""
    opened = open_saved_run(workdir.path, setting="--workdir")
    abstract = abstract_params(opened.config.model, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return jax.device_get(opened.restore_params(abstract)), jax.device_get(opened.restore_trained(abstract))


def merged_by_hand(base, trained):
    """The base in bfloat16, with the adapters added, and the norms that trained."""
    expected = flat(base)
    for path, leaf in flat(trained).items():
        kernel, is_adapter, name = path.partition(".lora.")
        if not is_adapter:
            expected[path] = leaf
        elif name == "a":
            a, b = leaf.astype(np.float64), flat(trained)[f"{kernel}.lora.b"].astype(np.float64)
            held = np.asarray(jnp.asarray(expected[f"{kernel}.kernel"], jnp.bfloat16), np.float64)
            product = np.stack([one.reshape(-1, 3) @ other.reshape(3, -1) for one, other in zip(a, b, strict=True)])
            expected[f"{kernel}.kernel"] = held + 2.0 * product.reshape(held.shape)
    return {path: np.asarray(leaf, np.float64) for path, leaf in expected.items()}


def test_the_first_loss_is_the_bases_and_checkpoints_hold_what_trains(pretrained, adapted, read_run):
    record, steps, _ = read_run(adapted.path)
    config = parse(pretrained, "--init-from", pretrained.folder).train
    held = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), pretrained.params)
    norms = {path: leaf for path, leaf in flat(pretrained.params).items() if path.endswith(".scale")}
    base = jax.tree.unflatten(
        jax.tree.structure(pretrained.params), [norms.get(path, leaf) for path, leaf in flat(held).items()]
    )
    assert steps[0]["loss"] == pytest.approx(first_loss(config, base), rel=1e-6)
    assert steps[2]["loss"] < steps[0]["loss"]
    assert record["init_from"]["family"] == "llama"
    assert len(find_newest(adapted.checkpoints).base) == 64
    stored = json.loads((adapted.checkpoints / "3" / "state" / "_METADATA").read_text())["tree_metadata"]
    assert {path.rpartition(", ")[2] for path in stored if "'params'" in path} == {"'scale')", "'a')", "'b')"}
    assert not any("kernel" in path or "embedding" in path for path in stored)  # moments neither
    merged, trained = saved(adapted)
    expected = merged_by_hand(base, trained)
    for path, leaf in flat(merged).items():
        np.testing.assert_allclose(leaf, expected[path], rtol=0, atol=1e-6, err_msg=path)


def test_a_run_that_resumes_reads_its_base_again_and_refuses_another(pretrained, adapted, tmp_path, read_run, capsys):
    """The workdir and the base keep their paths, by which a run knows them."""
    before = read_run(adapted.path)[1]
    kept = Path(shutil.move(adapted.checkpoints / "3", tmp_path / "3"))
    base = adapted.path.parent / "base"
    arguments = ("--init-from", base, "--workdir", adapted.path, *ARGUMENTS)
    weights = (base / "model.safetensors").read_bytes()
    try:
        (base / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
        with pytest.raises(UserMistake, match=r"checkpoint .*/2 holds adapters of the base .*; put the base back"):
            run(pretrained, *arguments, workdir=adapted)
        with pytest.raises(UserMistake, match="put the base back"):
            saved(adapted)
        (base / "model.safetensors").write_bytes(weights)
        run(pretrained, *arguments, workdir=adapted)
    finally:
        (base / "model.safetensors").write_bytes(weights)
        if not (adapted.checkpoints / "3").exists():
            shutil.move(kept, adapted.checkpoints / "3")
    assert "resumed at step 2/3" in capsys.readouterr().out
    assert [row["loss"] for row in read_run(adapted.path)[1]] == [row["loss"] for row in before]


def test_exports_are_merged_or_the_adapters_alone(pretrained, adapted, tmp_path, capsys):
    merged, trained = saved(adapted)
    assert export(["--workdir", str(adapted.path), "--output", str(tmp_path / "merged")]) == 0
    jax.tree.map(np.testing.assert_array_equal, read_params(tmp_path / "merged", pretrained.model), merged)
    assert export(["--workdir", str(adapted.path), "--output", str(tmp_path / "peft"), "--adapters", "True"]) == 0
    read = flat(read_peft(tmp_path / "peft", pretrained.model, LORA))
    assert read.keys() == flat(trained).keys()
    for path, leaf in flat(trained).items():
        np.testing.assert_array_equal(read[path], leaf, err_msg=path)
    # A run may begin with the folder of adapters.
    config = parse(pretrained, "--init-from", tmp_path / "peft", *ARGUMENTS).train
    functions = make_step_functions(config, make_mesh(config.mesh))
    params = jax.device_get(load_initial_params(config, functions, Console(), Peers()).params)
    again = flat(merge_adapters(LORA, jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)))
    for path, leaf in flat(merged).items():
        np.testing.assert_allclose(again[path], leaf, rtol=0, atol=1e-6, err_msg=path)
    with pytest.raises(UserMistake, match=r"holds adapters; set lora\.rank, lora\.alpha and lora\.targets as there"):
        parse(pretrained, "--init-from", tmp_path / "peft")


def test_adapters_need_a_base_that_stays(pretrained, adapted):
    message = r"init_from='.*/run' is a run's workdir, whose checkpoints come and go.*export the run first"
    with pytest.raises(UserMistake, match=message):
        prepare(parse(pretrained, "--init-from", adapted.path, *ARGUMENTS).train, print)
    with pytest.raises(UserMistake, match=r"lora\.rank=33 is above a side of attention\.query"):
        parse(pretrained, "--init-from", pretrained.folder, "--lora.rank", 33)
    with pytest.raises(UserMistake, match=r"lora\.targets names 'q_proj', and no matrix of a block has this name"):
        parse(pretrained, "--init-from", pretrained.folder, "--lora.rank", 2, "--lora.targets", "q_proj")
