"""Means over bins of positions, contexts and lengths, against loops over single tokens; and the lines of the file."""

import json
import math
from collections import defaultdict

import numpy as np
import pytest

from trainer.data import Documents
from trainer.data.documents import DOCUMENT_DTYPE, Delimiters
from trainer.evaluate.losses import ChosenDocuments
from trainer.evaluate.pictures import draw_loss_by_position, draw_retrieval
from trainer.evaluate.results import Line, append_lines, describe, read_lines

NUM_TARGETS = [40, 64, 65, 100, 300, 256, 299, 1000, 5, 33, 700]


@pytest.fixture
def documents(rng):
    """Documents of so many targets, with a token before and after each."""
    lengths = np.array(NUM_TARGETS) - 1
    table = np.zeros(len(lengths), DOCUMENT_DTYPE)
    table["length"], table["start"] = lengths, np.cumsum(lengths) - lengths
    return Documents((rng.integers(0, 200, lengths.sum()).astype(np.int32),), table, Delimiters(256, 256))


def loss_of(document, start, target):
    """A number for each target of a document, given the context from `start` on."""
    return np.sin(1.0 + document * 7 + target * 0.37) + 0.1 * start / (1 + target)


def losses_of(plan):
    return [
        np.array([loss_of(part.document, part.start, t) for t in range(part.start, part.stop)], np.float32)
        for part in plan.parts
    ]


def test_the_parts_are_the_documents_tokens(documents):
    plan = ChosenDocuments.choose(documents, (32, 64, 256), num_documents=3, seed=1)
    for part, stream in zip(plan.parts, plan.streams(documents), strict=True):
        np.testing.assert_array_equal(stream, documents.stream(part.document, part.start, part.stop + 1))
        assert len(stream) == part.stop - part.start + 1
    assert plan.lengths == (32, 64, 256)
    long = {part.document for part in plan.long}
    assert len(long) == 3
    assert all(NUM_TARGETS[document] >= 256 for document in long)
    assert {(part.document, part.start, part.stop) for part in plan.contexts} == {
        (document, NUM_TARGETS[document] - length, NUM_TARGETS[document])
        for document in long
        for length in (32, 64, 256)
    }
    # One of ≤ 8 targets, three of ≤ 64 and two of ≤ 128; all of the longer ones count as long.
    assert sorted(NUM_TARGETS[part.document] for part in plan.others) == [5, 33, 40, 64, 65, 100]
    assert plan == ChosenDocuments.choose(documents, (32, 64, 256), num_documents=3, seed=1)
    drawn = {ChosenDocuments.choose(documents, (256,), num_documents=1, seed=seed).long for seed in range(30)}
    assert len(drawn) == 5


def test_bins_hold_the_means_of_single_tokens_by_their_weights(documents, rng):
    weights = [rng.choice([1, 1, 0, 2.5, -0.5], length).astype(np.float32) for length in NUM_TARGETS]

    def weigh(document, start, target):
        weight = float(weights[document][target])
        return loss_of(document, start, target) * weight, abs(weight)

    lengths = (32, 64, 256)
    plan = ChosenDocuments.choose(documents, lengths, num_documents=3, seed=2)
    expected = defaultdict(list)
    for document in (part.document for part in plan.long):
        for target in range(256):
            high = max(16, 2 ** math.floor(math.log2(target) + 1)) if target else 16
            expected["loss_by_position", high].append(weigh(document, 0, target))
        end = NUM_TARGETS[document]
        for length in lengths:
            for target in range(end - 16, end):  # half of the shortest context
                expected["loss_of_last_tokens", length].append(weigh(document, end - length, target))
    for part in (*plan.long, *plan.others):
        for target in range(part.stop):
            bucket = 2 ** math.ceil(math.log2(part.stop))
            expected["loss_by_document_length", bucket].append(weigh(part.document, 0, target))
            if target < 32:
                expected["short_context_loss", 32].append(weigh(part.document, 0, target))
    lines = plan.bin(losses_of(plan), [weights[part.document][part.start : part.stop] for part in plan.parts], 32)
    assert {(line.kind, line.length) for line in lines} == set(expected)
    assert len(lines) == len(expected)
    for line in lines:
        of_bin = np.array(expected[line.kind, line.length])
        assert line.num_tokens == (of_bin[:, 1] > 0).sum()
        assert line.loss == pytest.approx(of_bin[:, 0].sum() / of_bin[:, 1].sum(), abs=1e-6)
        assert (line.task, line.depth, line.accuracy) == (None, None, None)


