"""The rows that most families share: Llama's names, which transformers' later models kept."""

from __future__ import annotations

from layers.pretrained.config_keys import MAX_VOCABULARY, Default, Key, Keys, flag, integer, number, number_of_parts
from layers.pretrained.steps import TensorRow


def vocabulary_size(default: int | None = None) -> Key:
    """The row of the number of tokens."""
    return integer("vocab_size", "vocab_size", default=default, at_most=MAX_VOCABULARY)


SIZES: tuple[Key, ...] = (
    vocabulary_size(),
    integer("hidden_size", "width"),
    number_of_parts("num_hidden_layers", "num_layers"),
    number_of_parts("num_attention_heads", "num_heads"),
    integer("intermediate_size", "mlp_width"),
)
"""The sizes of a network."""


def _num_heads(keys: Keys) -> int:
    return keys.number_of_parts("num_attention_heads")


def kv_heads(default: int | None = None) -> Key:
    """The row of the heads of keys and values; None: where the key is absent, as many as queries have."""
    default_or_all = _num_heads if default is None else default
    return number_of_parts("num_key_value_heads", "num_kv_heads", default=default_or_all, null=_num_heads)


def even_head_dim(keys: Keys) -> int:
    """The features of a head where no key says them: the width divided by the number of heads."""
    width, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if width % num_heads:
        raise keys.wrong("head_dim", f"an integer, as {num_heads} heads don't divide hidden_size={width}")
    return width // num_heads


def num_experts(name: str, other: str, default: Default) -> Key:
    """The row of the number of experts, which transformers 5 takes from another name, too."""

    def read(keys: Keys, name: str) -> int:
        number = keys.number_of_parts(name)
        if keys.values.get(other, number) != number:
            raise keys.wrong(other, f"{number}, as {name} is, since transformers takes either")
        return number

    return Key(name, ("moe.num_experts",), read, default)


def head_dim(default: int | None = None) -> Key:
    """The row of `head_dim`; None: where the key is absent or null, the width's share."""
    return Key("head_dim", ("head_dim",), Keys.integer, default or even_head_dim, None if default else even_head_dim)


def norm_epsilon(default: float = 1e-6) -> Key:
    """The row of the norms' epsilon."""
    return number("rms_norm_eps", "norm_epsilon", default=default)


def tied(default: bool = False) -> Key:
    """The row of a head that is the embedding's own matrix."""
    return flag("tie_word_embeddings", "tie_embeddings", default=default)


def biases(default: bool = False) -> Key:
    """The row of biases in all four projections of attention."""
    return flag("attention_bias", "attention_bias", "output_bias", default=default)


def vocabulary(prefix: str = "model.", head: str = "lm_head.weight") -> tuple[TensorRow, ...]:
    """Embedding, final norm and head."""
    return (
        TensorRow(f"{prefix}embed_tokens.weight", "embedding.embedding", "V W -> V W"),
        TensorRow(f"{prefix}norm.weight", "final_norm.scale", "W -> W"),
        TensorRow(head, "head.kernel", "V W -> W V"),
    )


def attention(prefix: str = "model.") -> tuple[TensorRow, ...]:
    """The four projections, with their biases."""
    layer = prefix + "layers.{layer}.self_attn."
    return (
        TensorRow(layer + "q_proj.weight", "blocks.*.attention.query.kernel", "(N H) W -> W N H"),
        TensorRow(layer + "k_proj.weight", "blocks.*.attention.key.kernel", "(K H) W -> W K H"),
        TensorRow(layer + "v_proj.weight", "blocks.*.attention.value.kernel", "(K H) W -> W K H"),
        TensorRow(layer + "o_proj.weight", "blocks.*.attention.output.kernel", "W (N H) -> N H W"),
        TensorRow(layer + "q_proj.bias", "blocks.*.attention.query.bias", "(N H) -> N H"),
        TensorRow(layer + "k_proj.bias", "blocks.*.attention.key.bias", "(K H) -> K H"),
        TensorRow(layer + "v_proj.bias", "blocks.*.attention.value.bias", "(K H) -> K H"),
        TensorRow(layer + "o_proj.bias", "blocks.*.attention.output.bias", "W -> W"),
    )


def qk_norms(prefix: str = "model.") -> tuple[TensorRow, ...]:
    """The norms of queries and keys, over each head or over all."""
    layer = prefix + "layers.{layer}.self_attn."
    return (
        TensorRow(layer + "q_norm.weight", "blocks.*.attention.query_norm.scale", "H -> H"),
        TensorRow(layer + "k_norm.weight", "blocks.*.attention.key_norm.scale", "H -> H"),
    )


def pre_norms(prefix: str = "model.") -> tuple[TensorRow, ...]:
    """The norms before attention and before the MLP."""
    return (
        TensorRow(prefix + "layers.{layer}.input_layernorm.weight", "blocks.*.attention_norm.scale", "W -> W"),
        TensorRow(prefix + "layers.{layer}.post_attention_layernorm.weight", "blocks.*.mlp_norm.scale", "W -> W"),
    )


def gated_mlp(prefix: str = "model.") -> tuple[TensorRow, ...]:
    """The three matrices of a gated MLP, with their biases."""
    layer = prefix + "layers.{layer}.mlp."
    return (
        TensorRow(layer + "gate_proj.weight", "blocks.*.mlp.gate.kernel", "F W -> W F"),
        TensorRow(layer + "up_proj.weight", "blocks.*.mlp.up.kernel", "F W -> W F"),
        TensorRow(layer + "down_proj.weight", "blocks.*.mlp.down.kernel", "W F -> F W"),
        TensorRow(layer + "gate_proj.bias", "blocks.*.mlp.gate.bias", "F -> F"),
        TensorRow(layer + "up_proj.bias", "blocks.*.mlp.up.bias", "F -> F"),
        TensorRow(layer + "down_proj.bias", "blocks.*.mlp.down.bias", "W -> W"),
    )
