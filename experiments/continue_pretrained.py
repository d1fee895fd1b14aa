"""Continued training of a pretrained model on packed documents, 32,768 tokens to a sequence.

Hypothesis: a model that was trained on short contexts learns to use long ones in few steps. The page says nothing about
the model but how it runs, so it serves any Hugging Face folder of the families in layers/pretrained/families.

Command:
    python -m trainer --config experiments/continue_pretrained.py --init-from models/Llama-3.2-1B

Hardware and expected numbers:
    The first loss is the pretrained model's. Whether a model fits, and on what:
    `python -m trainer.compile --config experiments/continue_pretrained.py --init-from DIR --topology h200:1`, which
    needs the folder's config.json alone.

A context longer than the model's own takes RoPE scaling, unless config.json has it: --model.rope-scaling.kind yarn
--model.rope-scaling.factor 4 --model.rope-scaling.original-context-length 8192.

Data: the Python standard library's own sources. For your own see `data` in trainer/config/sections.py.
"""

from layers import GPTConfig
from trainer.config import OptimizerConfig, TrainConfig


def get_config() -> TrainConfig:
    """The config of any pretrained model; `init_from` is where the page looks unless --init-from says otherwise."""
    return TrainConfig(
        name="continued",
        description="A pretrained model, trained further on long sequences",
        init_from="models/pretrained",
        model=GPTConfig(remat="full"),
        num_steps=1000,
        batch_size=4,
        gradient_accumulation=4,
        optimizer=OptimizerConfig(learning_rate=2e-5, num_warmup_steps=50),
    )
