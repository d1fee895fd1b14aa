"""Which name somebody meant who mistyped one, or who uses another trainer's word for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What other trainers call a field: theirs, in lower case with underscores → ours.
OTHER_WORDS = {
    "optimizer": "optimizer.kind",
    "optim": "optimizer.kind",
    "optimizer_type": "optimizer.kind",
    "optimizer_memory_host_offload": "optimizer.offload_moments",
    "cpu_offload": "optimizer.offload_moments",
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "peak_lr": "optimizer.learning_rate",
    "min_lr": "optimizer.final_learning_rate_fraction",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_schedule": "optimizer.schedule",
    "warmup": "optimizer.num_warmup_steps",
    "warmup_steps": "optimizer.num_warmup_steps",
    "warmup_iters": "optimizer.num_warmup_steps",
    "wd": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "eps": "optimizer.epsilon",
    "grad_clip": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "steps": "num_steps",
    "max_steps": "num_steps",
    "max_iters": "num_steps",
    "train_steps": "num_steps",
    "epochs": "num_steps",
    "num_epochs": "num_steps",
    "num_train_epochs": "num_steps",
    "bs": "batch_size",
    "batch": "batch_size",
    "global_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "grad_accum": "gradient_accumulation",
    "accumulation_steps": "gradient_accumulation",
    "gradient_accumulation_steps": "gradient_accumulation",
    "seq_len": "sequence_length",
    "seqlen": "sequence_length",
    "seq_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "max_seq_length": "sequence_length",
    "block_size": "sequence_length",
    "context": "sequence_length",
    "context_length": "sequence_length",
    "ctx_len": "sequence_length",
    "log_interval": "log_every_num_steps",
    "log_every": "log_every_num_steps",
    "logging_steps": "log_every_num_steps",
    "eval_interval": "evaluation.every_num_steps",
    "eval_every": "evaluation.every_num_steps",
    "eval_steps": "evaluation.every_num_steps",
    "eval_iters": "evaluation.num_sequences",
    "save_interval": "checkpoint.every_num_steps",
    "save_every": "checkpoint.every_num_steps",
    "save_steps": "checkpoint.every_num_steps",
    "save_total_limit": "checkpoint.num_kept",
    "keep_period": "checkpoint.keep_every_num_steps",
    "load_best_model_at_end": "checkpoint.keep_best",
    "dataset": "data.files",
    "data": "data.files",
    "data_dir": "data.files",
    "data_path": "data.files",
    "train_file": "data.files",
    "validation_file": "data.validation_files",
    "tokenizer_name": "data.tokenizer",
    "layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "n_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "depth": "model.num_layers",
    "heads": "model.num_heads",
    "n_head": "model.num_heads",
    "n_heads": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "n_kv_head": "model.num_kv_heads",
    "n_kv_heads": "model.num_kv_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "n_embd": "model.width",
    "d_model": "model.width",
    "dim": "model.width",
    "hidden_size": "model.width",
    "embed_dim": "model.width",
    "d_ff": "model.mlp_width",
    "ffn_dim": "model.mlp_width",
    "intermediate_size": "model.mlp_width",
    "rope_theta": "model.rope_base",
    "partial_rotary_factor": "model.rope_fraction",
    "qkv_bias": "model.attention_bias",
    "rms_norm_eps": "model.norm_epsilon",
    "attn_logit_softcapping": "model.logits_soft_cap",
    "final_logit_softcapping": "model.final_logits_soft_cap",
    "dtype": "model.compute_dtype",
    "precision": "model.compute_dtype",
    "gradient_checkpointing": "model.remat",
    "remat_policy": "model.remat",
    "is_causal": "model.masks",
    "sliding_window": "model.masks",
    "window_size": "model.masks",
    "local_window_size": "model.masks",
    "attn_implementation": "model.implementation",
    "pretrained": "init_from",
    "from_pretrained": "init_from",
    "model_name_or_path": "init_from",
    "load_from": "init_from",
    "model": "init_from",
    "base_model": "init_from",
    "model_name": "init_from",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "load_checkpoint": "resume",
    "attention": "model.implementation",
    "attention_backend": "model.implementation",
    "attn_backend": "model.implementation",
    "flash_attention": "model.implementation",
    "flash_attn": "model.implementation",
    "use_flash_attn": "model.implementation",
    "dp": "mesh.data",
    "dp_size": "mesh.data",
    "data_parallel_size": "mesh.data",
    "data_parallel_replicate_degree": "mesh.data",
    "fsdp_size": "mesh.fsdp",
    "data_parallel_shard_degree": "mesh.fsdp",
    "mesh.model": "mesh.tensor",
    "tp": "mesh.tensor",
    "tp_size": "mesh.tensor",
    "tensor_parallel": "mesh.tensor",
    "tensor_parallel_size": "mesh.tensor",
    "tensor_parallel_degree": "mesh.tensor",
    "tensor_model_parallel_size": "mesh.tensor",
    "mesh.sequence": "mesh.context",
    "mesh.seq": "mesh.context",
    "sp": "mesh.context",
    "cp": "mesh.context",
    "cp_size": "mesh.context",
    "context_parallel_size": "mesh.context",
    "context_parallel_degree": "mesh.context",
    "sequence_parallel_size": "mesh.context",
    "profile": "profile_steps",
    "profiler_steps": "profile_steps",
    "profile_step_start": "profile_steps",
    "output_dir": "workdir",
    "out_dir": "workdir",
    "output": "workdir",
    "logdir": "workdir",
    "prompts": "prompt",
    "max_tokens": "num_tokens",
    "max_new_tokens": "num_tokens",
}

_FEW = 8


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The sentence's tail `; did you mean X?`, or nothing if no candidate is near."""
    nearest = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def did_you_mean_field(name: str, fields: Iterable[str]) -> str:
    """The same for a field, which may also have been called by another trainer's word, or without its section.

    Args:
      name: what was typed: `field`, `section.field` or `--section.field`.
      fields: what there is, in the same form.

    >>> did_you_mean_field("--lr", ["--num-steps", "--optimizer.learning-rate"])
    '; did you mean --optimizer.learning-rate?'
    """
    known = {_field(field): field for field in fields}
    typed = _field(name)
    word = _word(typed)
    ours = OTHER_WORDS.get(typed) or OTHER_WORDS.get(word, "")
    # A config class knows its own fields without their section.
    meant = [ours] if ours in known else [field for field in known if field == _word(ours)]
    meant += [field for field in known if _word(field) == word]
    if told := " or ".join(known[field] for field in meant[:2]):
        return f"; did you mean {told}?"
    # Of a known section, only the word in it can be wrong.
    section = typed[: -len(word)]
    siblings = {_word(field): field for field in known if section and field.startswith(section)}
    if siblings:
        if near := difflib.get_close_matches(word, siblings, n=1, cutoff=0.6):
            return f"; did you mean {known[siblings[near[0]]]}?"
        if len(siblings) <= _FEW:
            return f"; there are {', '.join(known[field] for field in siblings.values())}"
        return ""
    return did_you_mean(name, known.values())


def _field(name: str) -> str:
    """A field as the config has it, from a flag as it may be typed."""
    return name.lower().removeprefix("--").replace("-", "_")


def _word(field: str) -> str:
    """What a field is called within its section."""
    return field.rpartition(".")[2]
