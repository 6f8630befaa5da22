import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dayzero.onboard.prove.trace import Operations, trace

X = torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4)


def test_steps_and_constants_of_a_norm():
    found = trace(lambda: X * torch.rsqrt(X.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert found.steps == {"mul", "rsqrt", "pow", "mean", "add"}
    assert found.constants == {2.0, 1e-6}


@pytest.mark.parametrize(
    ("function", "steps", "constants"),
    [
        (lambda: X.clamp(-7, 7), {"clamp"}, {7.0, -7.0}),
        (lambda: X.clamp(max=float("inf")), {"clamp"}, set()),
        (lambda: X.clamp_min(1e-12), {"clamp"}, {1e-12}),
        (lambda: F.gelu(X), {"gelu"}, set()),
        (lambda: X.topk(2).values.softmax(-1), {"topk", "softmax"}, set()),
        (lambda: X @ X.T * 0.5, {"matmul", "mul"}, {0.5}),
        (lambda: X * 1.0 + 0.0, {"mul", "add"}, set()),
        (lambda: X.masked_fill(X > 1e9, float("-inf")), {"gt"}, {1e9}),
        (lambda: X.clone().div_(3.0), {"div"}, {3.0}),
        (lambda: X.double().view(4, 3).transpose(0, 1), set(), set()),
        (lambda: torch.arange(3) * 5 + 7, set(), set()),
        (lambda: X[:0] * 5.0, set(), set()),
    ],
)
def test_what_leaves_a_trace(function, steps, constants):
    found = trace(function)
    assert found.steps == steps
    assert found.constants == constants


def test_a_ledger_says_all_of_it_in_one_line():
    x = torch.ones(3, 4, dtype=torch.float64)
    assert trace(lambda: (x * 0.1).exp() + 1e-20).ledger == "add, exp, mul; constants 1e-20, 0.1"
    assert trace(lambda: x @ x.T).ledger == "matmul; no constants"
    assert trace(lambda: x.view(-1)).ledger == "no arithmetic; no constants"


def test_a_module_list_and_a_batched_product_are_the_same_arithmetic():
    weights = torch.randn(2, 4, 4, dtype=torch.float64)
    loop = trace(lambda: [F.linear(X, weight) for weight in weights])
    batched = trace(lambda: torch.bmm(X.expand(2, 3, 4), weights.mT))
    assert loop.difference(batched) == batched.difference(loop) == []


def test_fused_and_eager_attention_are_the_same_arithmetic():
    query = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    mask = torch.full((5, 5), float("-inf"), dtype=torch.float64).triu(1)
    fused = trace(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True, scale=0.3))
    eager = trace(lambda: (query @ query.mT * 0.3 + mask).softmax(-1) @ query)
    assert fused.difference(eager) == eager.difference(fused) == []


def test_a_difference_names_the_step_or_the_constant():
    one = Operations({"mul", "add", "silu", "clamp"}, {7.0, 1e-6})
    other = Operations({"mul", "silu"}, {1e-6 * (1 + 1e-15), 8.0})
    assert one.difference(other) == ["step clamp", "constant 7.0"]
    assert other.difference(one) == ["constant 8.0"]


def test_a_trace_keeps_no_graph_and_changes_nothing():
    module = nn.Linear(4, 4).double()
    out = []
    trace(lambda: out.append(module(X)))
    assert not out[0].requires_grad
    assert torch.equal(out[0], module(X))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: X * torch.rsqrt((X * X).sum(-1, keepdim=True) + 1e-6), lambda: X / torch.sqrt((X * X).sum() + 1e-6)),
        (lambda: F.softplus(X), lambda: torch.where(X > 20.0, X, torch.log(1.0 + torch.exp(X)))),
        (lambda: X.cumsum(0), lambda: torch.stack([X[: i + 1].sum(0) for i in range(3)])),
        (lambda: -X, lambda: X * -1.0),
    ],
)
def test_two_spellings_of_one_function_are_the_same(one, other):
    one, other = trace(one), trace(other)
    assert one.difference(other) == other.difference(one) == []


@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        (lambda: F.softplus(X), lambda: F.softplus(X, threshold=30.0), ["constant 20.0"]),
        (lambda: torch.sqrt(X), lambda: torch.rsqrt(X), ["step sqrt"]),
        (lambda: X / X.sum(), lambda: torch.rsqrt(X), ["step div"]),
        (lambda: torch.log(1.0 + torch.exp(X)), lambda: F.softplus(X), ["step exp", "step log"]),
    ],
)
def test_half_of_a_spelling_is_a_difference(one, other, lines):
    assert trace(one).difference(trace(other)) == lines


def test_asking_what_a_mask_hides_is_no_arithmetic():
    x = torch.randn(3, 4)
    asked = trace(lambda: (x == 0, x == float("-inf"), x != 0))
    assert asked.steps == set()
    assert trace(lambda: x == 0.5).steps == {"eq"}
    assert trace(lambda: x > 0).steps == {"gt"}


def test_a_softmax_may_subtract_its_maximum_beforehand():
    x = torch.randn(3, 4)
    plain = trace(lambda: x.softmax(-1))
    before = trace(lambda: (x - x.max(-1, keepdim=True).values).softmax(-1))
    assert "max" in before.steps
    assert before.difference(plain) == []
    assert plain.difference(before) == []
    assert trace(lambda: x.max(-1).values).difference(plain) == ["step max"]
