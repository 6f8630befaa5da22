"""Attention that keeps the keys of the largest learned numbers is proven, and what is nearly that is not."""

import functools
from dataclasses import replace

import pytest
import torch
from zoo import families

from dayzero.onboard.candidates import Candidate, site_of
from dayzero.onboard.candidates.evidence import literal
from dayzero.onboard.lift.reason import reason
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import attempt, prove


def site_in(bent=False, **changes):
    """An attention of the reference with these fields changed. bent: whether its values go through a tanh."""
    model, _ = reference.build({**families.config("doge"), **changes})
    reference.redraw(model, torch.Generator().manual_seed(0))
    if bent:
        attention = model.model.layers[1].self_attn
        attention.v_proj = torch.nn.Sequential(attention.v_proj, torch.nn.Tanh())
    calls, _ = record_calls(model, torch.randint(3, 190, (2, 24), generator=torch.Generator().manual_seed(1)))
    return site_of(calls, "model.layers.1.self_attn", reference.text_config(model))


@functools.cache
def proof(**changes):
    site = site_in(**changes)
    return site, prove("mixer", site, torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("changes", "keep", "window"),
    [
        ({}, 9, None),
        ({"keep_window_size": 4, "attention_bias": True}, 4, None),
        ({"sliding_window": 14}, 9, 14),
        ({"sliding_window": 7}, 9, 7),  # so few that all are kept
        ({"num_key_value_heads": 8}, 9, None),  # whose numbers are beyond float64 on the largest inputs of the proof
    ],
)
def test_what_is_kept_among_what_is_seen(changes, keep, window):
    site, verdict = proof(**changes)
    best = verdict.survivors[0]
    assert best.error <= 1e-12
    spec = best.candidate.spec(site.module, site.config)
    assert (spec.block, spec.arguments["keep"]) == ("DynamicMaskAttention", keep)
    assert spec.arguments["bias"] == changes.get("attention_bias", False)
    assert spec.arguments["attention"].arguments.get("window") == window


@pytest.mark.parametrize(("argument", "value"), [("keep", 8), ("keep", 10), ("window", 12)])
def test_what_keeps_or_sees_others_is_not(argument, value):
    site, verdict = proof()
    best = verdict.survivors[0].candidate
    inner = best.arguments["attention"]
    assert isinstance(inner, Candidate)
    changed = {argument: literal(value, "changed")}
    if argument == "keep":
        mutant = replace(best, arguments={**best.arguments, **changed})
    else:
        mutant = replace(
            best, arguments={**best.arguments, "attention": replace(inner, arguments={**inner.arguments, **changed})}
        )
    tried = attempt(mutant, site, torch.Generator().manual_seed(2), thorough=True)
    assert not tried.proven
    assert tried.error > 1e-4


def test_what_is_like_it_but_for_its_values_is_said_to_be_like_it():
    """Not like the attention inside it, which has no numbers."""
    site = site_in(bent=True)
    verdict = prove("mixer", site, torch.Generator().manual_seed(2))
    assert not verdict.survivors
    said = reason(site, ("mixer",), verdict.attempts)
    assert said.startswith("like DynamicMaskAttention, but for values (of v_proj.0); runs"), said
