"""The trainer's command, in this process or in one of its own, on a model small enough for a test."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import resource
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from layers import GPTConfig, RopeScaling
from tests.seeds import seeded_rng
from trainer.__main__ import main
from trainer.config.file import load_config

CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
REPOSITORY = Path(__file__).parents[2]

TINY_CONFIG = """
    from kernels import CausalMask, LocalMask
    from layers import GPTConfig
    from trainer.config import CheckpointConfig, CompilationConfig, DataConfig, EvaluationConfig, LossConfig
    from trainer.config import OptimizerConfig, TrainConfig


    def get_config():
        return TrainConfig(
            name="tiny",
            description="A GPT small enough for a test.",
            num_steps=60,
            sequence_length=256,
            batch_size=2,
            log_every_num_steps=8,
            model=GPTConfig(
                vocab_size=260, num_layers=2, width=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=64,
                # One kind of layer, and nothing made twice: most of a run's time is tracing and compiling.
                masks=(CausalMask() & LocalMask(63, 0),), remat="none",
            ),
            data=DataConfig(source="text", files=({documents!r},), validation_fraction=0.2, token_cache_dir={tokens!r}),
            optimizer=OptimizerConfig(num_warmup_steps=2),
            loss=LossConfig(chunk_size=128),
            evaluation=EvaluationConfig(every_num_steps=30, num_sequences=2),
            checkpoint=CheckpointConfig(every_num_steps=20, num_kept=2),
            compilation=CompilationConfig(cache_dir={cache!r}),
        )
"""


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    status: int
    output: str
    errors: str
    seconds: float
    """Since the start, or whatever else was timed; NaN if nothing was."""


@dataclass(frozen=True)
class TrainerCommand:
    """`python -m trainer --config <the tiny config>`."""

    config: Path

    def line(self, *arguments: object) -> list[str]:
        """A command line, with the tiny config unless it names another."""
        return [*map(str, arguments), *([] if "--config" in arguments else ["--config", str(self.config)])]

    def run(self, *arguments: object) -> Finished:
        """The command, run to its end in this process: a process of its own would take seconds to import JAX."""
        output, errors, begun = io.StringIO(), io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), compilation_cache_as_before():
            status = main(self.line(*arguments))
        return Finished(status, output.getvalue(), errors.getvalue(), time.perf_counter() - begun)

    def start(self, *arguments: object, module: str = "trainer", **environment: str) -> subprocess.Popen[str]:
        """The command in a process of its own, for signals, kills and an environment; its output is unbuffered.

        `module` and its own arguments take the trainer's place.
        """
        line = [sys.executable, "-u", "-m", *module.split(), *self.line(*arguments)]
        # No bytecode: a test may limit how long this process's files may be, and Python keeps a module's that was cut.
        env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= environment
        return subprocess.Popen(
            line,
            cwd=REPOSITORY,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def run_alone(self, *arguments: object, module: str = "trainer", **environment: str) -> Finished:
        """The command, run to its end in a process of its own."""
        begun = time.perf_counter()
        return self.finish(self.start(*arguments, module=module, **environment), begun)

    @staticmethod
    def finish(process: subprocess.Popen[str], begun: float = math.nan) -> Finished:
        """What a started command came to; `begun` is the `time.perf_counter()` that its seconds count from."""
        try:
            # Two runs took 200 s beside thirteen busy processes on two cores. Only one that hangs may be cut off.
            output, errors = process.communicate(timeout=240)
        finally:
            process.kill()  # one that takes too long must not outlive its test
        return Finished(process.returncode, output, errors, time.perf_counter() - begun)


@contextlib.contextmanager
def compilation_cache_as_before() -> Iterator[None]:
    """Undoes what is set inside for JAX's persistent cache."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def trainer_command(tmp_path_factory) -> TrainerCommand:
    """The tiny config over documents made for it. All tests, of all workers, share one compilation cache."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = seeded_rng("documents")
    words = ["".join(chr(97 + letter) for letter in rng.integers(0, 26, rng.integers(1, 9))) for _ in range(500)]
    (folder / "documents").mkdir()
    for number in range(120):
        text = " ".join(rng.choice(words, rng.integers(5, 400)))
        (folder / "documents" / f"{number}.txt").write_text(text)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    shared = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.getbasetemp()
    config = folder / "tiny.py"
    content = textwrap.dedent(TINY_CONFIG).format(
        documents=str(folder / "documents" / "*.txt"), tokens=str(folder / "tokens"), cache=str(shared / "xla-cache")
    )
    config.write_text(content)
    return TrainerCommand(config)


@pytest.fixture(scope="session")
def read_tensorboard():
    """Reads a folder of event files as TensorBoard does: {tag: {step: value}}, numbers and texts alike.

    With `wall_times`, {tag: {step: Unix time}}. Checksums must be right, and no point of a curve may be there twice.
    """

    def read(folder: Path, *, wall_times: bool = False) -> dict[str, dict[int, float | str]]:
        values: dict[str, dict[int, float | str]] = {}
        for file in sorted(path for path in folder.iterdir() if "tfevents" in path.name):
            content, offset = file.read_bytes(), 0
            while offset < len(content):
                # TFRecord: length, its checksum, the event, its checksum.
                if len(content) < offset + 12:
                    break  # cut short by a kill
                length, length_sum = struct.unpack_from("<QI", content, offset)
                body = content[offset + 12 : offset + 12 + length]
                (body_sum,) = struct.unpack_from("<I", content, offset + 12 + length)
                assert (length_sum, body_sum) == (masked_crc32c(content[offset : offset + 8]), masked_crc32c(body))
                event = event_pb2.Event.FromString(body)
                if event.session_log.status == event_pb2.SessionLog.START:
                    values = {
                        tag: {s: v for s, v in points.items() if s < event.step} for tag, points in values.items()
                    }
                for value in event.summary.value:
                    text = [item.decode() for item in value.tensor.string_val]
                    points = values.setdefault(value.tag, {})
                    assert event.step not in points or value.tag.startswith("compile/"), (value.tag, event.step)
                    points[event.step] = event.wall_time if wall_times else text[0] if text else value.simple_value
                offset += length + 16
        return {tag: points for tag, points in values.items() if points}

    return read


@pytest.fixture(scope="session")
def read_run():
    """Reads a workdir: (record, rows of steps, rows of evaluations), the rows without their `time`."""

    def read(workdir: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        assert all(abs(row.pop("time") - time.time()) < 3600 for row in rows)
        record = json.loads((workdir / "record.json").read_text())
        return record, [row for row in rows if "loss" in row], [row for row in rows if "loss" not in row]

    return read


class WatchedConsole:
    """A console that keeps what it is told, as (method, *arguments), and does nothing else."""

    def __init__(self):
        self.told: list[tuple] = []

    def __getattr__(self, name):
        return lambda *arguments, **_: self.told.append((name, *arguments))


@pytest.fixture
def watched_console() -> WatchedConsole:
    return WatchedConsole()


@pytest.fixture
def limit_file_size(monkeypatch):
    """Within it, no file can be written beyond so many bytes; it ends as a full disk does, amid a write."""

    @contextlib.contextmanager
    def limit(num_bytes: int):
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep a module's that was cut
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def random_texts(rng: np.random.Generator) -> Callable[[int], list[str]]:
    """Distinct texts of mixed lengths, with characters of one to four bytes."""

    def make(count: int) -> list[str]:
        letters = np.array(list('abcdefgh \n{}"\\éß中🙂'))
        return [f"{i}:" + "".join(rng.choice(letters, rng.integers(1, 200))) for i in range(count)]

    return make


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[Path], Path]:
    """Saves a byte-level BPE tokenizer with merges, an end-of-document token, truncation, padding and a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    def make(path: Path) -> Path:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the cat and the hat", "the hat and the cat"] * 10, trainer)
        end = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
        )
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=4)
        tokenizer.save(str(path))
        return path

    return make


