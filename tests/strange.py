"""A sparse decoder that no library has, and whose names say nothing: it can only be understood by what it computes."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Ledge(SimpleNamespace):
    def to_dict(self):
        return vars(self)


def ledge(**changes):
    fields = {
        "breadth": 48, "tiers": 2, "lexicon": 131, "eyes": 6, "pools": 3, "pupil": 14, "crew": 10, "picks": 3,
        "girth": 34, "speck": 3e-6, "omega": 20000.0, "boost": 1.75,
    }  # fmt: skip
    return Ledge(**{**fields, **changes})


class Wobble(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.hue = nn.Parameter(torch.ones(cfg.breadth))
        self.kappa = cfg.speck

    def forward(self, z):
        wide = z.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.kappa)).to(z.dtype) * self.hue


def crossed(z):
    left, right = z.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Lens(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.eyes, self.pools, self.pupil = cfg.eyes, cfg.pools, cfg.pupil
        self.aa = nn.Linear(cfg.breadth, cfg.pools * cfg.pupil, bias=False)
        self.bb = nn.Linear(cfg.breadth, cfg.eyes * cfg.pupil, bias=False)
        self.cc = nn.Linear(cfg.breadth, cfg.pools * cfg.pupil, bias=False)
        self.dd = nn.Linear(cfg.eyes * cfg.pupil, cfg.breadth, bias=False)

    def forward(self, z, pair, veil):
        split = (*z.shape[:2], -1, self.pupil)
        c, s = (table[:, None] for table in pair)
        q, k, v = (part(z).view(split).transpose(1, 2) for part in (self.bb, self.cc, self.aa))
        q, k = q * c + crossed(q) * s, k * c + crossed(k) * s
        k, v = (part.repeat_interleave(self.eyes // self.pools, 1) for part in (k, v))
        seen = (q @ k.transpose(2, 3) * self.pupil**-0.5 + veil).softmax(-1)
        return self.dd((seen @ v).transpose(1, 2).reshape(*z.shape[:2], -1))


class Usher(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.chart = nn.Parameter(torch.empty(cfg.crew, cfg.breadth))
        self.quota, self.lift = cfg.picks, cfg.boost

    def forward(self, z):
        odds = F.linear(z.float(), self.chart.float()).sigmoid()
        most, who = odds.topk(self.quota, -1)
        return who, most / (most.sum(-1, keepdim=True) + 1e-9) * self.lift


class Crowd(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.blob = nn.Parameter(torch.empty(cfg.crew, 2 * cfg.girth, cfg.breadth))
        self.clot = nn.Parameter(torch.empty(cfg.crew, cfg.breadth, cfg.girth))

    def forward(self, z, who, share):
        total = torch.zeros_like(z)
        for member in range(self.blob.shape[0]):
            row, slot = (who == member).nonzero(as_tuple=True)
            if len(row):
                one, two = F.linear(z[row], self.blob[member]).chunk(2, -1)
                total.index_add_(0, row, F.linear(F.silu(one) * two, self.clot[member]) * share[row, slot, None])
        return total


class Tribe(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.door, self.hall = Usher(cfg), Crowd(cfg)

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        who, share = self.door(flat)
        return self.hall(flat, who, share).view_as(z)


class Tier(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.zig, self.see, self.zag, self.do = Wobble(cfg), Lens(cfg), Wobble(cfg), Tribe(cfg)

    def forward(self, z, pair, veil):
        z = z + self.see(self.zig(z), pair, veil)
        return z + self.do(self.zag(z))


class Spin(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        rates = cfg.omega ** -(torch.arange(0, cfg.pupil, 2, dtype=torch.float64) / cfg.pupil)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, z, when):
        angle = when[..., None].to(z.dtype) * self.rates
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


class Oddity(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.config = cfg
        self.glyphs = nn.Embedding(cfg.lexicon, cfg.breadth)
        self.spin = Spin(cfg)
        self.tower = nn.ModuleList(Tier(cfg) for _ in range(cfg.tiers))
        self.calm = Wobble(cfg)
        self.mouth = nn.Linear(cfg.breadth, cfg.lexicon, bias=False)

    def forward(self, input_ids, use_cache=False):
        z = self.glyphs(input_ids)
        length = input_ids.shape[1]
        pair = self.spin(z, torch.arange(length)[None].expand_as(input_ids))
        veil = torch.full((length, length), float("-inf"), dtype=z.dtype).triu(1)[None, None]
        for tier in self.tower:
            z = tier(z, pair, veil)
        return SimpleNamespace(logits=self.mouth(self.calm(z)))


def build(**changes):
    """The model in float64, evaluation mode, parameters uninitialised."""
    return Oddity(ledge(**changes)).double().eval()
