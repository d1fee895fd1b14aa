"""A longer context for a pretrained model: 32,768 tokens to a sequence, then 131,072, in one run.

Hypothesis: a model learns to use 131,072 tokens in as many steps as it needed for 32,768. The phases are ProLong's
recipe (arXiv:2410.02660): a RoPE base that grows with the length, a warm-up and a cosine in each phase, and carried
moments. RoPE stays as it is where the model knows the length already. The page says nothing about the model but how
it runs, so it serves any Hugging Face folder of the families in layers/pretrained/families, and a run's workdir.

Command:
    python -m trainer --config experiments/extend_context.py --init-from models/Qwen3-0.6B

Hardware and expected numbers:
    One H200, or two with --mesh.context 2. The first loss is the pretrained model's. Whether the phases of a model fit,
    and on what: `python -m trainer.compile --config experiments/extend_context.py --init-from DIR --topology h200:1`,
    which needs the folder's config.json alone. Of Qwen3-0.6B's it says 16.1 GB for the first phase and 25.0 GB for the
    second, of 112.6 (JAX 0.11.2, 2026-11-29).

    Run for a small model: that of `long_context_from_scratch.py` with `phases=()` and 1,500 steps, 11M parameters
    trained on 2,048 tokens and exported by `python -m trainer.export`; on that page's documents, with
    `--config experiments/extend_context.py:num_steps=600,learning_rate=5e-4 --data.tokenizer byte --data.source jsonl
    --data.files '~/.cache/flax-longcontext/documents/long*.jsonl' --evaluation.lengths 2048 32768 131072`. One H200
    (JAX 0.11.2, 2026-11-29, f44340d5): 3 min 24 s, of which steps 148 s. Questions answered exactly, teacher-forced,
    over ten depths (20 of each kind and length):

        tokens           2,048   32,768   131,072
        step 300          100%     100%       25%    single needles
                          100%     100%       20%    multi-key needles
        step 600          100%     100%      100%    single needles
                           95%      95%      100%    multi-key needles

    Validation loss: 0.100 nats per token at step 100, 0.089 at 200 and 0.086 at 300, at 32,768 tokens; 0.142 at 400,
    0.138 at 500 and 0.135 at 600, at 131,072, on other sequences.

Other lengths, batches or meshes: `--phases 64k,256k` on experiments/continue_pretrained.py makes the phases from all
flags. With `--write-page my_extension.py`, it writes them out as a page to edit.

Data: the Python standard library's own sources, of which few are as long as a sequence; a long context is learned from
long documents. For your own see `data` in trainer/config/sections.py.
"""

from layers import GPTConfig
from trainer.config import OptimizerConfig, TrainConfig
from trainer.config.extension import extend_context
from trainer.config.init_from import read_initial_model, with_initial_model

LENGTHS = (32_768, 131_072)


def get_config(init_from: str = "models/pretrained", num_steps: int = 1000, learning_rate: float = 1e-5) -> TrainConfig:
    """The config of a pretrained model in two phases.

    Args:
      init_from: its folder; --init-from says it, too.
      num_steps: of both phases together, half of them each.
      learning_rate: peak of both phases; a small model takes a larger one.
    """
    base = TrainConfig(
        name="extended",
        description="A pretrained model, trained further on sequences that become longer",
        init_from=init_from,
        model=GPTConfig(remat="full"),
        num_steps=num_steps,
        sequence_length=LENGTHS[0],
        batch_size=4,
        gradient_accumulation=4,
        optimizer=OptimizerConfig(learning_rate=learning_rate),
    )
    context_length = read_initial_model(init_from).context_length
    return extend_context(with_initial_model(base), LENGTHS, context_length=context_length)
