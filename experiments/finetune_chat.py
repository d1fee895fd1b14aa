"""A model fine-tuned on chats whose answers stand far back, with the loss on the assistant's tokens alone.

Hypothesis: a model answers from what the user said thousands of tokens earlier once it is trained on chats of that
length, though only a few tokens of each chat, its answers, have a loss. Without a folder, a model of two layers learns
that from nothing, in phases of rising length; with one, the folder's model goes on, with its own template.

Command:
    python -m trainer --config experiments/finetune_chat.py
    python -m trainer --config experiments/finetune_chat.py:init_from=models/Qwen3-0.6B,chats=my/chats.jsonl

Data: JSON-lines or Parquet of `messages`; without `chats`, generated ones (`generated_chats.py`): the user tells what
each of some things is like, between sentences that say nothing, and asks for half of them at the end. Of seven tokens
with a loss one can't be known without the chat, an adjective of 133: a model that doesn't look back comes to
ln(133) / 7 = 0.70 nats per token.
"""

import dataclasses

from experiments.extend_tiny import MODEL, schedule
from experiments.generated_chats import make_chat_folder, make_chats
from layers import GPTConfig
from trainer.config import (
    ChatConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    Phase,
    SourceConfig,
    TrainConfig,
)

LENGTHS = (128, 1024, 16_384)


def get_config(init_from: str = "", chats: str = "", longest: int = LENGTHS[-1]) -> TrainConfig:
    """Fine-tuning of a folder's model, or training of a small one.

    Args:
      init_from: a Hugging Face folder with a chat template; empty: the small model.
      chats: glob of files of chats; empty: generated ones.
      longest: tokens of the longest sequences.
    """
    return finetuned(init_from, chats, longest) if init_from else from_scratch(longest)


def finetuned(init_from: str, chats: str, longest: int) -> TrainConfig:
    """One phase, on a model's own tokens."""
    files = chats or make_chats("long", 2000, (longest // 8, longest // 2))
    return TrainConfig(
        name="finetuned_chat",
        description="A pretrained model, fine-tuned on long chats",
        init_from=init_from,
        model=GPTConfig(remat="full"),
        num_steps=200,
        sequence_length=longest,
        batch_size=4,
        gradient_accumulation=4,
        data=DataConfig(source="chats", files=(files,), chat=ChatConfig(too_long="cut")),
        optimizer=OptimizerConfig(learning_rate=1e-5, num_warmup_steps=20),
        log_every_num_steps=5,
    )


def from_scratch(longest: int) -> TrainConfig:
    """A phase for each length: the shortest chats for two layers to learn to copy, longer ones to look further back."""
    phases = (
        Phase(num_steps=1500),
        Phase(num_steps=250, sequence_length=LENGTHS[1], batch_size=8, rope_base=1e4, **later(short=1, long=3)),
        Phase(
            num_steps=200, sequence_length=LENGTHS[2], batch_size=2, rope_base=1e6, **later(short=1, long=1, longest=4)
        ),
    )[: sum(length <= longest for length in LENGTHS)]
    return TrainConfig(
        name="finetune_chat",
        description="A small model that learns to answer from what stands far back in a chat",
        model=dataclasses.replace(MODEL, vocab_size=640),
        num_steps=sum(phase.num_steps or 0 for phase in phases),
        sequence_length=LENGTHS[0],
        batch_size=64,
        phases=phases,
        data=DataConfig(sources=sources(short=1), tokenizer=make_chat_folder(), end_of_document_token="<|end|>"),
        optimizer=schedule(3e-3, 50),
        evaluation=EvaluationConfig(every_num_steps=250, num_sequences=16),
        checkpoint=CheckpointConfig(every_num_steps=250),
        log_every_num_steps=50,
    )


def later(**weights: float) -> dict:
    """Sources of a phase that isn't the first, and its schedule."""
    return {"sources": sources(**weights), "optimizer": schedule(1e-3, 10)}


def sources(**weights: float) -> tuple[SourceConfig, ...]:
    """Generated chats that fit the phases' sequences, by their shares of the tokens."""
    lengths = {"short": (20_000, (32, 120)), "long": (3000, (300, 1000)), "longest": (400, (4000, 16_000))}
    return tuple(
        SourceConfig(name, (make_chats(name, num_chats, num_words),), "chats", weight=weights.get(name, 0.0))
        for name, (num_chats, num_words) in lengths.items()
    )
