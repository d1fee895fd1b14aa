"""The picture of a run's losses."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from trainer.observers import plots
from trainer.observers.plots import draw_losses, draw_mixture


@pytest.fixture
def metrics(tmp_path):
    """Writes metrics.jsonl from its rows."""

    def write(*rows: object):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def draw(metrics, title="run") -> bool:
    return draw_losses(metrics, metrics.with_name("loss.png"), title=title, unigram_nats_per_token=3.0)


def test_losses_are_drawn_whatever_else_the_file_holds(metrics, tmp_path):
    pytest.importorskip("matplotlib", reason="the plots extra isn't installed")
    steps = [{"step": step, "loss": 4 - step / 10} for step in range(1, 20)]
    path = metrics(*steps, {"step": 20, "loss": None}, {"step": 20, "validation_nats_per_token": 2.5}, "{half", "null")
    assert draw(path, title="costs $x_{ and [more]")
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture.endswith(b"IEND\xaeB`\x82")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]
    assert "matplotlib.pyplot" not in sys.modules
    # Another loss makes another picture, and the old one stays until then.
    assert draw(metrics(*steps[:5]))
    assert (tmp_path / "loss.png").read_bytes() != picture


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that are made."""
    figure = pytest.importorskip("matplotlib.figure", reason="the plots extra isn't installed")
    made = []
    monkeypatch.setattr(
        figure, "Figure", lambda *args, real=figure.Figure, **kwargs: made.append(real(*args, **kwargs)) or made[-1]
    )
    return made


PHASES = [
    SimpleNamespace(first_step=step, config=SimpleNamespace(sequence_length=2048 * step + 64)) for step in (0, 3, 6)
]


def borders(axes) -> tuple[list, list]:
    """The texts with their places, and the places of upright lines."""
    texts = [(text.xy[0], text.get_text()) for text in axes.texts]
    return texts, [line.get_xdata()[0] for line in axes.lines if len({*line.get_xdata()}) == 1]


def test_each_phase_that_has_begun_has_a_line_with_its_length(metrics, tmp_path, drawn):
    path = metrics(*({"step": step, "loss": 1.0} for step in range(1, 6)))
    assert draw_losses(path, tmp_path / "loss.png", title="run", unigram_nats_per_token=3.0, phases=PHASES)
    [axes] = drawn[0].axes
    assert borders(axes) == ([(3.5, "6,208")], [3.5])


def test_a_mixture_has_these_lines_at_the_borders_of_its_windows(metrics, tmp_path, drawn):
    shares = {"mixture/a": 0.25, "mixture/b": 0.75, "mixture_lengths/0": 1.0}
    path = metrics(*({"step": step, **shares} for step in (1, 3, 5)))
    assert draw_mixture(path, tmp_path / "mixture.png", title="run", phases=PHASES)
    assert [borders(axes) for axes in drawn[0].axes] == [([(3, "6,208")], [3])] * 2


def test_without_a_loss_or_matplotlib_there_is_no_picture(metrics, tmp_path, monkeypatch):
    assert not draw(metrics({"step": 1, "loss": None}))
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not draw(metrics({"step": 1, "loss": 1.0}))
    assert not (tmp_path / "loss.png").exists()
