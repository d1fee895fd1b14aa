"""`python -m trainer.evaluate` on a run and on a Hugging Face folder: its lines, and mistakes in one message each."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from layers.pretrained import write_huggingface
from layers.pretrained.table import parameter_shapes
from tests.layers.decoder_oracle import decoder_logits
from tests.seeds import seeded_rng
from trainer.checkpoints.training_state import Checkpoints
from trainer.config import MeshConfig
from trainer.config.file import load_config
from trainer.config.resume_changes import ConfigHistory
from trainer.data import load_corpus
from trainer.errors import TrainingFailed
from trainer.evaluate import evaluate_model
from trainer.evaluate.__main__ import main
from trainer.evaluate.results import read_lines
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.workdir import claim_workdir

MODEL = GPTConfig(
    vocab_size=260,
    num_layers=1,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    masks=(CausalMask(),),
    mlp="swiglu",
    compute_dtype="float32",
    implementation="reference",
)


@pytest.fixture(scope="module")
def trained(trainer_command, tmp_path_factory):
    """What a run of the tiny config leaves, its steps left out: the workdir, and its parameters by step."""
    config = load_config(trainer_command.config)
    masks = (CausalMask() & LocalMask(63, 0),)
    # It ran on a GPU, over four devices.
    model = dataclasses.replace(MODEL, masks=masks, mlp="gelu", decode_implementation="triton")
    config = dataclasses.replace(config, model=model, sequence_length=128, mesh=MeshConfig(fsdp=2, context=2))
    workdir = claim_workdir(tmp_path_factory.mktemp("evaluated") / "run", config)
    rng, params = seeded_rng("evaluated"), {}
    checkpoints = Checkpoints(workdir.checkpoints, num_kept=2)
    abstract = make_step_functions(config, make_mesh(config.mesh)).abstract_state
    for step in (20, 40):
        state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), abstract)
        params[step] = jax.device_get(state.params)
        history = ConfigHistory(config).to_json()
        checkpoints.save(step, state, {"tokenizer": "byte", "delimiters": [256, 256]}, history)
    checkpoints.close()
    return SimpleNamespace(path=workdir.path, config=config, params=params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of 2,048 positions without a tokenizer."""
    rng, path = seeded_rng("folder"), tmp_path_factory.mktemp("evaluated") / "model"
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), parameter_shapes(MODEL))
    write_huggingface(path, MODEL, params, context_length=2048)
    return path


