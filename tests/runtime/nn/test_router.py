"""Every router against its formula written out token by token, and what must never change: selection is not weight."""

import math

import pytest
import torch
import torch.nn.functional as F
from drawn import context_for, drawn

from dayzero.runtime.nn import (
    GroupLimit,
    HandedRouting,
    HashRouter,
    JointRouter,
    LeaveRouting,
    Normalise,
    ProductKeyRouter,
    RMSNorm,
    Router,
    SparseMixerRouter,
    TopOneRouter,
)
from dayzero.runtime.nn.carried_router import STATE, CarriedRouter

HIDDEN, EXPERTS, TOP_K = 10, 8, 3


def inputs(tokens=12, seed=1):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("scored", ["all", "selected"])
def test_scores_and_selection_token_by_token(score, scored):
    router = drawn(
        Router(HIDDEN, EXPERTS, TOP_K, score, scored, selection_bias=True, normalise=Normalise(eps=1e-3), scale=2.5)
    )
    functions = {
        "softmax": lambda v: [math.exp(a) / sum(map(math.exp, v)) for a in v],
        "sigmoid": lambda v: [1 / (1 + math.exp(-a)) for a in v],
        "sqrtsoftplus": lambda v: [math.sqrt(math.log1p(math.exp(a))) for a in v],
    }
    x = inputs()
    weights, index = router(x)
    for token in range(len(x)):
        logits = (router.weight @ x[token]).tolist()
        values = functions[score](logits) if scored == "all" else logits
        ranked = sorted(range(EXPERTS), key=lambda e: -(values[e] + float(router.selection_bias[e])))[:TOP_K]
        assert index[token].tolist() == ranked
        chosen = [values[e] for e in ranked]
        chosen = functions[score](chosen) if scored == "selected" else chosen
        want = [2.5 * value / (sum(chosen) + 1e-3) for value in chosen]
        assert weights[token].tolist() == pytest.approx(want, rel=1e-12)


def test_a_selection_bias_is_a_float32_buffer_that_no_optimizer_sees():
    router = Router(HIDDEN, EXPERTS, TOP_K, "sigmoid", selection_bias=True)
    assert router.selection_bias.dtype == torch.float32
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert "selection_bias" in router.state_dict()


def test_a_bias_that_selects_changes_no_weight():
    router = drawn(Router(HIDDEN, EXPERTS, EXPERTS, "sigmoid", selection_bias=True))
    x = inputs()
    weights, index = router(x)
    assert torch.allclose(weights, torch.sigmoid(x @ router.weight.T).gather(-1, index), rtol=0, atol=1e-15)


@pytest.mark.parametrize("by", ["top2", "max"])
def test_groups_are_limited_by_hand(by):
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.8, 0.2, 0.1, 0.05]])
    kept = {
        "top2": [False, False, True, True, True, True, False, False],
        "max": [True, True, False, False, True, True, False, False],
    }
    got = GroupLimit(groups=4, kept=2, by=by)(scores)
    assert torch.isfinite(got)[0].tolist() == kept[by]
    assert torch.equal(got[torch.isfinite(got)], scores[0][torch.tensor(kept[by])])


def test_a_zero_fill_lets_others_win_over_negative_scores():
    scores = torch.tensor([[-0.1, -0.2, -0.5, -0.6]])
    limit, zero = GroupLimit(2, 1, "max"), GroupLimit(2, 1, "max", zero_fill=True)
    assert limit(scores).topk(2).indices.tolist() == [[0, 1]]
    assert sorted(zero(scores).topk(2).indices[0].tolist()) == [2, 3]


def test_normalisation_by_hand():
    weights = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert Normalise()(weights).tolist() == [[3 / 7, 4 / 7]]
    assert Normalise(eps=1.0)(weights).tolist() == [[3 / 8, 4 / 8]]
    assert Normalise(minimum=10.0)(weights).tolist() == [[0.3, 0.4]]
    assert Normalise(order=2.0)(weights).tolist() == [[0.6, 0.8]]


def test_softcap_scales_and_the_norm_of_the_input():
    norm = RMSNorm(HIDDEN, 1e-6)
    router = drawn(
        Router(
            HIDDEN,
            EXPERTS,
            2,
            logit_bias=True,
            logit_scale=0.7,
            logit_softcap=1.5,
            expert_scale=True,
            norm=norm,
            input_scale=0.3,
        )
    )
    x = inputs()
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight * 0.3
    logits = (normed @ router.weight.T + router.logit_bias) * 0.7
    best = ((logits / 1.5).tanh() * 1.5).softmax(-1).topk(2)
    weights, index = router(x)
    assert torch.equal(index, best.indices)
    assert torch.allclose(weights, best.values * router.expert_scale[best.indices], rtol=1e-12)


