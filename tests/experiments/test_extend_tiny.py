"""The page's claim: a second phase makes retrieval work at eight times the first length, and only that phase does."""

import dataclasses
import time

import pytest

from experiments import extend_tiny
from trainer.evaluate.results import RETRIEVAL, read_lines
from trainer.train import train
from trainer.workdir import claim_workdir


def accuracies(tmp_path, *, extend: bool) -> dict[tuple[int, int], float]:
    """By step and length: the mean over depths."""
    config = extend_tiny.get_config(extend=extend)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, lengths=(64, 512)))
    workdir = claim_workdir(tmp_path / f"{extend}", config)
    assert train(config, workdir, command=["test"], started=time.perf_counter()) == 0
    found: dict[tuple[int, int], list[float]] = {}
    for line in read_lines(workdir.path / "evaluations.jsonl"):
        if line.kind == RETRIEVAL:
            found.setdefault((line.step, line.length), []).append(line.accuracy)
    return {key: sum(values) / len(values) for key, values in found.items()}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extend", [True, False])
def test_only_the_longer_phase_extends_the_context(tmp_path, monkeypatch, extend):
    monkeypatch.setattr("experiments.retrieval_documents.FOLDER", tmp_path / "documents")
    monkeypatch.setattr("experiments.extend_tiny.FOLDER", tmp_path / "documents")
    found = accuracies(tmp_path, extend=extend)
    assert found[400, 64] > 0.5
    assert found[400, 512] < 0.2
    if extend:
        assert found[650, 512] > 0.8
    else:
        assert found[650, 512] < 0.2
        assert found[650, 64] > 0.8
