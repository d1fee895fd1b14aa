"""`python -m trainer.sample` on a run that the trainer made: its texts, and each mistake told in one message."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from kernels import CausalMask, FullMask
from tests.seeds import seeded_rng
from tests.trainer.checkpoint_files import set_config
from trainer.checkpoints.parameters import find_newest, restore_params
from trainer.checkpoints.training_state import Checkpoints
from trainer.compile.persistent_cache import use_compilation_cache
from trainer.config import SamplesConfig
from trainer.config.file import config_to_json, load_config, load_saved_config
from trainer.config.resume_changes import ConfigHistory
from trainer.data import ByteTokenizer, load_tokenizer
from trainer.errors import TrainingFailed, UserMistake
from trainer.export.__main__ import main as export
from trainer.loop.evaluator import Evaluator
from trainer.observers.console_lines import ConsoleLines
from trainer.observers.times import TimeAccount
from trainer.sample.__main__ import main
from trainer.sample.during_training import Samples
from trainer.sample.sample_command import parse_command_line
from trainer.saved_run import open_saved_run
from trainer.step.functions import make_step_functions
from trainer.step.loss import CrossEntropy
from trainer.step.sharding import make_mesh
from trainer.terminal.console import Console
from trainer.terminal.streams import visible
from trainer.workdir import claim_workdir

LENGTH = 64  # of a sequence, whose tokens are bytes
# Two texts without chance, like the samples in training: the programs are compiled already.
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def trained(trainer_command, tmp_path_factory):
    """What a run of the tiny config leaves, its steps left out: the workdir, and the state of its last checkpoint."""
    config = load_config(trainer_command.config)
    config = dataclasses.replace(
        config,
        # What compiles fastest; the generator's own tests have windows and more layers.
        model=dataclasses.replace(config.model, num_layers=1, masks=(CausalMask(),), implementation="reference"),
        sequence_length=LENGTH,
        samples=SamplesConfig(prompts=("first prompt", "x" * LENGTH), num_tokens=5, temperature=0),
    )
    workdir = claim_workdir(tmp_path_factory.mktemp("trained") / "run", config)
    rng, states = seeded_rng("trained"), []
    mesh = make_mesh(config.mesh)
    checkpoints = Checkpoints(workdir.checkpoints, num_kept=2)
    for step in (20, 40):
        abstract = make_step_functions(config, mesh).abstract_state
        states.append(jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), abstract))
        checkpoints.save(
            step, states[-1], {"tokenizer": "byte", "delimiters": [256, 256]}, ConfigHistory(config).to_json()
        )
    checkpoints.close()
    use_compilation_cache(config.compilation.cache_dir)
    return SimpleNamespace(path=workdir.path, config=config, mesh=mesh, state=states[-1])


@pytest.fixture
def workdir(trained, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(trained.path, tmp_path / "run"))


@pytest.fixture
def sample(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run_command(workdir: Path, *arguments: object) -> tuple[int, str, str]:
        status = main(["--workdir", str(workdir), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


def refusal(outcome: tuple[int, str, str]) -> str:
    """The message of a refusal, which must be one and all that is said."""
    status, output, errors = outcome
    assert (status, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors.removeprefix("error: ").rstrip("\n")


def test_samples_are_printed_at_an_evaluation_and_are_the_texts_of_the_command(trained, sample):
    printed = io.StringIO()
    setup = SimpleNamespace(
        config=trained.config,
        phase=trained.config.in_phases()[0],
        phase_number=None,
        validation_batches=[{}],
        validation_bytes=2,
        validation_digest="d",
        validation_sources=(),
        samples=Samples(trained.config, ByteTokenizer()),
        functions=SimpleNamespace(mesh=trained.mesh),
    )
    lines = ConsoleLines(Console(printed))
    evaluator = Evaluator(setup, TimeAccount(time.perf_counter()), lines, SimpleNamespace(requested=False))
    sums = CrossEntropy(total=4.0, nats=4.0, z=0.0, weight_sum=2.0, num_targets=2, num_recomputed=0)
    evaluator.evaluate_if_due(60, lambda params, batch, step: sums, trained.state)
    validation, texts = printed.getvalue().split("\n", 1)
    assert validation == "step 60: validation 2.0000 nats/token, 2.8854 bits/byte"
    # Five bytes more, fewer where the document ends; a prompt as long as the context gets one.
    first, second = texts.split("step 60: sample: ")[1:]
    assert first.startswith("first prompt▸")
    assert re.fullmatch(rf"x{{{LENGTH}}}▸.?\n", second, re.DOTALL)

    status, text, _ = sample(trained.path, "--prompt", "first prompt", "--prompt", "other", "--num-tokens", 5, *GREEDY)
    assert status == 0
    texts = dict(re.findall(r"^\[(\d)\]\n(.*?)\n\n(?=\[|\Z)", text, re.DOTALL | re.MULTILINE))
    # A model that has learned nothing writes control characters, too. Only the console shows signs in their place.
    assert visible(texts["1"]) == first.replace("▸", "").removesuffix("\n")


def test_a_real_command_streams_texts_and_says_what_it_did(trained, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbffrom\r\na file")
    line = [sys.executable, "-m", "trainer.sample", "--workdir", trained.path, "--prompt-file", tmp_path / "prompt.txt"]
    line += ["--prompt", "given", "--num-tokens", "20", *GREEDY]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(rb"^\[1\]\ngiven", done.stdout, re.MULTILINE)
    assert re.search(rb"^\[2\]\nfrom\na file", done.stdout, re.MULTILINE)
    first, last = done.stderr.decode().splitlines()
    assert re.fullmatch(r"tiny at step 40: .* parameters, byte tokenizer, context of 64 tokens, \w+", first)
    assert re.fullmatch(r"tokens added: \d+ in .*, compiling included; texts that ended .*: \d of 2", last)


def test_a_mistake_is_told_before_any_device_starts(trained):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.sample", "--workdir", trained.path, "--prompt", "x" * (LENGTH + 1)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: prompt 1 has 65 tokens, more than the 64 tokens")


def test_a_prompt_as_long_as_the_context_works_and_a_longer_one_is_refused(trained, sample):
    fits, too_long = "x" * LENGTH, "x" * (LENGTH + 1)
    status, text, errors = sample(trained.path, "--prompt", fits, fits, *GREEDY)
    assert status == 0
    assert text.count(f"]\n{fits}") == 2
    assert "tokens added: 2 in" in errors
    assert refusal(sample(trained.path, "--prompt", "short", too_long)) == (
        "prompt 2 has 65 tokens, more than the 64 tokens that the model was trained on; shorten it"
    )


def test_the_runs_own_backend_is_honoured_or_refused(workdir, sample):
    """What serves prompts and what serves new tokens are chosen apart, and neither is replaced unasked."""
    saved = json.loads((workdir / "config.json").read_text())
    saved["model"] |= {"implementation": {"tuning": "BlockwiseTuning", "block_q": 16, "block_kv": 16}}
    set_config(workdir, saved)
    arguments = ("--prompt", "a", "--num-tokens", 2, *GREEDY)
    assert sample(workdir, *arguments)[0] == 0
    saved["model"] |= {"implementation": "cudnn", "decode_implementation": "triton"}
    set_config(workdir, saved)
    told = "={!r} can't serve this call: runs on gpu, not on cpu; choose another, or None for the fastest that can"
    assert refusal(sample(workdir, *arguments)) == "--implementation" + told.format("cudnn")
    arguments += ("--implementation", "None")
    assert refusal(sample(workdir, *arguments)) == "--decode-implementation" + told.format("triton")
    assert sample(workdir, *arguments, "--decode-implementation", "dense")[0] == 0


def test_a_cache_that_would_overflow_is_refused(trained, sample):
    # End-of-document and 39 bytes; the last token needs no cell.
    assert refusal(sample(trained.path, "--prompt", "x" * 39, "--num-tokens", 26)) == (
        "prompt 1 has 39 tokens and the one that begins a document; --num-tokens 26 more would overfill the cache, "
        "which holds the 64 tokens that the model was trained on; use at most --num-tokens 25, or leave it out"
    )


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("Generator.generate", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99999 bytes.")),
        ("TrainedRun.restore_params", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9.")),
        ("Generator.generate", MemoryError("Unable to allocate 7.45 GiB for an array")),
    ],
)
def test_memory_that_is_too_small_is_told_with_what_is_needed(trained, sample, monkeypatch, where, error):
    def full(*arguments):
        raise error

    monkeypatch.setattr(f"trainer.sample.continuation.{where}", full)
    status, output, errors = sample(trained.path, "--prompt", "x", "y", "--num-tokens", 8)
    assert (status, output) == (1, "")
    told = errors[errors.index("error: ") :].splitlines()
    machine = "this machine" if isinstance(error, MemoryError) else "cpu"
    assert told[0] == f"error: sampling: out of memory on {machine}: {error}"
    count = sum(leaf.size for leaf in jax.tree.leaves(trained.state.params))
    assert (
        f"it needs {2 * count / 1e3:.1f} kB for the parameters in bfloat16, after {4 * count / 1e3:.1f} kB" in told[1]
    )
    assert "for the caches of 2 text(s) of up to 10 tokens, the one that begins a document included" in told[1]
    assert told[2].startswith("  there is ")
    assert told[3:] == ["  what helps: fewer prompts or seeds at a time, shorter prompts, or a smaller --num-tokens"]


def test_a_workdir_without_a_run_or_a_checkpoint_is_refused(workdir, sample, tmp_path):
    assert refusal(sample(tmp_path / "nowhere", "--prompt", "x")).startswith(
        f"workdir {tmp_path / 'nowhere'} does not exist; --workdir takes the folder that a run of"
    )
    assert refusal(sample(tmp_path, "--prompt", "x")).startswith(f"workdir {tmp_path} holds no config.json; ")
    for unusable in (workdir / "checkpoints" / "40", workdir / "checkpoints" / "20"):
        unusable.replace(unusable.with_name(f"{unusable.name}.tmp"))
    assert refusal(sample(workdir, "--prompt", "x")) == (
        f"workdir {workdir} holds no checkpoint yet; let its run go on to step 20, where the first is saved, "
        "or lower checkpoint.every_num_steps"
    )
    assert (workdir / "checkpoints" / "40.tmp").exists(), "a run may be under way, and saving this"
    shutil.rmtree(workdir / "checkpoints")
    assert "holds no checkpoint yet" in refusal(sample(workdir, "--prompt", "x"))


def test_a_damaged_checkpoint_is_passed_over_and_told(workdir, sample):
    (workdir / "checkpoints" / "40" / "run.json").write_text("{}")
    status, _, errors = sample(workdir, "--prompt", "x", "y", "--num-tokens", 1, *GREEDY)
    assert status == 0
    reason = "run.json is not what was written"
    assert f"warning: checkpoint {workdir}/checkpoints/40 is damaged ({reason}); the one before it is taken" in errors
    assert "tiny at step 20: " in errors
    (workdir / "checkpoints" / "20" / "SHA256SUMS").unlink()
    status, _, errors = sample(workdir, "--prompt", "x")
    assert status == 1
    assert errors.startswith("error: every checkpoint of this run is damaged:\n")
    assert errors.endswith("\nput a good copy back\n")


def test_another_tokenizer_than_trainings_is_refused(trained, sample, tokenizer_file):
    told = refusal(sample(trained.path, "--prompt", "x", "--tokenizer", tokenizer_file))
    assert told.startswith(
        f"the {tokenizer_file} tokenizer is not the one that the run was trained with: expected 'byte'"
    )
    assert told.endswith(
        "give the tokenizer.json of training with --tokenizer, and install the same version of the library"
    )
    assert refusal(sample(trained.path, "--prompt", "x", "--tokenizer", "nowhere.json")).startswith(
        "--tokenizer='nowhere.json' cannot be read"
    )


@pytest.mark.parametrize(
    ("identity", "arguments", "vocab_size", "message"),
    [
        (
            "tokenizers 0.0.1 0123abcd",
            [],
            300,
            r"expected 'tokenizers 0.0.1 0123abcd', got 'tokenizers [\d.]+ [0-9a-f]{64}'",
        ),
        ("{file}", [], 300, None),
        ("pretokenized", [], 300, None),
        ("pretokenized", ["--tokenizer", "byte"], 257, None),
        ("pretokenized", ["--tokenizer", "byte"], 256, r"the byte tokenizer has 257 ids, more than the model's 256"),
    ],
)
def test_the_tokenizer_is_held_against_what_the_checkpoint_says(
    workdir, sample, tokenizer_file, monkeypatch, identity, arguments, vocab_size, message
):
    saved = json.loads((workdir / "config.json").read_text())
    saved["data"]["tokenizer"] = str(tokenizer_file)
    saved["model"]["vocab_size"] = vocab_size
    set_config(workdir, saved)
    identity = identity.format(file=load_tokenizer(str(tokenizer_file)).identity)
    found = dataclasses.replace(find_newest(workdir / "checkpoints"), tokenizer=identity)
    monkeypatch.setattr("trainer.saved_run.find_newest", lambda folder, step: found)
    # What comes after the tokenizer is refused by a file that doesn't exist.
    told = refusal(sample(workdir, "--prompt-file", "none.txt", *arguments))
    assert re.search(message or "--prompt-file none.txt can't be read", told)


def test_files_of_ids_need_a_tokenizer(workdir, sample):
    saved = json.loads((workdir / "config.json").read_text())
    saved["data"] |= {"source": "bin", "tokenizer": None}
    saved["samples"]["prompts"] = []
    set_config(workdir, saved)
    assert refusal(sample(workdir, "--prompt", "x")) == (
        "the run was trained on .bin files, which don't say which tokenizer made them; "
        "give its tokenizer.json with --tokenizer"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--workdir DIR is missing; for example: python -m trainer.sample --workdir runs/smoke --prompt"),
        ("--workdir x", '--prompt TEXT is missing; --prompt "" begins a document'),
        ("--workdir x --promt y", "unknown option --promt; did you mean --prompt?"),
        ("--workdir x --prompt", "--prompt: expected at least one argument"),
        ("--workdir x --prompt y --temperature hot", "--temperature: could not convert string to float"),
        ("--workdir x --prompt y --top-p 2", "top_p=2.0 must be more than 0 and at most 1"),
        ("--workdir x --prompt y --num-tokens 0", "num_tokens=0 must be at least 1"),
        ("--workdir x --prompt y --seed -1", "seed=-1 must be an integer from 0 to 2^32 - 1"),
        ("--workdir x --prompt y --implementation flash", "implementation='flash' is no backend of at"),
        ("--workdir x --prompt y --decode-implementation cudnn", "decode_implementation='cudnn' is no backend of deco"),
    ],
)
def test_a_mistyped_command_is_told_in_one_sentence(arguments, message):
    with pytest.raises(UserMistake) as caught:
        parse_command_line(arguments.split())
    assert str(caught.value).startswith(message)
    assert not set("╭│╰─\n") & set(str(caught.value))


def test_flags_reach_the_command():
    line = "--workdir runs/x --prompt a b --top-k 5 --prompt=-c --seed 1"
    command = parse_command_line(line.split())
    assert (command.prompt, command.choice.top_k, command.choice.top_p) == (("a", "b", "-c"), 5, None)
    assert command.seed == (1,)


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for flag in ("workdir", "prompt", "prompt-file", "num-tokens", "temperature", "top-k", "top-p", "seed"):
        assert f"--{flag} " in printed
    assert "python -m trainer.sample" in printed


def test_a_prompt_that_is_no_text_file_is_refused(trained, sample, tmp_path):
    assert refusal(sample(trained.path, "--prompt-file", tmp_path / "none.txt")).endswith(
        "can't be read: No such file or directory"
    )
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    assert refusal(sample(trained.path, "--prompt-file", tmp_path / "bytes")).endswith(
        "is not UTF-8: invalid start byte at byte 3"
    )
    assert refusal(sample(trained.path, "--prompt-file", "/dev/zero")).endswith(
        f"/dev/zero has more than {256 * LENGTH:,} bytes, which is more than the context of {LENGTH} tokens can hold; "
        "shorten it"
    )


def test_a_saved_config_is_read_back(trained, tmp_path):
    path, config = trained.path, trained.config
    assert load_saved_config(path / "config.json") == config
    saved = config_to_json(config)
    del saved["samples"]  # a field that came later
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_saved_config(tmp_path / "config.json") == dataclasses.replace(config, samples=SamplesConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "expected the fields of a GPTConfig, got 3"),
        ({"modl": {}}, "this version knows no 'modl'; did you mean model?"),
        ({"name": 3}, "name=3 is of type int; expected str"),
        ({"mesh": {"data": "2"}}, "mesh.data='2' is of type str; expected int"),
        ({"data": {"source": "text", "files": "a.txt"}}, "data.files='a.txt' is of type str; expected tuple[str, ...]"),
        ({"model": {"masks": [3]}}, "model.masks=3 is of type int; expected Mask"),
        ({"optimizer": {"schedule": "cosin"}}, "optimizer.schedule='cosin' is not one of cosine, wsd"),
        ({"num_steps": 0}, "num_steps=0 must be at least 1"),
    ],
)
def test_a_saved_config_that_cannot_be_read_back_is_told(workdir, sample, change, message):
    path = workdir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    told = refusal(sample(workdir, "--prompt", "x"))
    assert told.startswith(f"config {path}")
    assert message in told


def test_samples_that_cannot_be_written_are_refused_with_the_config(trained):
    config = trained.config
    with pytest.raises(ValueError, match="may let a token see later ones"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, masks=(FullMask(),)))
    with pytest.raises(ValueError, match=r"samples.prompts needs a tokenizer, and a .bin file doesn't say which"):
        dataclasses.replace(config, data=dataclasses.replace(config.data, source="bin"))


def test_the_checkpoint_of_a_step_is_taken_and_no_other(sample, workdir, capsys):
    found = open_saved_run(workdir, setting="--workdir", step=20).checkpoint
    assert (found.step, open_saved_run(workdir, setting="--workdir").checkpoint.step) == (20, 40)
    told = f"--step 30: workdir {workdir} holds no checkpoint of it; there are 20, 40"
    assert refusal(sample(workdir, "--prompt", "a", "--step", 30)) == told
    assert export(["--workdir", str(workdir), "--output", str(workdir / "out"), "--step", "30"]) == 2
    assert capsys.readouterr().err == f"error: {told}\n"
    shutil.rmtree(workdir / "checkpoints" / "20")
    with pytest.raises(TrainingFailed, match="was removed while it was being read; run the same command"):
        restore_params(found, {"embedding": jax.ShapeDtypeStruct((1,), jnp.float32)})


def test_a_damaged_checkpoint_that_was_asked_for_is_not_replaced(workdir):
    (workdir / "checkpoints" / "20" / "run.json").write_text("{}")
    with pytest.raises(TrainingFailed, match=r"20 is damaged \(run\.json is not what was written\)"):
        open_saved_run(workdir, setting="--workdir", step=20)
