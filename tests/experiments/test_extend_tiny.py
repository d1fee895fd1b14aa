"""The page's claim: a second phase makes retrieval work at eight times the first length, and only that phase does."""

import dataclasses
import shutil
import time

import pytest

from experiments import extend_tiny
from experiments.retrieval_documents import make_files
from tests.trainer.conftest import compilation_cache_as_before
from trainer.config import CompilationConfig, TrainConfig
from trainer.evaluate.results import RETRIEVAL, read_lines
from trainer.evaluate.tasks.words import ADJECTIVES, NOUNS
from trainer.train import train
from trainer.workdir import claim_workdir


@pytest.fixture(autouse=True)
def documents_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.retrieval_documents.FOLDER", tmp_path / "documents")
    monkeypatch.setattr("experiments.extend_tiny.FOLDER", tmp_path / "documents")


@pytest.fixture(autouse=True)
def compilation_cache():
    with compilation_cache_as_before():
        yield


def accuracies(path, config: TrainConfig) -> dict[tuple[int, int], float]:
    """By step and length: the mean over depths, but those within the first length, where any model finds a word."""
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, token_cache_dir=str(path.parent / "tokens")),
        evaluation=dataclasses.replace(config.evaluation, lengths=(64, 512)),
        compilation=CompilationConfig(cache_dir=str(path.parent / "programs")),
    )
    workdir = claim_workdir(path, config)
    assert train(config, workdir, command=["test"], started=time.perf_counter()) == 0
    found: dict[tuple[int, int], list[float]] = {}
    for line in read_lines(path / "evaluations.jsonl"):
        if line.kind == RETRIEVAL and (line.length == 64 or (1 - line.depth) * line.length > 64):
            found.setdefault((line.step, line.length), []).append(line.accuracy)
    return {key: sum(values) / len(values) for key, values in found.items()}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extend", [True, False])
def test_only_the_longer_phase_extends_the_context(tmp_path, extend):
    found = accuracies(tmp_path / "run", extend_tiny.get_config(extend=extend))
    assert found[400, 64] > 0.5
    assert found[400, 512] < 0.2
    if extend:
        assert found[650, 512] > 0.8
    else:
        assert found[650, 512] < 0.2
        assert found[650, 64] > 0.8


def make_smaller(config: TrainConfig, *, seed: int) -> TrainConfig:
    """The page with fewer steps, and with one narrow layer."""
    first, second = config.phases
    if second.sequence_length is not None:
        second = dataclasses.replace(second, batch_size=2)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, vocab_size=64, num_layers=1, width=64, num_heads=2, num_kv_heads=2, mlp_width=128
        ),
        seed=seed,
        num_steps=260,
        batch_size=32,
        optimizer=extend_tiny.schedule(1e-2, 10),
        phases=(
            dataclasses.replace(first, num_steps=200),
            dataclasses.replace(second, optimizer=extend_tiny.schedule(3e-3, 5)),
        ),
        evaluation=dataclasses.replace(config.evaluation, every_num_steps=200, num_sequences=8),
        checkpoint=dataclasses.replace(config.checkpoint, every_num_steps=200),
    )


def test_a_smaller_model_shows_the_direction(tmp_path, monkeypatch):
    """Each document has one question and few words to choose from, so one layer learns it in few steps.

    A guess is right in 1 of 16. Both runs have their first phase in common.
    """
    for module in ("trainer.evaluate.tasks.key_values", "experiments.extend_tiny"):
        monkeypatch.setattr(f"{module}.ADJECTIVES", ADJECTIVES[:16])
        monkeypatch.setattr(f"{module}.NOUNS", NOUNS[:8])

    def make_few(name, tasks, num_documents, num_bytes, num_questions, *, noise):
        if num_bytes[1] < 600:
            num_bytes = (60, num_bytes[1])  # shorter documents, so that a step has more questions
        return make_files(name, tasks, num_documents // 20, num_bytes, 1, noise=noise)

    monkeypatch.setattr("experiments.extend_tiny.make_files", make_few)
    extended, same = (make_smaller(extend_tiny.get_config(extend=extend), seed=0) for extend in (True, False))
    found = accuracies(tmp_path / "extended", extended)
    assert found[200, 64] > 0.6
    assert found[200, 512] < 0.3
    assert found[260, 64] > 0.8
    assert found[260, 512] > 0.8
    shutil.copytree(tmp_path / "extended" / "checkpoints" / "200", tmp_path / "same" / "checkpoints" / "200")
    shutil.copy(tmp_path / "extended" / "config.json", tmp_path / "same")
    found = accuracies(tmp_path / "same", same)
    assert found[260, 64] > 0.6
    assert found[260, 512] < 0.3
