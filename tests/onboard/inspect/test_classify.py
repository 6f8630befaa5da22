"""Counts of a ledger, from headers and config alone."""

import onboarded
import pytest
from safetensors.torch import load_file

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify

KEYS = {"tensors", "bytes", "parameters", "layers", "experts", "quantization", "unaccounted", "unread_config"}


@pytest.mark.parametrize(
    ("name", "ffn", "experts"),
    [
        ("llama", {"dense": 3}, {"count": 0, "top_k": 0, "shared": 0}),
        ("qwen3", {"dense": 3}, {"count": 0, "top_k": 0, "shared": 0}),
        ("mixtral", {"routed": 3}, {"count": 6, "top_k": 2, "shared": 0}),
        ("qwen3_moe", {"routed": 2, "dense": 1}, {"count": 6, "top_k": 2, "shared": 0}),
        ("olmoe", {"routed": 3}, {"count": 6, "top_k": 2, "shared": 0}),
    ],
)
def test_the_summary_of_each_family(name, ffn, experts):
    source = onboarded.checkpoint(name)
    tensors = load_file(source / "model.safetensors")
    ledger = classify(read_checkpoint(source))
    summary = ledger.summary()
    assert summary.keys() >= KEYS
    assert summary["tensors"] == len(tensors) == sum(group.count for group in ledger.groups)
    assert summary["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert summary["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert summary["layers"] == {"mixer": {"full": 3}, "ffn": ffn}
    assert summary["experts"] == experts
    assert (summary["unaccounted"], summary["unread_config"], summary["quantization"]) == ([], [], {})


def test_every_group_has_a_role():
    roles = {group.role for group in classify(read_checkpoint(onboarded.checkpoint("qwen3_moe"))).groups}
    assert "unknown" not in roles
    assert {"expert", "router", "query", "key", "value", "embedding", "head"} <= roles
