"""A module that gives nothing finite is not proven; one that does so where it saturates is, and the proof says so."""

import numpy as np
import tiny
import torch
from odd_specs import NO_CHECKPOINT
from torch import nn
from transformers import LlamaConfig

from dayzero.onboard.candidates import site_of
from dayzero.onboard.composition import specification_of
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.oracle.reference import build, redraw
from dayzero.onboard.prove.block import attempt, prove
from dayzero.onboard.prove.model import prove_model
from dayzero.onboard.prove.trials import CAPTURED, NOTHING_FINITE, Compared, Trial
from dayzero.onboard.shrink.shrink import SEQUENCE

PATH = "model.layers.0.mlp"


def model_with(finite):
    """A model whose first feed-forward part gives NaN where `finite` says no to the largest number of its input. That
    is found out by numpy, so that the part executes the same operations as ever."""
    config = LlamaConfig(**{**tiny.FAMILIES["llama"], "num_hidden_layers": 1})
    model, _ = build({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    redraw(model, torch.Generator().manual_seed(0))
    module = model.get_submodule(PATH)
    forward = module.forward

    def sometimes(x):
        out = forward(x)
        return out if finite(float(np.abs(x.detach().numpy()).max())) else out * float("nan")

    module.forward = sometimes
    return model


def ids():
    return torch.randint(3, tiny.VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))


def best(finite):
    """The part and the best attempt on it, None where not one block agrees on the captured input."""
    model = model_with(finite)
    site = site_of(record_calls(model, ids())[0], PATH, model.config)
    tried = prove("ffn", site, torch.Generator().manual_seed(2)).attempts
    return site, next((one for one in tried if one.thorough), None)


def test_what_saturates_is_proven_on_the_rest_and_the_proof_says_so():
    _, found = best(lambda size: size < 40)
    assert found.proven
    assert found.error <= 1e-12
    assert found.skipped == "2 of 9 inputs (input x30, weights x1; input x30, weights x2.5)"


def test_what_was_skipped_is_in_the_evidence_of_the_model():
    model = model_with(lambda size: size < 40)
    proven, _ = prove_model(model, ids(), torch.Generator().manual_seed(2))
    spec = specification_of(model, model.config, proven, [0], NO_CHECKPOINT, "x")
    evidence = spec.layer_kinds[0].blocks["ffn"].proof.evidence
    assert evidence[-1].startswith("not compared, since the reference gives nothing finite: 2 of 9 inputs (input x30,")
    assert not any("not compared" in line for line in spec.layer_kinds[0].blocks["mixer"].proof.evidence)


def test_nothing_is_skipped_of_what_is_finite_everywhere():
    _, found = best(lambda size: True)
    assert (found.proven, found.skipped) == (True, "")


def test_what_gives_nothing_finite_at_all_is_not_proven():
    site, found = best(lambda size: False)
    assert found is None
    claim = best(lambda size: True)[1].candidate
    tried = attempt(claim, site, torch.Generator(), thorough=True)
    assert tried.objection == NOTHING_FINITE


def test_what_gives_nothing_finite_at_usual_sizes_is_not_proven():
    """Though it agrees on the captured input and the smallest ones."""
    captured = float(best(lambda size: True)[0].call.hidden.abs().max())
    _, found = best(lambda size: size in {captured} or size < 1.5)
    assert found.objection == f"input x1: {NOTHING_FINITE}"


def test_a_gradient_that_is_never_compared_is_missing():
    block = nn.Linear(2, 3)
    compared = Compared()
    compared.add(Trial(CAPTURED, torch.ones(1)), {"output": 0.0, "input gradient": 0.0, "gradient of weight": 0.0})
    assert compared.missing(block) == "gradient of bias: the module's own is nowhere exact enough to be compared"
    compared.add(Trial("input x30", torch.ones(1), saturates=True), {})
    compared.add(Trial("input x1", torch.ones(1)), {"output": 0.0, "gradient of bias": 0.0})
    assert compared.missing(block) == ""
    block.bias.requires_grad_(False)
    assert Compared(compared.made[:1]).missing(block) == ""
