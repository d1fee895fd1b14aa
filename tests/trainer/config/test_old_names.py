"""Names that changed: a saved config is read with the old ones, and whoever types one is told the new one."""

import json

import pytest

from experiments import gpt_128k
from trainer.config import ContextConfig
from trainer.config.file import config_to_json, load_saved_config

OLD = {
    "exchange": {"gather": "all_gather", "heads": "all_to_all", "ring": "ring", None: None},
    "deal": {"in_order": "contiguous", "by_cost": "balanced", "zigzag": "zigzag", None: None},
}


def test_a_config_with_old_names_is_read(tmp_path, rng):
    saved, wanted = {}, []
    for field, names in OLD.items():
        saved[field] = list(names)[rng.integers(len(names))]
        wanted.append(names[saved[field]])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_to_json(gpt_128k.gpt_1b_128k()), "context": saved}))
    assert load_saved_config(path).context == ContextConfig(*wanted)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--context.deal", "zigzag"], "did you mean --context.sequence-sharding?"),
        (["--context.exchange", "heads"], "did you mean all_to_all?"),
        (["--context.sequence-sharding", "by_cost"], "did you mean balanced?"),
    ],
)
def test_an_old_name_on_the_command_line_is_refused_with_the_new_one(trainer_command, flags, told):
    finished = trainer_command.run(*flags)
    assert finished.status == 2
    assert told in finished.errors