@pytest.fixture
def evaluate(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        status = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


@pytest.mark.usefixtures("eight_devices")
def test_a_run_is_evaluated_before_and_after(trained, evaluate):
    what = ("--tasks", "niah_single", "--questions", "2", "--depths", "2", "--documents", "100", "--seed", "3")
    status, _, errors = evaluate("--workdir", trained.path, *what, "--lengths", "128,700")
    assert status == 2
    assert "length=128 is too short for niah_single" in errors
    assert not (trained.path / "evaluations.jsonl").exists()

    status, output, errors = evaluate("--workdir", trained.path, *what, "--lengths", "500,700", "--step", "20")
    assert status == 0, errors
    assert "trained on sequences of 128 tokens" in errors
    assert "parameters, 4 × cpu" in errors
    assert "→" not in output
    status, output, errors = evaluate("--workdir", trained.path, *what, "--lengths", "500,700")
    assert status == 0, errors
    assert output.startswith("accuracy, step 20 → step 40  ")
    assert "nats per token, step 20 → step 40" in output

    lines = read_lines(trained.path / "evaluations.jsonl")
    assert {(line.step, line.seed) for line in lines} == {(20, 3), (40, 3)}
    of_tasks = [line for line in lines if line.kind == "retrieval"]
    assert {(line.task, line.length, line.depth, line.num_examples) for line in of_tasks} == {
        ("niah_single", length, depth, 2) for length in (500, 700) for depth in (0.0, 1.0)
    }
    assert {name.name for name in trained.path.glob("*.png")} <= {"loss_by_position.png", "retrieval.png"}

    # All validation documents, cut to the longest length: against logits written anew.
    documents = load_corpus(trained.config.data, vocab_size=260).validation
    lengths = np.minimum(documents.num_targets, 700).tolist()
    for step in (20, 40):
        of_step = {(line.kind, line.length): line for line in lines if line.step == step}
        streams = [documents.stream(index, 0, length + 1) for index, length in enumerate(lengths)]
        nats = [_nats(trained, step, stream) for stream in streams]
        buckets = [1 << (length - 1).bit_length() for length in lengths]
        for bucket in set(buckets):
            members = [each for each, its in zip(nats, buckets, strict=True) if its == bucket]
            _check(of_step["loss_by_document_length", bucket], members)
        _check(of_step["short_context_loss", 500], [each[:500] for each in nats])
        long = [each for each in nats if len(each) == 700]
        assert len(long) > 1
        _check(of_step["loss_by_position", 16], [each[:16] for each in long])
        for length in (500, 700):
            ends = [
                _nats(trained, step, documents.stream(index, num_targets - length, num_targets + 1))[-250:]
                for index, num_targets in enumerate(np.asarray(documents.num_targets).tolist())
                if num_targets >= 700
            ]
            _check(of_step["loss_of_last_tokens", length], ends)


def test_what_was_measured_is_kept_where_the_rest_fails(trained, evaluate, tmp_path, monkeypatch):
    def fails_at_600(decoder, params, example, tokenizer):
        if example.length == 600:
            raise TrainingFailed("there was no room")
        return [1.0, 0.5]

    monkeypatch.setattr(evaluate_model, "score_example", fails_at_600)
    what = ("--lengths", "500,600", "--tasks", "niah_single", "--questions", "2", "--depths", "1", "--documents", "1")
    status, output, errors = evaluate("--workdir", trained.path, *what, "--output", tmp_path)
    assert (status, output) == (1, "")
    assert "there was no room" in errors
    lines = read_lines(tmp_path / "evaluations.jsonl")
    assert [(line.length, line.depth, line.accuracy) for line in lines if line.kind == "retrieval"] == [
        (500, 0.5, 0.75)
    ]
    assert any(line.kind == "short_context_loss" for line in lines)


def test_a_run_of_more_devices_than_there_are_is_evaluated_on_one(trained):
    notes = []
    larger = dataclasses.replace(trained.config, batch_size=64, mesh=MeshConfig(data=64))
    console = SimpleNamespace(note=notes.append)
    found = evaluate_model._on_devices_at_hand(SimpleNamespace(config=larger), console)
    assert found.mesh == MeshConfig()
    assert notes == [f"the run had 64 devices, and here are {jax.device_count()}: one of them is used"]


def _nats(trained, step, stream):
    logits = decoder_logits(trained.config.model, trained.params[step], stream[:-1])
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(stream) - 1), stream[1:]]


def _check(line, nats):
    joined = np.concatenate(nats)
    assert (line.num_tokens, line.num_examples) == (len(joined), len(nats))
    assert line.loss == pytest.approx(joined.mean(), rel=1e-4)


def test_a_folder_is_evaluated_without_tasks(folder, evaluate, tmp_path):
    """Losses alone, of files: each bin's loss is that of logits written anew."""
    rng = seeded_rng("texts")
    for number, length in enumerate((100, 299, 300)):
        letters = rng.integers(97, 123, length).astype(np.uint8)
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"body": letters.tobytes().decode()}) + "\n")
    arguments = ("--tokenizer", "byte", "--lengths", "64,256,1k", "--tasks", "none", "--text-field", "body")
    output = tmp_path / "made" / "here"
    status, _, errors = evaluate("--model", folder, *arguments, "--files", tmp_path / "*.jsonl", "--output", output)
    assert status == 0, errors
    assert "no document is as long as 1k tokens" in errors
    lines = {(line.kind, line.length): line for line in read_lines(output / "evaluations.jsonl")}
    assert {length for kind, length in lines if kind == "loss_of_last_tokens"} == {64, 256}
    assert not any(kind == "retrieval" for kind, _ in lines)
    assert lines["loss_by_position", 256].num_tokens == 2 * 128
    assert lines["short_context_loss", 64].num_tokens == 3 * 64


