"""What layers are handed one by one, and what they do with it."""

import pytest
import torch
import torch.nn.functional as F

from dayzero.runtime.nn import CausalLM, DecoderLayer, GatedLayerInput, LayerInputs, RMSNorm
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.nn.context import Context
from dayzero.runtime.nn.layer_inputs import LAYER_INPUT

HIDDEN, LAYERS, WIDTH = 6, 3, 4


def inputs() -> LayerInputs:
    made = LayerInputs(11, HIDDEN, LAYERS, WIDTH, RMSNorm(WIDTH, 1e-5), 2.0, 0.5, 0.7).double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.cos(torch.arange(parameter.numel()) + number).reshape(parameter.shape))
    return made


def test_each_layer_has_its_own_columns_and_a_norm_of_its_own():
    made, ids = inputs(), torch.tensor([3, 0, 10])
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = made(x, ids)
    assert found.shape == (3, LAYERS, WIDTH)
    for layer in range(LAYERS):
        rows = slice(layer * WIDTH, (layer + 1) * WIDTH)
        projected = F.linear(x, made.projection.weight[rows]) * 0.5
        normed = projected / (projected.square().mean(-1, keepdim=True) + 1e-5).sqrt() * made.norm.weight
        want = 0.7 * (normed + 2.0 * made.embed.weight[ids][:, rows])
        torch.testing.assert_close(found[:, layer], want, rtol=1e-13, atol=1e-14)


def test_a_gate_on_what_the_layer_is_handed():
    block = GatedLayerInput(HIDDEN, WIDTH, "silu").double()
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    handed = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    context = Context(torch.tensor([0, 5]), (5,), torch.arange(5), shared={LAYER_INPUT: handed})
    want = (F.silu(x @ block.gate.weight.t()) * handed) @ block.down.weight.t()
    torch.testing.assert_close(block(x, context), want, rtol=1e-13, atol=1e-14)
    with pytest.raises(ValueError, match="the model has none for its layers"):
        block(x, Context(torch.tensor([0, 5]), (5,), torch.arange(5)))


def test_layers_are_handed_theirs_in_order():
    layers = [
        DecoderLayer({"ffn": GatedLayerInput(HIDDEN, WIDTH, "silu")}, {"ffn": "x"}, "x + ffn") for _ in range(LAYERS)
    ]
    made = LayerInputs(11, HIDDEN, LAYERS, WIDTH, RMSNorm(WIDTH, 1e-5))
    model = CausalLM(11, HIDDEN, layers, RMSNorm(HIDDEN, 1e-5), layer_inputs=made).double()
    initialise(model, 0.3, seed=0)
    seen = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, args: seen.append(args[1].shared[LAYER_INPUT]))
    ids = torch.tensor([1, 2, 9, 4, 5])
    packed = model(ids, torch.tensor([0, 3, 5]))
    wanted = made(model.embed(ids), ids)
    assert all(torch.equal(one, wanted[:, number]) for number, one in enumerate(seen))
    alone = model(ids[3:], torch.tensor([0, 2]))
    torch.testing.assert_close(packed[3:], alone, rtol=1e-13, atol=1e-14)
