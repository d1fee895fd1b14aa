"""Remat policies: by their own names and by those of activations, and what is refused."""

import pytest

from layers.remat import ACTIVATIONS, REMAT_POLICIES, Remat, offloads, parse_remat


def test_a_policy_with_a_name_can_be_spelled_out(rng):
    for name, policy in REMAT_POLICIES.items():
        assert parse_remat(name) == policy
        if policy is not None and (policy.save or policy.offload):
            parts = [f"{place}({', '.join(names)})" for place, names in vars(policy).items() if names]
            rng.shuffle(parts)
            assert parse_remat(" & ".join(parts)) == policy
    assert parse_remat("save() & offload(layer_input attention_lse)") == Remat(offload=("layer_input", "attention_lse"))


def test_which_policies_need_the_hosts_memory():
    assert [name for name in REMAT_POLICIES if offloads(name)] == ["offload_attention", "offload_inputs"]
    assert offloads("offload(attention_lse)")
    assert not offloads("save(attention_lse)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ful", r"'ful' is not one of none, .*, nor of the form save\(NAME, .*; did you mean full\?"),
        ("", "'' is not one of"),
        ("offload_input", "did you mean offload_inputs"),
        ("keep(attention_lse)", "is not one of"),
        ("save(attention_lse) offload(layer_input)", "is not one of"),
        ("save(attention_lse) & save(projection)", "is not one of"),
        ("save(attention_output", "is not one of"),
        ("save(attention_out)", "no activation is named 'attention_out'; expected .*mean attention_output"),
        ("save(layer_input) & offload(layer_input)", "layer_input stands twice; save it, or offload it"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_remat(text)


def test_every_name_is_used_by_a_policy():
    used = {name for policy in REMAT_POLICIES.values() if policy for name in (*policy.save, *policy.offload)}
    assert used == set(ACTIVATIONS)
