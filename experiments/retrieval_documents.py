"""Documents that ask for what lies far back in them, made once and kept: the data of the pages that train retrieval."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from trainer.data.stdlib import find_stdlib_files
from trainer.evaluate.tasks import NOISE, make_documents, write_documents

FOLDER = Path("~/.cache/flax-longcontext/documents")


def make_files(
    name: str, tasks: Sequence[str], num_documents: int, num_bytes: tuple[int, int], num_questions: int, *, noise: bool
) -> tuple[str]:
    """The file of such documents, as `SourceConfig.files` names it. It is made where it is missing.

    Args:
      name: begins the file's name.
      tasks: as `trainer.evaluate --tasks` names them; each has an equal share of the documents.
      num_documents: how many.
      num_bytes: least and most bytes of a document.
      num_questions: in each document.
      noise: RULER's sentences as the haystack; False: Python's own sources.
    """
    seed = 20261129  # evaluations draw other needles, from small seeds
    known = [1, list(tasks), num_documents, num_bytes, num_questions, seed, noise]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
    path = FOLDER.expanduser() / f"{name}-{digest}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"making {path}", flush=True)
        documents = make_documents(
            tasks,
            num_documents=num_documents,
            num_bytes=num_bytes,
            num_questions=num_questions,
            haystack=NOISE if noise else _read_sources(),
            seed=seed,
        )
        write_documents(path, documents)
    return (str(path),)


def _read_sources() -> str:
    texts = (path.read_bytes().decode("ascii", "ignore") for _, path in find_stdlib_files())
    return "\n".join(texts)