def test_lengths_that_no_document_fills_are_left_out(documents):
    plan = ChosenDocuments.choose(documents, (64, 512, 4096), num_documents=2, seed=0)
    assert plan.lengths == (64, 512)
    assert {part.stop for part in plan.long} == {512}
    plan = ChosenDocuments.choose(documents, (2048, 4096), num_documents=2, seed=0)
    assert (plan.lengths, plan.long, plan.contexts) == ((), (), ())
    lines = plan.bin(losses_of(plan), plan.weights(documents), shortest=2048)
    assert {line.kind for line in lines} == {"loss_by_document_length", "short_context_loss"}
    assert all(math.isfinite(line.loss) for line in lines)
    unweighted = [np.zeros(part.stop - part.start, np.float32) for part in plan.parts]
    assert {(line.loss, line.num_tokens) for line in plan.bin(losses_of(plan), unweighted, 2048)} == {(None, 0)}


def test_lines_are_read_back_and_what_is_none_is_left_out(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    assert read_lines(path) == []
    lines = [
        Line("retrieval", 4096, "niah_single", 0.5, accuracy=0.25, num_examples=4, step=7, seed=1),
        Line("short_context_loss", 4096, loss=math.nan, num_tokens=9),
    ]
    append_lines(path, lines)
    assert lines[1].loss is None
    with path.open("a") as file:
        file.write('{"kind": "cut')  # a program that writes here itself may be killed
    append_lines(path, lines[:1])
    odd = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        for name, value in (("length", "4k"), ("loss", "low"), ("accuracy", True), ("kind", None), ("more", 1)):
            file.write(json.dumps(odd | {name: value}) + "\n")
        file.write(json.dumps(odd | {"seed": None}) + "\n[]\n7\n")
    assert read_lines(path) == [*lines, lines[0]]
    names = "kind task length depth accuracy num_examples loss num_tokens step seed digest"
    assert set(odd) == set(names.split())


LINES = [
    Line("retrieval", length, "niah_single", depth, accuracy=accuracy, num_examples=num_examples, step=step)
    for step, length, depth, accuracy, num_examples in (
        (100, 4096, 0.0, 1.0, 4),
        (100, 4096, 1.0, 0.0, 4),
        (100, 32_768, 0.0, 0.0, 4),
        (300, 4096, 0.0, 0.0, 4),  # evaluated again: the next line counts
        (300, 4096, 0.0, 1.0, 6),
        (300, 4096, 1.0, 0.5, 2),
        (300, 32_768, 0.0, 0.75, 4),
    )
] + [
    Line("loss_of_last_tokens", 4096, loss=loss, num_tokens=512, step=step) for step, loss in ((100, 3.5), (300, 3.25))
]


def test_the_tables_show_before_and_after():
    assert describe(LINES, 300).splitlines() == [
        "accuracy, step 100 → step 300         4k       32k",
        "niah_single                    50% → 88%  0% → 75%",
        "",
        "nats per token, step 100 → step 300                4k",
        "loss of the last tokens, given so many  3.500 → 3.250",
    ]
    alone = [line for line in LINES if line.step == 300]
    assert describe(alone, 300).splitlines()[:2] == ["accuracy      4k  32k", "niah_single  88%  75%"]


def test_pictures_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    curve = [
        Line("loss_by_position", 2**k, loss=5 - k / 4, num_tokens=9, step=step) for step in (0, 9) for k in range(4, 12)
    ]
    assert draw_loss_by_position(curve, 9, tmp_path / "loss.png")
    assert draw_retrieval(LINES, 300, tmp_path / "map.png")
    for name in ("loss.png", "map.png"):
        pixels = image.imread(tmp_path / name)
        assert pixels.shape[1] == 1080
        assert (pixels[0, 0] == 1).all(), "a white ground reads on any page"
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50
    # Another step had other tasks, or none.
    more = [*LINES, Line("retrieval", 4096, "common_words", accuracy=0.5, num_examples=1, step=300)]
    assert draw_retrieval(more, 300, tmp_path / "more.png")
    assert image.imread(tmp_path / "more.png").shape[0] > image.imread(tmp_path / "map.png").shape[0]
    assert draw_retrieval([*curve, *LINES], 300, tmp_path / "alone.png")
    assert not draw_loss_by_position(LINES, 300, tmp_path / "none.png")
    assert not draw_retrieval(curve, 9, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
