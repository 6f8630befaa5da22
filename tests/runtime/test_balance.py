"""Loads are counted once and alike on every mesh; losses and biases pull them even."""

from types import SimpleNamespace

import harness
import pytest
import ranks_balance
import torch
import torch.nn.functional as F

from dayzero.runtime import config
from dayzero.runtime.balance import Balance, arrange_experts, bias_step, choose_hosts
from dayzero.runtime.config import Balance as Settings
from dayzero.runtime.errors import InputError
from dayzero.runtime.nn import Experts, MixtureOfExperts, Router, TopOneRouter
from dayzero.runtime.nn.expert_parallel import Exchange
from dayzero.runtime.nn.router_losses import EDGES, RouterLosses, count_margins, margin_quantile

LOSSES = {"auxiliary_loss": 0.5, "sequence_loss": 0.25, "z_loss": 0.125}


@pytest.mark.parametrize(
    ("settings", "score", "recomputed"),
    [
        (LOSSES, "softmax", False),
        ({**LOSSES, "bias": "sign"}, "sigmoid", True),
        ({"bias": "proportional"}, "softmax", True),
        ({"bias": "quantile", "bias_rate": 1.0}, "sigmoid", False),
    ],
)
def test_two_ranks_equal_one_process(settings, score, recomputed):
    for found in harness.run(ranks_balance.compare, 2, settings, score, recomputed):
        assert found["gradients"] <= 1e-12
        assert all(error <= 1e-12 for error in found["losses"].values())
        assert len(found["losses"]) == sum(name in LOSSES for name in settings)
        got, want = found["counts"]
        assert got == want
        assert sum(got) == 2 * ranks_balance.TOTAL
        assert found["bias"] == 0
        assert (found["moved"] > 0) == ("bias" in settings)


def test_losses_by_hand():
    """The definitions, one token and one expert at a time."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    chances = logits.softmax(-1)
    index = chances.topk(2).indices
    auxiliary = sequence = z = torch.zeros((), dtype=torch.float64)
    for e in range(4):
        auxiliary = auxiliary + 4 / (2 * 7) * int((index == e).sum()) * chances[:, e].mean()
        for part in (slice(0, 3), slice(3, 7)):
            size = part.stop - part.start
            share = 4 / (2 * size) * int((index[part] == e).sum())
            sequence = sequence + size / 7 * share * chances[part, e].mean()
    for t in range(7):
        z = z + logits[t].exp().sum().log() ** 2 / 7
    want = torch.autograd.grad(0.3 * auxiliary + 0.2 * sequence + 0.1 * z, logits, retain_graph=True)[0]

    losses = RouterLosses(0.3, 0.2, 0.1, tokens=7)
    weights = losses.attach(chances.gather(1, index), logits, chances, chances, index, (3, 4))
    got = torch.autograd.grad((weights * 0).sum(), logits)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    found = [float(losses.values[name]) for name in ("auxiliary", "sequence", "z")]
    assert found == pytest.approx([0.3 * float(auxiliary), 0.2 * float(sequence), 0.1 * float(z)], rel=1e-12)


def zipf(updates: str, rate: float, steps: int = 200) -> list[float]:
    """max/mean load over 200 steps of fresh tokens, by a router whose first channel makes experts as popular as words
    are: the n-th gets 1/n."""
    experts, tokens = 64, 2048
    torch.manual_seed(0)
    moe = MixtureOfExperts(Router(8, experts, 4, score="sigmoid", selection_bias=True), Experts(experts, 8, 4, "silu"))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    with torch.no_grad():
        moe.router.selection_bias.zero_()
        moe.router.weight[:, 0] = -torch.arange(1, experts + 1).log()
    balance = Balance(moe, Settings(bias=updates, bias_rate=rate), None)
    loads = []
    for _ in range(steps):
        x = torch.randn(tokens, 8)
        x[:, 0] = 1.0
        balance.begin(tokens)
        with torch.no_grad():
            moe(x)
        balance.add()
        loads.append(balance.finish().worst)
    return loads


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "rate"), [("sign", 0.004), ("proportional", 0.002), ("quantile", 0.2)])
def test_a_zipf_router_comes_down(updates, rate):
    loads = zipf(updates, rate)
    assert loads[0] > 8
    assert max(loads[-5:]) < 1.5
    assert min(zipf("off", rate, 5)) > 8


def test_the_auxiliary_loss_evens_the_load():
    torch.manual_seed(1)
    moe = MixtureOfExperts(Router(8, 16, 2), Experts(16, 8, 4, "silu"))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        moe.router.weight[:2, 0] = 3.0
    optimizer = torch.optim.SGD([moe.router.weight], lr=0.5)
    balance, loads = Balance(moe, Settings(auxiliary_loss=1.0), None), []
    for _ in range(60):
        x = torch.randn(256, 8)
        x[:, 0] = 1.0
        balance.begin(256)
        (moe(x) * 0).sum().backward()
        balance.add()
        loads.append(balance.finish().worst)
        optimizer.step()
        optimizer.zero_grad()
    assert loads[0] > 6
    assert loads[-1] < 2.5


def test_margins_and_their_quantile():
    """A bias larger by the quantile gives an expert its share, the others being as they are."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(4000, 8, generator=generator).sigmoid() + torch.linspace(0, 0.3, 8)
    margins = count_margins(scores, scores.topk(2).indices)
    assert margins.shape == (8, len(EDGES) + 1)
    assert margins.sum(1).eq(4000).all()
    step = margin_quantile(margins, 2 / 8)
    for expert in range(8):
        moved = scores.clone()
        moved[:, expert] += step[expert]
        assert (moved.topk(2).indices == expert).sum().item() == pytest.approx(1000, rel=0.1)
        assert (scores.topk(2).indices == expert).sum().item() != pytest.approx(1000, rel=0.1) or expert in (4, 5)


