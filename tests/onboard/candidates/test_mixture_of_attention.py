"""Attention whose first and last projections are routed is proven on the experts' container, under names that say
nothing; heads that are paired otherwise are not."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from strange import Ledge
from torch import nn

from dayzero.onboard.candidates import site_of
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import prove

H, G, D, E, K, S = 40, 3, 6, 5, 2, 19


class Basket(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.straw = nn.Parameter(torch.empty(E, rows, columns))


class Orchard(nn.Module):
    """Pairs of projections for each token, between which there is one attention. paired: how a choice's heads read the
    keys. shade: whether the weights are taken of all scores or of the chosen ones."""

    def __init__(self, paired="sets", shade="chosen"):
        super().__init__()
        self.paired, self.shade, self.picks, self.baskets, self.depth = paired, shade, K, G, 0.21
        self.rake = nn.Linear(H, E, bias=False)
        self.leaf, self.root = Basket(G * D, H), Basket(H, G * D)
        self.pond = nn.Linear(H, 2 * G * D, bias=False)
        self.dew = nn.Parameter(torch.empty(H))

    def forward(self, z):
        batch, length, _ = z.shape
        x = z.reshape(-1, H)
        scores = self.rake(x)
        scores = scores if self.shade == "chosen" else scores.softmax(-1)
        best, index = scores.topk(self.picks, dim=-1)
        weights = best.softmax(-1) if self.shade == "chosen" else best
        query = torch.einsum("tkoi,ti->tko", self.leaf.straw[index], x)
        query = query.view(batch, length, K * G, D).transpose(1, 2)
        value, key = self.pond(z).view(batch, length, 2, G, D).permute(2, 0, 3, 1, 4)
        more = (lambda part: part.repeat(1, K, 1, 1)) if self.paired == "sets" else lambda p: p.repeat_interleave(K, 1)
        scores = torch.matmul(query, more(key).transpose(2, 3)) * self.depth
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        chances = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        gathered = torch.matmul(chances, more(value)).transpose(1, 2).reshape(-1, K, G * D)
        made = torch.einsum("tkoi,tki->tko", self.root.straw[index], gathered) * weights[..., None]
        return (made.sum(1) + self.dew).view(batch, length, H)


class Grove(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.config = Ledge(picks=K)
        self.seed, self.plot = nn.Embedding(50, H), Orchard(**how)

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.plot(self.seed(input_ids)))


def verdict(**how):
    torch.manual_seed(0)
    grove = Grove(**how).to(torch.float64).eval()
    for parameter in grove.parameters():
        nn.init.normal_(parameter, std=0.4)
    calls, _ = record_calls(grove, torch.randint(50, (2, S)))
    site = site_of(calls, "plot", grove.config)
    return site, prove("mixer", site, torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("shade", "scored"), [("chosen", "selected"), ("all", "all")])
def test_routed_heads_are_proven_on_the_container(shade, scored):
    site, found = verdict(shade=shade)
    assert found.survivors, [attempt.objection for attempt in found.attempts[:3]]
    spec = found.survivors[0].candidate.spec(site.module, site.config)
    assert spec.block == "MixtureOfAttention"
    assert spec.arguments["router"].arguments["scored"] == scored
    experts = spec.arguments["experts"].arguments
    assert (experts["experts"], experts["hidden"], experts["width"], experts["act"]) == (E, H, G * D, None)
    assert spec.arguments | {"router": 0, "experts": 0} == {
        "router": 0, "experts": 0, "kv_heads": G, "scale": 0.21, "rotary": None, "bias": True,
    }  # fmt: skip
    # Arguments follow the module: a scale that it reads elsewhere would not.
    vars(site.module)["depth"] = 0.5
    assert found.survivors[0].candidate.spec(site.module, site.config).arguments["scale"] == 0.5


def test_heads_that_are_paired_otherwise_are_not():
    _, found = verdict(paired="neighbours")
    assert not found.survivors