def test_a_task_that_is_too_long_is_left_out_of_all(folder, evaluate, tmp_path):
    """Nobody has asked for it by name."""
    what = ("--tokenizer", "byte", "--lengths", "512", "--depths", "1", "--questions", "1", "--output", tmp_path)
    status, output, errors = evaluate("--model", folder, *what)
    assert status == 0, errors
    assert "no losses are measured: --files GLOB" in errors
    assert "left out: length=512 is too short for common_words" in errors
    assert "niah_single" in output
    assert "common_words" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give one of --workdir DIR and --model DIR"),
        ("--model {folder} --workdir {run}", "give one of --workdir DIR and --model DIR"),
        ("--model {folder} --lengths 1k,2g --output {out}", "lengths='1k,2g': expected numbers of tokens from 2 to"),
        ("--model {folder} --lengths 1 --output {out}", "lengths='1': expected numbers of tokens from 2 to"),
        ("--model {folder} --tasks niah_singel --output {out}", "there is no 'niah_singel'"),
        ("--model {folder} --tasks none all --output {out}", "there is no 'none'"),
        ("--model {folder} --depths 0 --output {out}", "depths=0 must be at least 1"),
        ("--model {folder} --seed -1 --output {out}", "seed=-1 must be an integer from 0"),
        ("--model {folder}", "--output DIR is missing"),
        ("--model {folder} --step 20 --output {out}", "--step is of a run's checkpoints"),
        ("--model {folder} --length 4k --output {out}", "unknown option --length"),
        (
            "--model {folder} --lengths 1k,4k --tokenizer byte --output {out}",
            "--lengths has 4,096 tokens, more than the 2,048 positions of --model",
        ),
        (
            "--model {folder} --lengths 1k --tasks niah_single --output {out}",
            "--tasks niah_single: the model's tokenizer is unknown",
        ),
        ("--model {folder} --lengths 1k --output {out}", "there is nothing to evaluate"),
        ("--model {folder} --lengths 1k --files {out}/*.txt --output {out}", "give it with --tokenizer"),
        ("--model {folder} --lengths 1k --files {out}/*.txt --tokenizer byte --output {out}", "--files"),
        ("--model {folder} --lengths 64 --tokenizer byte --output {out}", "--lengths 64 is too short for every task"),
        ("--model {run} --output {out}", "is the workdir of a run; give it with --workdir"),
        ("--model {out} --output {out}", "has no file config.json"),
        ("--workdir {out} --lengths 1k", "holds no config.json"),
        ("--workdir {run} --step 30", "holds no checkpoint of it; there are 20, 40"),
        ("--workdir {run} --lengths 1k --haystack {out}/none", "--haystack"),
    ],
)
def test_mistakes_are_told_before_a_device_starts(arguments, message, trained, folder, evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_model, "make_mesh", lambda *_: pytest.fail("a device was started"))
    named = {"run": trained.path, "folder": folder, "out": tmp_path}
    status, output, errors = evaluate(*(word.format(**named) for word in arguments.split()))
    assert (status, output) == (2, "")
    last = errors.rstrip("\n").splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_is_not_the_models_is_refused(folder, evaluate, tmp_path):
    pytest.importorskip("tokenizers")
    import tokenizers

    words = {f"w{number}": number for number in range(299)} | {"</s>": 299}
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))
    status, _, errors = evaluate("--model", folder, "--tokenizer", path, "--output", tmp_path)
    assert status == 2
    assert "300 ids, more than the 260" in errors
