"""Adapters: nothing at first, only they learn, and merged they are the same function."""

import handmade
import harness
import pytest
import ranks_lora
import tiny
import torch

from dayzero.runtime.errors import InputError
from dayzero.runtime.lora import LoRALinear, apply_lora, merge, reset_lora
from dayzero.runtime.nn.causal_lm import initialise

IDS, CU_SEQLENS = torch.arange(14) * 7, torch.tensor([0, 5, 14])


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return handmade.specify(tiny.make("qwen3_moe", tmp_path_factory.mktemp("qwen"), tokenizer=False))


@pytest.fixture
def model(spec):
    model = spec.build().double()
    initialise(model, 0.2, seed=0)
    return model


def train_a_step(model):
    model(IDS, CU_SEQLENS, IDS.roll(-1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / parameter.grad.norm().clamp(min=1e-9)


def test_adds_nothing_at_first_and_trains_adapters_alone(model):
    want = model(IDS, CU_SEQLENS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    matched = apply_lora(model, 4, 8.0)
    assert matched == [
        f"layers.{layer}.{module}"
        for layer in range(3)
        for module in [
            *(f"mixer.{name}" for name in ("query", "key", "value", "output")),
            *(f"ffn.{name}" for name in ("gate", "up", "down") if layer == 1),
        ]
    ]
    assert torch.equal(model(IDS, CU_SEQLENS), want)
    train_a_step(model)
    train_a_step(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{part}" for name in matched for part in ("lora_a", "lora_b")}
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(model.get_parameter(name).grad.norm() > 0 for name in trained)
    assert not torch.allclose(model(IDS, CU_SEQLENS), want)


def merged(module):
    return merge(module.weight.detach(), module.lora_a.detach(), module.lora_b.detach(), module.scale)


def test_merged_weights_are_the_same_function(model):
    matched = apply_lora(model, 4, 8.0, targets=["query", "ffn.down", "layers.2.mixer.output"])
    assert matched == [
        "layers.0.mixer.query",
        "layers.1.mixer.query",
        "layers.1.ffn.down",
        "layers.2.mixer.query",
        "layers.2.mixer.output",
    ]
    train_a_step(model)
    want = model(IDS, CU_SEQLENS)
    for name in matched:
        module = model.get_submodule(name)
        module.weight.data.copy_(merged(module))
        module.lora_b.data.zero_()
    assert torch.allclose(model(IDS, CU_SEQLENS), want, rtol=1e-10, atol=1e-12)


def test_formula():
    linear = torch.nn.Linear(6, 10, dtype=torch.float64)
    module = LoRALinear(linear, 2, 3.0)
    torch.nn.init.normal_(module.lora_a)
    torch.nn.init.normal_(module.lora_b)
    x = torch.randn(5, 6, dtype=torch.float64)
    want = linear(x) + 1.5 * x @ module.lora_a.T @ module.lora_b.T
    assert torch.allclose(module(x), want)


def test_meta_first_then_the_same_values(spec, model):
    with torch.device("meta"):
        late = spec.build().double()
    apply_lora(late, 4, 8.0)
    late.to_empty(device="cpu")
    reset_lora(late, torch.Generator().manual_seed(3))
    apply_lora(model, 4, 8.0, generator=torch.Generator().manual_seed(3))
    adapters = {name: value for name, value in model.state_dict().items() if "lora" in name}
    assert len(adapters) == 30
    assert all(torch.equal(late.state_dict()[name], value) for name, value in adapters.items())
    a = model.get_parameter("layers.0.mixer.query.lora_a")
    assert a.abs().max() <= 40**-0.5
    assert len({float(value.sum()) for name, value in adapters.items() if name.endswith("lora_a")}) == 15


def test_bf16_base_with_fp32_adapters(spec):
    model = spec.build().bfloat16()
    initialise(model, 0.2, seed=0)
    apply_lora(model, 4, 8.0)
    train_a_step(model)
    query = model.layers[0].mixer.query
    assert (query.weight.dtype, query.lora_a.dtype, query.lora_b.grad.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    assert model(IDS, CU_SEQLENS).dtype == torch.bfloat16
    assert merged(query).dtype == torch.bfloat16


def test_dropout_only_in_training(model):
    apply_lora(model, 4, 8.0, dropout=0.5)
    train_a_step(model)
    assert not torch.equal(model(IDS, CU_SEQLENS), model(IDS, CU_SEQLENS))
    model.eval()
    assert torch.equal(model(IDS, CU_SEQLENS), model(IDS, CU_SEQLENS))


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_sharded_adapters_start_and_learn_the_same(spec, compute):
    base = torch.float64 if compute is None else torch.bfloat16
    ((want, reference),) = harness.run(ranks_lora.step, 1, spec.model_dump_json(), base, compute, timeout=60)
    got = harness.run(ranks_lora.step, 2, spec.model_dump_json(), base, compute, timeout=60)
    for start, gradients in got:
        for name, value in want.items():
            assert torch.equal(start[name], value), name
        assert set(gradients) == {name for name in want if "lora" in name}
    for name, gradient in reference.items():
        error = (got[0][1][name] - gradient).norm() / gradient.norm().clamp(min=1e-30)
        assert error <= (1e-9 if compute is None else 5e-2), (name, error)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["query", "wq"], ["lora.targets: wq", "no linear layer", "down, gate, head, key, output, query, up, value"]),
        (["experts"], ["routed experts", "no adapters yet"]),
        (["experts.gate_up"], ["routed experts"]),
        ([], ["an empty list"]),
    ],
)
def test_targets_that_do_not_exist(model, targets, says):
    with pytest.raises(InputError) as error:
        apply_lora(model, 4, 8.0, targets=targets)
    assert all(part in str(error.value) for part in says), str(error.value)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_rank_zero(model):
    with pytest.raises(InputError, match="1 or more"):
        apply_lora(model, 0, 8.0)
