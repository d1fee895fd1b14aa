"""Phases that lengthen a model's context, by a published recipe: ProLong's (arXiv:2410.02660, Table 9).

ProLong's scripts, train_64K.sh and train_512K.sh in github.com/princeton-nlp/ProLong, tell the same, but for the peak
of the second phase. Its values, and the rule that this module makes of each:

- RoPE base: 500,000 at 8k tokens (Llama 3), 8e6 at 64k and 1.28e8 at 512k. Each is 16 times as large at 8 times the
  length, so the base grows with length^(4/3). Table 18 has 4e6, the rule of NTK-aware scaling, worse at 64k.
- Schedule: each phase warms up over a tenth of its steps, and a cosine then falls to a tenth of the peak. The moments
  are carried. The peak is the config's own; ProLong's is 1e-5 in both phases (the second script: 5e-6), for 8B
  parameters.
- Length: each phase has as many tokens as the others; ProLong's have 20B.
- Tokens in a step: as many in each phase. ProLong has 4M, and 8M in the second phase.
- Documents are kept apart, as the config's data does by default.

ProLong's model, Llama 3, has neither windows nor RoPE scaling. A model keeps its own RoPE in a phase whose length it
knows already, and where its base is larger. Its scaling stays. Layers without RoPE stay without. Layers with windows
get the base of the others where all have one: most families can't hold two. Where they have a base of their own they
keep it, as in Gemma 3 (arXiv:2503.19786).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layers import GPTConfig
from layers.layer_config import LayerConfig
from trainer.config.train_config import Phase, TrainConfig

SCALED = ("llama3", "yarn", "longrope")
"""Kinds of RoPE scaling to a factor of their `original_context_length`."""
_STRETCHED = ("linear", "ntk")  # by a factor of the trained context

_LENGTH, _BASE, _EXPONENT = 65_536, 8e6, 4 / 3
_WARMUP, _FINAL = 0.1, 0.1
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def read_lengths(text: str) -> tuple[int, ...]:
    """The lengths that `--phases` names, in tokens.

    Raises:
      ValueError: it has another form.

    Example:
      >>> read_lengths("32k,1M")
      (32768, 1048576)
    """
    found = [re.fullmatch(r"([0-9]{1,9})([km]?)", part.strip().lower()) for part in text.split(",")]
    if not all(found):
        raise ValueError(
            f"phases={text!r}: expected lengths in tokens, such as 32k,128k; k stands for 1,024, M for 1,048,576, and "
            "all else about a phase is for a config file"
        )
    return tuple(int(each[1]) * _UNITS[each[2]] for each in found if each)


def rope_base_at(length: int) -> float:
    """The RoPE base for sequences of a length in tokens, by ProLong's rule, to three digits.

    Example:
      >>> [rope_base_at(length) for length in (8_192, 65_536, 131_072, 524_288)]
      [500000.0, 8000000.0, 20200000.0, 128000000.0]
    """
    return float(f"{_BASE * (length / _LENGTH) ** _EXPONENT:.3g}")


def extend_context(config: TrainConfig, lengths: Sequence[int], *, context_length: int | None = None) -> TrainConfig:
    """A config with a phase for each length, by ProLong's recipe (arXiv:2410.02660, Table 9).

    Args:
      config: without phases. Its model is the one to be trained, its `num_steps` are those of all phases together, and
        `batch_size` × `sequence_length` are the tokens in a step.
      lengths: of the phases' sequences, in tokens; they rise.
      context_length: tokens that the model's parameters were trained on at most; None: unknown, or they are random.

    Returns:
      The config with `phases`. The last has no length of its own: it lasts until `num_steps`.

    Raises:
      ValueError: the config has phases, the lengths don't rise or are below the config's, or a phase can't be.

    Example:
      >>> config = TrainConfig("long", GPTConfig(rope_base=5e5), num_steps=1000, batch_size=4)
      >>> config = extend_context(config, (32_768, 131_072), context_length=8192)
      >>> [(phase.config.sequence_length, phase.config.model.rope_base) for phase in config.in_phases()]
      [(32768, 3170000.0), (131072, 20200000.0)]
    """
    _check(config, lengths)
    num_steps, model = config.num_steps // len(lengths), config.model
    phases: list[Phase] = []
    before = {name: getattr(config, name) for name in ("sequence_length", "batch_size", "gradient_accumulation")}
    for index, length in enumerate(lengths):
        is_last = index == len(lengths) - 1
        steps = config.num_steps - index * num_steps if is_last else num_steps
        sizes = _sizes(config, length)
        changes: dict[str, Any] = {name: size for name, size in sizes.items() if size != before[name]}
        phase = Phase(
            num_steps=None if is_last else num_steps,
            **changes,
            **_longer_rope(model, length, context_length),
            optimizer=replace(
                config.optimizer,
                schedule="cosine",
                num_warmup_steps=min(round(_WARMUP * steps), steps - 1),
                final_learning_rate_fraction=_FINAL,
            ),
        )
        model, before = phase.model_after(model), sizes
        phases.append(phase)
    extended = replace(config, phases=tuple(phases))
    extended.in_phases()  # which a config whose model is a folder's doesn't check itself
    return extended


def describe_phases(config: TrainConfig) -> list[str]:
    """Lines about phases that `extend_context` has made: the recipe with its source, and one for each phase."""
    lines = ["phases by the recipe of ProLong (arXiv:2410.02660, Table 9); RoPE base 8e6 × (length / 64k)^(4/3)"]
    for phase in config.in_phases():
        now, optimizer = phase.config, phase.config.optimizer
        layers = (now.model.layer(index) for index in range(now.model.pattern_length))
        bases = list(dict.fromkeys(layer.rope_base for layer in layers if layer.rope_base is not None))
        lines.append(
            f"  steps {phase.first_step + 1} to {phase.last_step}: {now.batch_size} × {now.sequence_length:,} = "
            f"{now.batch_size * now.sequence_length:,} tokens in a step; "
            f"RoPE base {' and '.join(f'{base:,.0f}' for base in bases) or 'none'}; "
            f"learning rate {optimizer.learning_rate:g} after {optimizer.num_warmup_steps} steps of warm-up, then a "
            f"cosine to {optimizer.learning_rate * optimizer.final_learning_rate_fraction:g}"
        )
    return lines


def known_positions(ours: LayerConfig, theirs: LayerConfig, context_length: int) -> int | None:
    """The tokens up to which a layer's rotary embedding knows positions.

    Args:
      ours: the layer of a run.
      theirs: the same layer as its parameters were trained.
      context_length: tokens that they were trained on at most.

    Returns:
      None: nothing limits it, or nothing tells, as with another base of the frequencies.
    """
    scaling = ours.rope_scaling
    if ours.rope_base is None or ours.rope_base != theirs.rope_base:
        return None
    if scaling.kind in SCALED:
        own = round(scaling.factor * scaling.original_context_length)
        return max(own, context_length) if scaling == theirs.rope_scaling else own
    if scaling.kind in _STRETCHED and scaling != theirs.rope_scaling:
        return round(scaling.factor * context_length)
    return context_length


def _check(config: TrainConfig, lengths: Sequence[int]) -> None:
    listed = ", ".join(f"{length:,}" for length in lengths)
    if config.phases:
        raise ValueError(
            f"the config file has {len(config.phases)} phases already; leave lengths of phases ({listed}) out"
        )
    if not lengths or any(later <= earlier for earlier, later in itertools.pairwise(lengths)):
        raise ValueError(f"the lengths of phases must rise, got {listed or 'none'}; for example 32k,128k")
    if lengths[0] < config.sequence_length:
        raise ValueError(
            f"the first phase has sequences of {lengths[0]:,} tokens, and sequence_length={config.sequence_length} is "
            f"more; set sequence_length to {lengths[0]}, or begin with a longer phase"
        )
    if config.num_steps < 2 * len(lengths):
        raise ValueError(
            f"num_steps={config.num_steps} is too few for {len(lengths)} phases of 2 steps or more; "
            f"set it to {2 * len(lengths)} or more"
        )


def _sizes(config: TrainConfig, length: int) -> dict[str, int]:
    """The sizes of a phase's step: as many tokens in a step, and no more in a micro-batch, as far as can be."""
    tokens, shards = config.batch_size * config.sequence_length, config.mesh.data * config.mesh.fsdp
    per_shard = max(1, round(tokens / (length * shards)))
    fitting = (
        count
        for count in range(1, per_shard)
        if per_shard % count == 0 and per_shard // count * shards * length <= tokens // config.gradient_accumulation
    )
    sizes = {"batch_size": per_shard * shards, "gradient_accumulation": next(fitting, per_shard)}
    return {"sequence_length": length, **sizes}


def _longer_rope(model: GPTConfig, length: int, context_length: int | None) -> dict[str, Any]:
    """The fields of a phase that give a model the RoPE base for a length; none where it keeps its own."""
    layers = [model.layer(index) for index in range(model.pattern_length)]
    turned = [layer for layer in layers if layer.rope_base is not None]
    wide = [layer for layer in turned if layer.mask.lookback is None]
    if context_length is None:
        beyond = bool(wide)
    else:
        known = [(layer, known_positions(layer, layer, context_length)) for layer in turned]
        beyond = any(
            reach is not None and length > reach and (layer.mask.lookback is None or layer.mask.lookback >= reach)
            for layer, reach in known
        )
    base = rope_base_at(length)
    if not beyond or base <= max(layer.rope_base or 0.0 for layer in turned):
        return {}
    of_wide = {layer.rope_base for layer in wide}
    differ = any(layer.rope_base not in of_wide for layer in turned)
    return {"rope_base": base, "rope_layers": "global"} if wide and differ else {"rope_base": base}