def test_steps_of_a_bias():
    counts = torch.tensor([0, 4, 8])
    assert bias_step(counts, "sign").tolist() == [1, 0, -1]
    assert bias_step(counts, "proportional").tolist() == [1, 0, -1]
    assert bias_step(torch.tensor([1, 2, 9]), "proportional").tolist() == [0.75, 0.5, -1.25]


def test_second_copies_go_where_there_is_least_to_do():
    assert choose_hosts([90, 10, 5, 5, 40, 20], 3, 2) == [
        (0, 1),
        (4, 0),
    ]  # work of 100, 10, 60 becomes 55, 55, 60: the lower number wins the tie
    assert choose_hosts([0, 0, 0, 0], 2, 1) == [(0, 1)]


@pytest.mark.parametrize(
    ("settings", "where"),
    [({"bias": "sign"}, "balance.bias"), ({"z_loss": 0.1}, "balance"), ({"duplicates": 1}, "balance.duplicates")],
)
def test_settings_without_anything_to_apply_to(settings, where):
    moe = MixtureOfExperts(TopOneRouter(8, 5, 3), Experts(4, 8, 4, "silu"))
    with pytest.raises(InputError) as error:
        Balance(moe, Settings(**settings), None)
    assert str(error.value).startswith(where)


def test_evaluation_leaves_routers_alone():
    torch.manual_seed(0)
    router = Router(8, 6, 2)
    torch.nn.init.normal_(router.weight)
    router.losses = RouterLosses(z=1.0)
    x = torch.randn(5, 8)
    router.eval()
    F.mse_loss(router(x)[0], torch.zeros(5, 2))
    assert router.losses.values == {}
    router.train()
    router(x)
    assert set(router.losses.values) == {"z"}


@pytest.mark.parametrize(
    ("device", "experts", "found"), [("cpu", 6, "on npu, not on cpu"), ("npu", 5, "classes beyond the experts")]
)
def test_the_fused_dispatcher_is_refused_where_it_cannot_be_used(device, experts, found, monkeypatch):
    moe = MixtureOfExperts(Router(8, 6, 2), Experts(experts, 8, 4, "silu"))
    moe.exchange = Exchange(SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr("dayzero.runtime.balance.device_type", lambda: device)
    with pytest.raises(InputError, match=found):
        arrange_experts(moe, config.Experts(dispatcher="fused"))


def test_the_fused_dispatcher_has_no_capacity():
    with pytest.raises(ValueError, match="no capacity"):
        config.Experts(dispatcher="fused", capacity=1.5)
