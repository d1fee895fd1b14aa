"""Random configs of every family, and small models in the words of published ones: transformers computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layers.pretrained import config_from_huggingface, read_params, write_huggingface
from layers.pretrained.families import MODULES
from layers.pretrained.save import family_of
from tests.layers.decoder_oracle import decoder_logits
from tests.layers.pretrained.published_configs import PUBLISHED
from tests.layers.pretrained.random_configs import draw, shrunk

pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from tests.layers.pretrained.reference import (  # noqa: E402
    float64_everywhere,
    load_reference,
    logits_of,
    randomize,
    torch,
)

FAMILIES = tuple(name for name in MODULES if name != "gemma3")  # whose language model is gemma3_text
NUM_CONFIGS = 20
LENGTH = 30
TOLERANCE = 1e-9  # of the largest logit


def save_model(values: dict[str, Any], folder: Path, rng: np.random.Generator) -> bool:
    """Makes a model of a config.json in a folder; whether transformers can."""
    # It would ask for the code's modules, and for a quantizer.
    obeyed = {name: value for name, value in values.items() if name not in ("auto_map", "quantization_config")}
    (folder / "config.json").write_text(json.dumps(obeyed))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # of many types
        return False
    seed = int(rng.integers(2**31))
    randomize(model, torch.Generator().manual_seed(seed), is_gemma=values["model_type"].startswith("gemma"))
    model.to(torch.float64).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(obeyed))
    return True


def refusal_of(folder: Path) -> str | None:
    """The refusal of the folder's config.json; None: it is read."""
    try:
        config_from_huggingface(folder)
    except ValueError as refusal:
        return str(refusal)
    return None


def expected_logits(folder: Path, tokens: np.ndarray) -> np.ndarray | None:
    """The logits of transformers; None where it fails."""
    try:
        with float64_everywhere():
            return logits_of(load_reference(folder), tokens[None])[0]
    except Exception:  # of many types
        return None


def assert_read_right(folder: Path, expected: np.ndarray, tokens: np.ndarray) -> None:
    """The folder's model computes what is expected, and so does its export in transformers."""
    config = config_from_huggingface(folder)
    params = jax.device_get(read_params(folder, config, dtype="float64"))
    scale = np.abs(expected).max()
    # `decoder_logits` is what test_decoder.py holds the model to.
    np.testing.assert_allclose(decoder_logits(config, params, tokens), expected, rtol=0, atol=TOLERANCE * scale)
    try:
        family_of(config)
    except ValueError:
        return  # it came from a family of several models, or says what transformers 4 and 5 would read otherwise
    write_huggingface(folder / "export", config, params, dtype="float64", context_length=LENGTH)
    exported = expected_logits(folder / "export", tokens)
    assert exported is not None
    np.testing.assert_allclose(exported, expected, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_config_is_read_as_transformers_reads_it_or_is_refused(name, tmp_path, rng):
    classes = tuple(transformers.CONFIG_MAPPING[name] for name in FAMILIES)
    num_read = 0
    with jax.enable_x64(True):
        for number in range(NUM_CONFIGS):
            (folder := tmp_path / str(number)).mkdir()
            values = draw(rng, transformers.CONFIG_MAPPING[name], classes)
            tokens = rng.integers(0, values["vocab_size"], LENGTH)
            (folder / "config.json").write_text(json.dumps(values))
            if (refusal := refusal_of(folder)) is not None:
                assert "\n" not in refusal
                continue
            if not save_model(values, folder, rng) or (expected := expected_logits(folder, tokens)) is None:
                continue  # transformers refuses it
            if not np.isfinite(expected).all():
                continue
            print(json.dumps(values))
            assert_read_right(folder, expected, tokens)
            num_read += 1
    assert num_read > 0, "none of the configs was read"


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_model_in_a_published_ones_words_computes_what_transformers_computes(name, tmp_path, rng):
    values = shrunk(PUBLISHED[name][0])
    print(json.dumps(values))
    tokens = rng.integers(0, values["vocab_size"], LENGTH)
    if not save_model(values, tmp_path, rng):
        pytest.skip("this version of transformers refuses it")
    expected = expected_logits(tmp_path, tokens)
    assert expected is not None
    with jax.enable_x64(True):
        assert_read_right(tmp_path, expected, tokens)
