"""A recipe: our kernels in the Gemma 2 and Gemma 3 models of Google DeepMind's `gemma` package. Copy it.

It overrides private methods of gemma 4.0.1, and of no other version. gemma.md says what is served.

Shapes: B batch, T tokens, D width, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels import CausalMask, LocalMask, Tuning, dot_product_attention

TRIED_WITH = "4.0.1"
"""The version of gemma whose private names these are."""


def with_kernels(model: Any, *, implementation: str | Tuning | None = None) -> Any:
    """The same model with our attention: same parameters, same outputs, in memory proportional to T.

    For training and scoring: the model refuses images, positions, a cache and a mask of the caller's, which come as
    arrays. Sample with the model as it was; the parameters are the same.

    Args:
      model: a `gemma.gm.nn.Transformer`, such as `gm.nn.Gemma3_1B()`.
      implementation: our backend, by name or as a tuning object; None: the fastest that serves the call.

    Returns:
      A model of a subclass of the model's own class. Attention weights can't be captured from it.

    Raises:
      ValueError: a model with another attention (Gemma 3n, Gemma 4).

    Source: https://github.com/google-deepmind/gemma, gemma/gm/nn/_transformer.py
    """
    from gemma.gm.nn import _transformer

    if not isinstance(model, _transformer.Transformer):
        raise ValueError(
            f"expected a Gemma 2 or 3 of gemma.gm.nn.Transformer, got {type(model).__name__}, which has "
            "another attention"
        )
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.init}
    base: Any = type(model)
    return _with_kernels(base, implementation)(**fields)


@functools.cache
def _with_kernels(base: Any, implementation: str | Tuning | None) -> type:
    """A subclass, since gemma's `nn.jit` keeps its traces by class: a trace with kernels mustn't serve one without."""
    from flax import linen as nn

    # The parameters are gemma's, under its names.
    def _encode_and_get_inputs(self, *, tokens, images=None, attention_mask=None, positions=None):
        for name, given, remedy in (
            ("images", images, "image tokens attend to each other by a mask that the data decides"),
            ("attention_mask", attention_mask, "it is a T×T array; causal attention to what isn't padding is built in"),
            ("positions", positions, "windows are counted in them, and gemma's causal mask isn't"),
        ):
            if given is not None:
                raise ValueError(f"a model with kernels can't honour {name}: {remedy}; leave it None")
        return base._encode_and_get_inputs(self, tokens=tokens)

    def _apply_attention(self, inputs, cache):
        if cache is not None:
            raise ValueError("a model with kernels takes no cache; sample with the model as it was")

        def intercept(next_function, args, kwargs, context):
            if context.method_name != "__call__" or not _is_attention(context.module):
                return next_function(*args, **kwargs)
            return None, _attend(context.module, args[0], inputs.positions, inputs.inputs_mask, implementation)

        with nn.intercept_methods(intercept):
            return base._apply_attention(self, inputs, cache)

    methods = {"_encode_and_get_inputs": _encode_and_get_inputs, "_apply_attention": _apply_attention}
    return type(f"{base.__name__}WithKernels", (base,), {"__module__": __name__, **methods})


def _is_attention(module: Any) -> bool:
    from gemma.gm.nn import _modules

    return isinstance(module, _modules.Attention)


def _attend(
    module: Any,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    is_token: Bool[Array, "B T"],
    implementation: str | Tuning | None,
) -> Float[Array, "B T D"]:
    """Gemma's `Attention` of x without a cache, under the model's own mask."""
    from gemma.gm.math._positional_embeddings import apply_rope

    query: jax.Array
    if module.use_qkv_einsum:
        query, key, value = module.qkv_einsum("BTD,SNDH->SBTNH", x)
    else:
        query = module.q_einsum("BTD,NDH->BTNH", x)
        key, value = module.kv_einsum("BSD,CKDH->CBSKH", x)
    if module.use_qk_norm:
        query, key = module._query_norm(query), module._key_norm(key)
    query, key = (
        apply_rope(
            rows,
            positions,
            base_frequency=module.rope_base_frequency,
            scale_factor=module.rope_scale_factor,
        )
        for rows in (query, key)
    )

    masked: dict[str, Any] = {"mask": CausalMask()}
    if module.sliding_window_size is not None and module.attn_type.name == "LOCAL_SLIDING":
        # Windows are counted in positions, which stand still over padding. From token to token they increase, so that
        # the causal mask may be evaluated on them, too.
        masked = {
            "mask": CausalMask() & LocalMask(module.sliding_window_size - 1, 0),
            "query_positions": positions,
            "key_value_positions": positions,
        }
    elif module.attn_type.name != "GLOBAL":
        raise ValueError(f"expected GLOBAL, or LOCAL_SLIDING with a sliding_window_size, got {module.attn_type}")
    encoded = dot_product_attention(
        query * module.query_pre_attn_scalar,
        key,
        value,
        query_segment_ids=jnp.ones(is_token.shape, jnp.int32),
        key_value_segment_ids=is_token.astype(jnp.int32),
        scale=1.0,
        logits_soft_cap=module.attn_logits_soft_cap,
        implementation=implementation,
        **masked,
    )
    return module.attn_vec_einsum("BTNH,NHD->BTD", encoded)
