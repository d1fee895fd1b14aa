"""Makes the tiny models of golden/, and what transformers computes with them.

`python -m tests.layers.pretrained.make_golden [CASE …]`, with torch and transformers (made with torch 2.13.0 and
transformers 5.24.0). Seeds are fixed, so that the same versions make the same files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.layers.pretrained.golden import (
    CHECKED_POSITIONS,
    DOCUMENTS,
    GOLDEN,
    NUM_GREEDY_TOKENS,
    PROMPT_LENGTH,
    Expected,
    pack,
)
from tests.layers.pretrained.reference import (
    CASES,
    SIZES,
    float64_everywhere,
    greedy_tokens,
    load_reference,
    logits_of,
    save_random_model,
)


def make_case(case: str, folder: Path, seed: int) -> Expected:
    """Makes a model in a folder, and lets transformers run it.

    Args:
      case: of `CASES`.
      folder: where the model goes.
      seed: of its weights and of the prompt.
    """
    save_random_model(case, folder, seed)
    tokens = np.random.default_rng(seed).integers(0, SIZES["vocab_size"], PROMPT_LENGTH).astype(np.uint8)
    with float64_everywhere():
        model = load_reference(folder)
        documents = np.split(tokens, np.cumsum(DOCUMENTS)[:-1])
        return Expected(
            tokens=tokens,
            logits=logits_of(model, tokens[None])[0, list(CHECKED_POSITIONS)],
            document_logits=np.stack([logits_of(model, document[None])[0, -1] for document in documents]),
            greedy=greedy_tokens(model, tokens, NUM_GREEDY_TOKENS).astype(np.uint8),
        )


def main() -> None:
    """Makes all cases, or those that are named on the command line."""
    GOLDEN.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as name:
            expected = make_case(case, Path(name), seed=1)
            files = {file: (Path(name) / file).read_bytes() for file in ("config.json", "model.safetensors")}
        pack(case, {**files, "expected.npz": expected.to_bytes()})
    sizes = {path.stem: path.stat().st_size for path in GOLDEN.glob("*.zip")}
    print(f"{sum(sizes.values()):,} bytes: {sizes}")


if __name__ == "__main__":
    main()
