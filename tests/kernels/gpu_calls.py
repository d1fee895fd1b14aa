"""Attention calls as a GPU gets them, made away from one."""

import jax.numpy as jnp

from kernels import Target
from kernels.call import make_call

H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def call_of(
    mask=None, *, length=512, kv_len=None, dtype=jnp.bfloat16, head_dim=64, value_dim=None, target=H200, **given
):
    """Inputs and call of an attention, as compiled for a target; as many keys as queries, if `kv_len` isn't given."""
    query = jnp.ones((2, length, 2, head_dim), dtype)
    key, value = (jnp.ones((2, kv_len or length, 2, dim), dtype) for dim in (head_dim, value_dim or head_dim))
    nothing = dict.fromkeys(
        ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions", "scale",
         "logits_soft_cap", "sinks"),
    )  # fmt: skip
    inputs, call = make_call(query, key, value, mask, **{**nothing, **given}, return_lse=False)
    return inputs, call._replace(target=target)
