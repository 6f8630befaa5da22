"""Every family shrinks to a model that runs, has its tensors, and whose sizes are apart."""

import pytest
import torch
from zoo import families

from dayzero.onboard.oracle.reference import build, redraw, run
from dayzero.onboard.shrink.layers import kind_of
from dayzero.onboard.shrink.shrink import SEQUENCE, layer_signatures, shrink_model

# Quick ones of each kind: experts alone, shared and none; latents, windows, scans, delta rules; pictures beside.
FAST = {
    "olmoe", "gpt_oss", "glm4v_moe", "gemma4", "deepseek_v32", "zaya", "jamba", "granitemoehybrid", "kimi_linear",
    "xlstm",
}  # fmt: skip
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(families.FAMILIES)]


def tensors(signature):
    return {entry for entry in kind_of(signature) if entry[0].startswith("shape of ")}


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_a_family_shrinks(family):
    config = families.config(family)
    shrunk = shrink_model(config)
    small, _ = build(shrunk.config)
    redraw(small, torch.Generator().manual_seed(1))
    vocabulary = small.get_input_embeddings().weight.shape[0]
    assert 120 < vocabulary <= 139  # moved a little where another size is as large
    ids = torch.randint(3, min(vocabulary, 131), (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = run(small, ids)
    assert logits.shape[:2] == (2, SEQUENCE)
    assert 120 < logits.shape[2] <= 131  # padded rows of a head may be left out
    assert torch.isfinite(logits).all()
    real, found = (layer_signatures(model) for model in (build(config, device="meta")[0], small))
    assert len(found) == len(shrunk.kept) <= len(real) == len(shrunk.follows)
    for layer, stands_in in enumerate(shrunk.follows):
        assert tensors(real[layer]) == tensors(found[stands_in])
