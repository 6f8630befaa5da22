"""Layers that run several times, found by their calls."""

import pytest
import torch
from torch import nn

from dayzero.onboard.oracle.calls import Call, Undiscovered
from dayzero.onboard.structure.layer_wiring import Again, layer_parts
from dayzero.onboard.structure.loops import (
    LoopParts,
    in_pass,
    loop_of,
    message_call,
    message_of,
    passes_on,
    record_inside,
    with_other_messages,
)

HIDDEN = 4


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN, dtype=torch.float64) + 0.5)

    def forward(self, x):
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x, message):
        return x + self.matrix(message).tanh()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x):
        return self.inward(x).tanh()


class Layer(nn.Module):
    """In later passes two messages are let in, and the norm runs a second time."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.one, self.other = Norm(), Wide(), Gate(), Gate()

    def forward(self, x, messages=None):
        if messages is None:
            return x + self.wide(self.norm(x))
        first, second = messages.unbind(-2)
        return x + self.wide(self.norm(self.one(x, first))) + self.norm(self.other(x, second))


class Message(nn.Module):
    """Of a single state every mixture is the same: the messages differ in nothing."""

    def __init__(self, count):
        super().__init__()
        self.query = nn.Parameter(torch.randn(count, 2, HIDDEN, dtype=torch.float64))

    def forward(self, kept, last, layer):
        states = torch.cat((kept, last[:, :, None]), 2)
        return (states @ self.query[layer].T).softmax(2).transpose(2, 3) @ states


class Model(nn.Module):
    def __init__(self, restarts=True):
        super().__init__()
        self.layers, self.message, self.restarts = nn.ModuleList(Layer() for _ in range(4)), Message(2), restarts

    def forward(self, x):
        before = x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = layer(x)
        for _ in range(2):
            last, x = x, before if self.restarts else x
            for index, layer in enumerate(self.layers[1:3]):
                handed = self.message(x.new_zeros(*x.shape[:2], 0, HIDDEN), last, index) if self.restarts else None
                x = layer(x, handed)
        return self.layers[3](x)


def calls_of(model):
    torch.manual_seed(0)
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    seen, _ = record_inside(Call("model", model, (x,), {}, None), (x,), {})
    calls = {}
    for call in seen:
        if call.path in calls:
            calls[call.path].later.append(call)
        else:
            calls[call.path] = call
    return calls


@pytest.fixture(scope="module")
def calls():
    return calls_of(Model())


@pytest.fixture(scope="module")
def loop(calls):
    return loop_of(calls, "model.layers", 4)


def test_what_runs_again_and_what_it_is_handed(calls, loop):
    assert loop == LoopParts(1, 2, 3, restarts=True, message="model.message", place=2)
    assert passes_on(calls["model.layers.2"], calls["model.layers.3"])
    assert not passes_on(calls["model.layers.3"], calls["model.layers.2"])
    last = calls["model.layers.2"].later[-1]
    assert message_of(calls, loop, 2) is last.args[1]


def test_a_pass_that_goes_on():
    found = loop_of(calls_of(Model(restarts=False)), "model.layers", 4)
    assert found == LoopParts(1, 2, 3, restarts=False)


def test_layers_that_run_once_are_no_loop_and_uneven_ones_are_refused(calls):
    once = {path: Call(path, call.module, call.args, call.kwargs, call.output) for path, call in calls.items()}
    assert loop_of(once, "model.layers", 4) is None
    once["model.layers.1"].later = calls["model.layers.1"].later
    once["model.layers.3"].later = calls["model.layers.1"].later[:1]
    with pytest.raises(Undiscovered, match=r"layers run \[1, 3, 1, 2\] times"):
        loop_of(once, "model.layers", 4)


def test_calls_of_one_pass(calls, loop):
    inside = [path for path in in_pass(calls, "model.layers", loop, 0) if path.startswith("model.layers.1.")]
    assert inside == ["model.layers.1.norm", "model.layers.1.wide.inward", "model.layers.1.wide"]
    later = in_pass(calls, "model.layers", loop, -1)
    assert later["model.layers.1"] is calls["model.layers.1"].later[1]
    names = [path.removeprefix("model.layers.1.") for path in later if path.startswith("model.layers.1.")]
    assert [name for name in names if "." not in name] == ["one", "norm", "wide", "other", "norm@2"]


def test_messages_that_are_all_the_same_are_told_apart(calls, loop):
    """Every message of this model is the last state itself, so that any of them explains what any gate reads."""
    last, message = in_pass(calls, "model.layers", loop, -1), message_of(calls, loop, 1)
    assert message is not None
    assert torch.allclose(message[:, :, 0], message[:, :, 1], rtol=1e-12)
    changed, other = with_other_messages(last, "model.layers.1", message)
    units = layer_parts(changed, "model.layers.1", again=Again(other)).units
    reads = {unit.path: unit.inputs for unit in units if unit.path in {"one", "other"}}
    assert reads == {"one": [{"x": 1.0}, {"message.0": 1.0}], "other": [{"x": 1.0}, {"message.1": 1.0}]}
    assert [unit.path for unit in units].count("norm") == 2
    assert changed["model.layers.2"] is last["model.layers.2"]


def test_the_maker_of_messages_is_asked_for_all_layers_and_about_more_states(calls, loop):
    call = message_call(calls, loop)
    assert call.count == 2
    assert call.inputs[0].shape == (2, 3, 3, HIDDEN)
    states = torch.cat((call.inputs[0], call.inputs[1][:, :, None]), 2)
    want = [(states @ query.T).softmax(2).transpose(2, 3) @ states for query in call.module.get_parameter("query")]
    assert torch.allclose(call.result, torch.cat([made.flatten(2) for made in want], -1), rtol=1e-12)
    assert torch.allclose(call.replay(call.hidden), call.result, rtol=1e-12)
