"""What the ranks of test_parallel_blocks.py do: models of unusual blocks on meshes beside one process."""

import re

import odd_specs
import split_cases
import torch
from exactness import errors_of

from dayzero.runtime import nn
from dayzero.runtime.lora import LoRALinear, apply_lora, reset_lora
from dayzero.runtime.mesh import Layout, make_meshes
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.nn.index_loss import freeze_indexers
from dayzero.runtime.parallel import parallelise
from dayzero.runtime.recompute import recompute
from dayzero.runtime.spec import ModelSpec

EXPERTS = 18  # in place of the 15 of the specifications: over 2 ranks, and in 3 groups
LOOPED = "looped"
HIDDEN, VOCABULARY, PASSES = split_cases.HIDDEN, 34, 3


def build(name: str) -> nn.CausalLM:
    """In float64, without weights."""
    if name == LOOPED:
        return looped().double()
    text = odd_specs.read(name).model_dump_json()
    return ModelSpec.model_validate_json(re.sub(r'"experts":15\b', f'"experts":{EXPERTS}', text)).build().double()


def looped() -> nn.CausalLM:
    """Two layers with experts that run three times, are handed what attention over the pass before made, and keep
    their inputs; behind them a state space and attention over all that was kept."""
    message = nn.AttentionResidual(HIDDEN, 1e-6, scale=0.4, queries=2, weighted=False, normed_values=True, sets=2)
    layers = [_layer("x"), _layer("x", again=True), _layer("x", again=True), _layer(mixer=split_cases.mamba2())]
    return nn.CausalLM(
        VOCABULARY,
        HIDDEN,
        layers,
        nn.RMSNorm(HIDDEN, 1e-5),
        [nn.Rotary(6, 10000.0)],
        history=True,
        merge=nn.AttentionResidual(HIDDEN, 1e-6),
        loop=nn.Loop(1, 2, PASSES, restarts=True, message=message),
    )


def _layer(keeps: str = "", again: bool = False, mixer: torch.nn.Module | None = None) -> nn.DecoderLayer:
    reads = {"mixer_norm": "x", "mixer": "mixer_norm", "ffn_norm": "x + mixer", "ffn": "ffn_norm"}
    mixer = mixer or split_cases.gqa()
    parts = {"mixer_norm": nn.RMSNorm(HIDDEN, 1e-5), "mixer": mixer, "ffn_norm": nn.RMSNorm(HIDDEN, 1e-5)}
    if not again:
        return nn.DecoderLayer({**parts, "ffn": split_cases.ffn()}, reads, "x + mixer + ffn", keeps)
    parts |= {"ffn": split_cases.routed(nn.Router(HIDDEN, 4, 2)), "gate": nn.MessageGate(HIDDEN, 3, 1e-5)}
    later = {
        "let_in": ("gate", "x, message.1"),
        "mixer_norm": ("mixer_norm", "let_in + message.0"),
        "mixer": ("mixer", "mixer_norm"),
        "ffn_norm": ("ffn_norm", "let_in + mixer"),
        "ffn": ("ffn", "ffn_norm"),
    }
    gives = "x + mixer + ffn"
    return nn.DecoderLayer(parts, reads, gives, keeps, again=later, again_gives="let_in + mixer + ffn")


def compare(cases: list[tuple]) -> list[dict]:
    """Of each (name, layout, settings): worst relative errors against one process."""
    return [_compare(name, Layout(*layout), **settings) for name, layout, settings in cases]


def _compare(name: str, layout: Layout, recomputed=False, lora=False, **how) -> dict:
    reference, model = build(name), build(name)
    for one in (reference, model):
        if lora:
            apply_lora(one, rank=4, alpha=8)
        freeze_indexers(one)
    initialise(reference, 0.2, seed=0)
    generator = torch.Generator().manual_seed(3)
    reset_lora(reference, generator)
    with torch.no_grad():
        for parameter in reference.parameters():
            if not parameter.any():  # what starts from nothing would hide what depends on it
                parameter.normal_(0.0, 0.2, generator=generator)
    model.load_state_dict(reference.state_dict())
    if recomputed:
        for layer in model.all_layers:
            recompute(layer)
    parallelise(model, make_meshes(layout, "cpu"))
    assert lora == any(isinstance(module, LoRALinear) for module in model.modules())
    return errors_of(reference, model, layout, reference.embed.num_embeddings, **how)