def test_a_table_of_ids_decides_and_scores_weigh():
    router = drawn(
        HashRouter(HIDDEN, EXPERTS, 2, vocabulary=5, score="sqrtsoftplus", normalise=Normalise(eps=1e-20), scale=1.5)
    )
    router.table.copy_(torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [1, 6]]))
    x, ids = inputs(4), torch.tensor([4, 0, 0, 3])
    weights, index = router(x, context_for(4, ids=ids))
    assert index.tolist() == [[1, 6], [0, 1], [0, 1], [6, 7]]
    scores = F.softplus(x @ router.weight.T).sqrt().gather(-1, index)
    assert torch.allclose(weights, 1.5 * scores / scores.sum(-1, keepdim=True), rtol=1e-12)
    with pytest.raises(ValueError, match="token ids"):
        router(x)


def test_shared_experts_share_the_normalisation():
    router = drawn(JointRouter(HIDDEN, EXPERTS, shared=2, top_k=3, scale=4.0))
    x = inputs()
    weights, index = router(x)
    scores = torch.sigmoid(x @ router.weight.T)
    chosen = (scores[:, :EXPERTS] + router.selection_bias).topk(3).indices
    assert torch.equal(index, chosen)
    joint = torch.cat((scores.gather(-1, chosen), scores[:, EXPERTS:]), -1)
    assert weights.shape == (12, 5)
    assert torch.allclose(weights, 4.0 * router.factor * joint / joint.sum(-1, keepdim=True), rtol=1e-10)


def test_sparse_mixing_ignores_what_is_far():
    router = SparseMixerRouter(2, 3, jitter=0.1).to(torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [0.9, 0.0], [0.1, 0.0]]))
    weights, index = router(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert index.tolist() == [[0, 1]]
    # Of 1 and 0.9 only both are within a fifth of the best; of 0.9 and 0.1 the second is not.
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-0.1)), 1.0])


def test_capacity_counts_by_document():
    router = drawn(TopOneRouter(HIDDEN, EXPERTS + 1, capacity=2))
    x = inputs(1).expand(7, -1)
    weights, index = router(x, context_for(4, 3))
    first = int(index[0, 0])
    assert index[:, 0].tolist() == [first, first, EXPERTS, EXPERTS, first, first, EXPERTS]
    assert torch.allclose(weights, (x @ router.weight.T).softmax(-1).amax(-1, keepdim=True))


def test_product_keys_find_the_best_sums():
    router = drawn(ProductKeyRouter(HIDDEN, 16, top_k=3)).requires_grad_(False)
    x = inputs(6)
    a, b = (x @ router.weight.T).view(2, 6, 4)
    weights, index = router(x)
    for token in range(6):
        sums = {i * 4 + j: float(a[token, i] + b[token, j]) for i in range(4) for j in range(4)}
        assert index[token].tolist() == sorted(sums, key=lambda name: -sums[name])[:3]
        assert weights[token].tolist() == pytest.approx(
            torch.tensor([sums[int(n)] for n in index[token]]).double().softmax(0).tolist()
        )


def test_product_keys_read_each_document_by_itself_and_leave_experts_past_the_square():
    router = drawn(ProductKeyRouter(HIDDEN, 19, top_k=3)).requires_grad_(False)
    assert router.weight.shape == (8, HIDDEN)
    x = inputs(7)
    weights, index = router(x, context_for(4, 3))
    for part, rows in ((x[:4], slice(0, 4)), (x[4:], slice(4, 7))):
        alone = router(part)
        assert torch.equal(index[rows], alone[1])
        torch.testing.assert_close(weights[rows], alone[0])
    assert int(index.max()) < 16
    assert torch.equal(router(x[:4], context_for(0, 4, 0))[1], index[:4])
    assert router(x[:0], context_for())[1].shape == (0, 3)


def test_a_carried_state_is_added_and_left():
    first = drawn(CarriedRouter(HIDDEN, 5, 1, width=4, eps=1e-5, act="gelu", carried=False))
    second = drawn(CarriedRouter(HIDDEN, 5, 1, width=4, eps=1e-5, act="gelu"), seed=2)
    x, context = inputs(), context_for(12)
    first(x, context)
    assert torch.equal(context.shared[STATE], first.down(x))
    second(x, context)
    assert torch.allclose(context.shared[STATE], second.down(x) + first.down(x) * second.carry)
    with pytest.raises(ValueError, match="there was none"):
        second(x, context_for(12))


def test_routing_left_by_one_part_is_handed_to_another():
    router = drawn(Router(HIDDEN, EXPERTS, TOP_K))
    x, context = inputs(), context_for(12)
    matrix = LeaveRouting(router)(x, context)
    weights, index = HandedRouting(EXPERTS, TOP_K)(torch.zeros(12, 3), context)
    assert torch.equal(matrix.gather(-1, index), weights)
    assert int((matrix != 0).sum()) == 12 * TOP_K
    with pytest.raises(ValueError, match="none left its choice"):
        HandedRouting(EXPERTS, TOP_K)(x, context_for(12))
