"""Outputs of transformers' tiny models, as make_golden.py keeps them, and the same computed here."""

from __future__ import annotations

import dataclasses
import functools
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from layers import GPT, init_caches
from layers.pretrained import load_gpt

GOLDEN = Path(__file__).parent / "golden"
CASES = tuple(sorted(path.stem for path in GOLDEN.glob("*.zip")))

# Longer than the models' windows and than the contexts that they were, as it were, trained on.
PROMPT_LENGTH = 40
DOCUMENTS = (17, PROMPT_LENGTH - 17)
NUM_GREEDY_TOKENS = 200
CHECKED_POSITIONS = (0, 15, 16, 38, 39)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Outputs of transformers in float64.

    Args:
      tokens: a prompt.
      logits: at some positions of it.
      document_logits: the same for the two documents that the prompt is of, each alone, at each one's last position.
      greedy: the tokens that follow if each is the likeliest.
    """

    tokens: np.ndarray
    logits: np.ndarray
    document_logits: np.ndarray
    greedy: np.ndarray

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(file, **vars(self))
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Expected:
        with np.load(io.BytesIO(data)) as arrays:
            return cls(**arrays)


def unpack(case: str, folder: Path) -> Expected:
    """Unpacks a case's model into a folder, and returns what is expected of it."""
    with zipfile.ZipFile(GOLDEN / f"{case}.zip") as archive:
        for name in archive.namelist():
            if name != "expected.npz":
                (folder / name).write_bytes(archive.read(name))
        return Expected.from_bytes(archive.read("expected.npz"))


def pack(case: str, files: Mapping[str, bytes]) -> None:
    """Writes a case's archive, the same bytes for the same files."""
    with zipfile.ZipFile(GOLDEN / f"{case}.zip", "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)


def compute(folder: Path, tokens: np.ndarray) -> Expected:
    """The same with our model, of the documents packed into one row; within `jax.enable_x64(True)`."""
    model = load_gpt(folder, compute_dtype="float64", param_dtype="float64")
    # The first row is one document, the second one several.
    segment_ids = np.stack([np.ones(PROMPT_LENGTH), np.repeat((1, 2), DOCUMENTS)])
    positions = np.stack([np.arange(PROMPT_LENGTH), np.concatenate([np.arange(length) for length in DOCUMENTS])])
    inputs = (array.astype(np.int32) for array in (tokens, segment_ids, positions))
    logits, greedy = jax.device_get(_run(*nnx.split(model), *inputs))
    return Expected(tokens, logits[0, list(CHECKED_POSITIONS)], logits[1, np.cumsum(DOCUMENTS) - 1], greedy)


@functools.partial(jax.jit, static_argnums=0)
def _run(
    graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    model: GPT = nnx.merge(graphdef, state)
    logits = model.logits(model(jnp.stack([tokens, tokens]), segment_ids, positions))
    length = len(tokens) + NUM_GREEDY_TOKENS
    hidden, caches = model.prefill(tokens[None], init_caches(model.config, 1, length), context_length=length)

    def likeliest(hidden: jax.Array) -> jax.Array:
        return jnp.argmax(model.logits(hidden[:, -1:]), -1).astype(jnp.int32)

    def step(carry, _):
        token, caches = carry
        hidden, caches = model.decode(token, caches, context_length=length)
        return (likeliest(hidden), caches), token[0, 0]

    _, greedy = jax.lax.scan(step, (likeliest(hidden), caches), length=NUM_GREEDY_TOKENS)
    return logits, greedy
