"""The hand-written packages are the same models as transformers', in float64."""

import handmade
import pytest
import tiny
import torch
from torch.overrides import TorchFunctionMode

from dayzero.runtime.headers import read_headers
from dayzero.runtime.package import load_package
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.weights import bind


def close(got, want):
    return bool((got - want).norm() <= 1e-9 * want.norm())


class Promoted(TorchFunctionMode):
    """float32 islands of the reference in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        double = {torch.float32: torch.float64, torch.float: torch.float64}
        args = [double.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args]
        kwargs = {name: double.get(arg, arg) if name == "dtype" else arg for name, arg in (kwargs or {}).items()}
        return function(*args, **kwargs)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_equals_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint = tiny.make(family, tmp_path / "checkpoint")
    package = load_package(handmade.write(checkpoint, tmp_path / "package"))
    headers = read_headers(checkpoint)
    shapes = {name: header.shape for name, header in headers.items()}
    reader, rules = SafetensorsReader(checkpoint), bind(package.rules)
    model = package.build().double()
    assert rules.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rules[name].read(reader, shapes))

    reference = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(0, package.spec.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    rotary, spec = reference.model.rotary_emb, package.spec.rotaries[0].arguments
    rotary.inv_freq = spec["theta"] ** -(torch.arange(0, spec["dim"], 2, dtype=torch.float64) / spec["dim"])
    with Promoted():
        want = reference(ids).logits.flatten(0, 1)
    cu_seqlens = torch.tensor([0, 9, 18])
    got = model(ids.flatten(), cu_seqlens)
    assert close(got, want)

    want_loss = torch.nn.functional.cross_entropy(want, labels.flatten(), reduction="sum")
    loss = model(ids.flatten(), cu_seqlens, labels.flatten())
    want_loss.backward()
    loss.backward()
    assert close(loss, want_loss)
    gradients = {}
    for name, parameter in model.named_parameters():
        for theirs, region, value in rules[name].write(parameter.grad, shapes):
            gradients.setdefault(theirs, torch.zeros(shapes[theirs], dtype=torch.float64))[region] = value
    module, parts = handmade.NAMES[family]
    for name, parameter in reference.named_parameters():
        name = name.replace(".mlp.", f".{module}.")
        if name in gradients:
            assert close(gradients.pop(name), parameter.grad), name
            continue
        stem, _, stacked = name.rpartition(".")  # transformers stacks the experts, as gate_up_proj and down_proj
        for expert, want in enumerate(parameter.grad):
            pieces = [parts["gate"], parts["up"]] if stacked == "gate_up_proj" else [parts["down"]]
            mine = torch.cat([gradients.pop(f"{stem}.{expert}.{piece}.weight") for piece in pieces])
            assert close(mine, want), (name, expert)
    assert not gradients