@pytest.fixture
def tokenizer_file(tmp_path: Path, make_tokenizer) -> Path:
    """A tokenizer.json of `make_tokenizer`."""
    return make_tokenizer(tmp_path / "tokenizer.json")


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face folder that was made for a test, and what it holds."""

    folder: Path
    model: GPTConfig
    params: dict[str, Any]
    """NumPy arrays, as in `TrainState`."""
    page: Path
    """A config file that says nothing about the model but how it runs."""


PAGE = """
    from layers import GPTConfig
    from trainer.config import CheckpointConfig, CompilationConfig, DataConfig, EvaluationConfig, LossConfig
    from trainer.config import OptimizerConfig, TrainConfig


    def get_config():
        return TrainConfig(
            name="continued",
            num_steps=2,
            sequence_length=64,
            batch_size=2,
            model=GPTConfig(compute_dtype="float32", remat="none", implementation="reference"),
            data=DataConfig(source="text", files=({documents!r},), validation_fraction=0.2, token_cache_dir={tokens!r}),
            optimizer=OptimizerConfig(num_warmup_steps=1),
            loss=LossConfig(chunk_size=64),
            evaluation=EvaluationConfig(every_num_steps=2, num_sequences=2),
            checkpoint=CheckpointConfig(every_num_steps=2),
            compilation=CompilationConfig(cache_dir={cache!r}),
        )
"""


@pytest.fixture(scope="session")
def pretrained(trainer_command, make_tokenizer, tmp_path_factory) -> Pretrained:
    """A Llama of random parameters with a tokenizer."""
    from layers.pretrained import write_huggingface
    from trainer.saved_run import abstract_params

    folder = tmp_path_factory.mktemp("pretrained")
    model = GPTConfig(
        vocab_size=304,
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=48,
        mlp="swiglu",
        tie_embeddings=False,
        rope_base=5000.0,
        rope_scaling=RopeScaling("llama3", 4.0, original_context_length=32),
        norm_epsilon=1e-5,
    )
    rng = seeded_rng("pretrained")
    shapes = abstract_params(model, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    (folder / "tokenizer").mkdir()
    make_tokenizer(folder / "tokenizer" / "tokenizer.json")
    write_huggingface(folder / "llama", model, params, tokenizer_dir=folder / "tokenizer")
    config = load_config(trainer_command.config)
    page = folder / "page.py"
    page.write_text(
        textwrap.dedent(PAGE).format(
            documents=config.data.files[0], tokens=config.data.token_cache_dir, cache=config.compilation.cache_dir
        )
    )
    return Pretrained(folder / "llama", model, params, page)
