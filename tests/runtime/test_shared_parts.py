"""Gradients of parts that layers share, on meshes: each is the sum over its uses, whatever holds the parameters."""

import harness
import pytest
import shared_model
import torch

from dayzero.runtime.lora import apply_lora
from dayzero.runtime.parameter_roles import trained_parameters


@pytest.mark.slow
def test_gradients_equal_those_of_one_process():
    """Sharded, over tensor parallel ranks, and over context parallel ranks."""
    layouts = [(1, 2, 1), (1, 1, 1, 2), (1, 1, 1, 1, 2)]
    for of_rank in harness.run(shared_model.gradient_errors, 2, layouts, timeout=90):
        for errors in of_rank:
            assert "shared.0.mixer.uses.1.2.up.value.weight" in errors
            assert {name: error for name, error in errors.items() if not error <= 1e-9} == {}


def test_documents_packed_end_to_end_are_as_they_are_alone():
    model, ids = shared_model.build(), torch.arange(12)
    together = model(ids, torch.tensor([0, 5, 12]))
    apart = [model(part, torch.tensor([0, len(part)])) for part in (ids[:5], ids[5:])]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-12, atol=1e-12)


def test_a_shared_parameter_is_trained_and_adapted_once():
    model = shared_model.build()
    names = [held.name for held in trained_parameters(model)]
    assert names.count("shared.0.mixer.block.query.weight") == 1
    assert not any(name.startswith("layers.1.mixer.") or name.startswith("layers.2.mixer.") for name in names)
    adapted = apply_lora(model, 2, 4.0)
    assert "shared.0.mixer.block.query" in adapted
    ids = torch.arange(9)
    model(ids, torch.tensor([0, 9])).square().mean().backward()
    held = model.shared[0]["mixer"].block.query
    assert held.lora_b.grad.abs().max() > 0
    assert held.weight.grad is None
