"""From an understood command line to sequences and tables, on the terminal or in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from trainer.config import TrainConfig
from trainer.data import Corpus, load_corpus
from trainer.data.tokenizers import PretokenizedIds
from trainer.errors import TrainingFailed
from trainer.files.atomic import write_atomically
from trainer.show.first_batches import open_batches, read_batches
from trainer.show.html_page import html_table, html_text, html_title, page_end, page_head
from trainer.show.marks import LEGEND, Marked, marked, title_of_sequence, title_of_text
from trainer.show.readable import ReadableSequence
from trainer.show.show_command import ShowCommand
from trainer.show.tables import BatchTables
from trainer.show.terminal_text import color_text
from trainer.terminal.columns import align
from trainer.terminal.console import Console


class ShownText(NamedTuple):
    """A document, or a branch of a tree, as it is shown."""

    document: int
    """Which of the sequence's, from 0."""
    title: str
    pieces: Iterator[Marked]


def run(command: ShowCommand) -> None:
    """Shows the first sequences of a config, and the tables of their batches.

    Raises:
      UserMistake: the data can't be trained on.
      TrainingFailed: the documents are used up, or the HTML file can't be written.
    """
    messages, console, run_config = Console(sys.stderr), Console(), command.train
    index = (command.phase or 1) - 1
    config = run_config.in_phases()[index].config
    corpus = load_corpus(run_config.data, vocab_size=config.model.vocab_size, on_progress=messages.note)
    if isinstance(corpus.tokenizer, PretokenizedIds):
        messages.note("ids stand for text: .bin files don't say which tokenizer made them; set data.tokenizer")
    tables = BatchTables(corpus, config.data)
    sequences: list[ReadableSequence] = []
    num_batches = 0
    for batch in read_batches(open_batches(run_config, index, corpus, messages.note), command.num_sequences):
        num_batches += 1
        for place, documents in enumerate(batch.documents):
            arrays = {name: array[place] for name, array in batch.arrays.items()}
            tables.add(arrays, documents)
            if len(sequences) < command.num_sequences:
                sequences.append(ReadableSequence.of(len(sequences), arrays, documents))
    title = _title(command, config, corpus)
    here = f"all to train on, and those in the first {num_batches * config.batch_size:,} sequences"
    of_tables = {f"sources: {here}": tables.by_source(), f"lengths: {here}": tables.by_length()}
    shown = (
        (title_of_sequence(each, config.batch_size), _shown_texts(command, corpus, tables, each)) for each in sequences
    )
    if command.html is None:
        console.note(f"{title}\n{LEGEND}")
        for heading, texts in shown:
            console.note(f"\n{heading}")
            for text in texts:
                console.note(f"\n── {text.title}")
                print(color_text(text.pieces, text.document))
    else:
        page = [page_head(title)]
        for heading, texts in shown:
            page += [html_title(heading), *(html_text(text.title, text.pieces, text.document) for text in texts)]
        for heading, rows in of_tables.items():
            page += [html_title(heading), html_table(rows)]
        try:
            write_atomically(command.html, "".join([*page, page_end()]))
        except OSError as error:
            raise TrainingFailed(f"--html {command.html} can't be written: {error.strerror}") from error
        console.note(f"{title}\nwritten: {command.html}")
    for heading, rows in of_tables.items():
        console.note("\n".join(["", heading, *align(rows)]))


def _title(command: ShowCommand, config: TrainConfig, corpus: Corpus) -> str:
    phase = "" if command.phase is None else f", phase {command.phase}"
    apart = "" if config.data.keep_documents_apart else "; tokens see those of other documents, too"
    return (
        f"{config.name}{phase}: batches of {config.batch_size} × {config.sequence_length:,} tokens, "
        f"{corpus.tokenizer.name} tokenizer, documents {corpus.tokenizer.delimiters}{apart}"
    )


def _shown_texts(
    command: ShowCommand, corpus: Corpus, tables: BatchTables, sequence: ReadableSequence
) -> Iterator[ShownText]:
    num_at_ends = None if command.whole else sequence.num_at_ends
    num_targets = corpus.train.num_targets
    for text in sequence.texts:
        document = sequence.documents.item(text.segment)
        title = title_of_text(text, tables.source_of(document), num_targets.item(document))
        shown = text.shown(corpus.tokenizer, num_at_ends)
        yield ShownText(text.segment, title, marked(shown, with_ids=command.ids))
