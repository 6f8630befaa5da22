"""What an attention module does is found from what enters and leaves its softmax, whatever anything is called."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from strange import Ledge
from torch import nn

from dayzero.onboard.candidates import site_of
from dayzero.onboard.candidates.attention import propose_attention
from dayzero.onboard.candidates.relative_attention import propose_relative_attention
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import attempt
from dayzero.runtime.nn.rotary import Rotary, rotate

H, N, G, D, S = 40, 6, 3, 8, 19


class Wobble(nn.Module):
    def __init__(self, width, weight=True, plus=0.0):
        super().__init__()
        self.hue = nn.Parameter(torch.ones(width)) if weight else None
        self.kappa, self.plus = 3e-6, plus

    def forward(self, z):
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.kappa)
        return z if self.hue is None else z * (self.plus + self.hue if self.plus else self.hue)


class Lens(nn.Module):
    """Attention under names that say nothing, put together as `how` says."""

    def __init__(self, **how):
        super().__init__()
        self.how, self.pupil, self.eyes, self.pools, self.zoom = how, D, N, G, D**-0.5
        self.value_size = how.get("value_size", D)
        wide = N * self.value_size
        sizes = {"aa": N * D, "bb": G * D, "cc": G * self.value_size}
        if how.get("fused"):
            sizes = {"aa": sum(sizes.values())}
        if how.get("doubled"):
            sizes["aa"] *= 2
        if how.get("shared"):
            del sizes["cc"]
        for name, rows in sizes.items():
            setattr(self, name, nn.Linear(H, rows, bias=how.get("bias", False)))
        self.dd = nn.Linear(wide, H, bias=False)
        if how.get("norm"):
            kinds = {"head": (D, D), "whole": (N * D, G * D), "bare": (D, D)}[how["norm"]]
            self.nn, self.mm = (Wobble(size, how["norm"] != "bare", how.get("plus", 0.0)) for size in kinds)
        self.oo = Wobble(self.value_size, weight=False) if how.get("out_norm") else None
        self.vv = Wobble(self.value_size, weight=False) if how.get("value_norm") else None
        self.ss = nn.Parameter(torch.zeros(N)) if how.get("sinks") else None
        if how.get("gate"):
            self.gg = nn.Linear(H, N if how["gate"] == "head" else wide, bias=False)
        self.tilt = how.get("factor", 1.0)
        self.lid = how.get("cap")
        self.bound = how.get("clip")
        self.reach = how.get("window") or how.get("chunk")

    def heads(self, z):
        how = self.how
        gate = None
        if how.get("fused") == "rows":
            q, k, v = self.aa(z).split([N * D, G * D, G * self.value_size], -1)
        elif how.get("fused") == "groups":
            parts = self.aa(z).unflatten(-1, (G, -1)).split([N // G * D, D, self.value_size], -1)
            q, k, v = (part.flatten(-2) for part in parts)
        else:
            q, k = self.aa(z), self.bb(z)
            v = k if how.get("shared") else self.cc(z)
        if how.get("doubled"):
            q, gate = (part.flatten(-2) for part in q.unflatten(-1, (N, 2 * D)).chunk(2, -1))
        if how.get("norm") == "whole":
            q, k = self.nn(q), self.mm(k)
        if self.bound:
            q, k, v = (part.clamp(-self.bound, self.bound) for part in (q, k, v))
        q, k, v = (part.unflatten(-1, (count, -1)) for part, count in ((q, N), (k, G), (v, G)))
        if how.get("norm") in {"head", "bare"} and not how.get("late"):
            q, k = self.nn(q), self.mm(k)
        if self.vv is not None:
            v = self.vv(v)
        return q, k * self.tilt if "factor" in how else k, v, gate

    def forward(self, z, pair, veil):
        how = self.how
        q, k, v, gate = self.heads(z)
        if how.get("turn"):
            c, s = (table[0] for table in pair)
            q, k = (torch.stack([rotate(row, c, s, how["turn"], how.get("last", False)) for row in x]) for x in (q, k))
        if how.get("late"):
            q, k = self.nn(q), self.mm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(N // G, 1) for part in (k, v))
        seen = q @ k.transpose(2, 3) * self.zoom
        if self.lid:
            seen = torch.tanh(seen / self.lid) * self.lid
        seen = seen + veil
        if self.ss is not None:
            seen = torch.cat((seen, self.ss[None, :, None, None].expand(*seen.shape[:3], 1)), -1)
        seen = seen.softmax(-1)
        got = (seen[..., :-1] if self.ss is not None else seen) @ v
        got = got.transpose(1, 2)
        if self.oo is not None:
            got = self.oo(got)
        if how.get("gate"):
            gate = self.gg(z)
        if gate is not None:
            act = F.softplus if how.get("act") == "softplus" else torch.sigmoid
            got = got * act(gate).unflatten(-1, (N, -1))
        return self.dd(got.flatten(2))


class Tube(nn.Module):
    def __init__(self, lens):
        super().__init__()
        self.config, self.lens = Ledge(spread=7.0), lens

    def forward(self, input_ids, use_cache=False):
        z = torch.randn(2, S, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        rotary = Rotary(self.lens.how.get("turned", D), 50.0)
        pair = tuple(table[None] for table in rotary(torch.arange(S), torch.float64))
        at = torch.arange(S)
        seen = at[:, None] >= at
        if self.lens.how.get("window"):
            seen &= at[:, None] - at < self.lens.reach
        if self.lens.how.get("chunk"):
            seen &= at[:, None] // self.lens.reach == at // self.lens.reach
        veil = torch.zeros(1, 1, S, S, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        return SimpleNamespace(logits=self.lens(z, pair, veil))


def site(**how):
    lens = Lens(**how).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lens.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    model = Tube(lens)
    calls, _ = record_calls(model, torch.zeros(2, S, dtype=torch.int64))
    return site_of(calls, "lens", model.config)


def proven(found, candidates):
    tried = [attempt(candidate, found, torch.Generator().manual_seed(2), thorough=True) for candidate in candidates]
    return [a.candidate for a in tried if a.proven], [a.objection for a in tried]


CASES = {
    "plain": ({"turn": "half"}, {"rotary": "half", "heads": N, "kv_heads": G, "head_dim": D, "scale": D**-0.5}),
    "interleaved": ({"turn": "interleaved"}, {"rotary": "interleaved"}),
    "no positions": ({}, {"rotary": None}),
    "partial": ({"turn": "half", "turned": 4}, {"rotary": "half"}),
    "last channels": ({"turn": "interleaved", "turned": 4, "last": True}, {"rotary_last": True}),
    "bias": ({"bias": True}, {"bias": True, "output_bias": False}),
    "rows fused": ({"fused": "rows", "turn": "half", "value_size": 4}, {"value_dim": 4, "kv_heads": G}),
    "groups fused": ({"fused": "groups", "turn": "half"}, {"kv_heads": G}),
    "doubled query": ({"doubled": True, "turn": "half"}, {"gate": "sigmoid"}),
    "head norms": ({"norm": "head", "turn": "half"}, {"qk_norm": "head", "qk_norm_eps": 3e-6, "qk_norm_offset": 0.0}),
    "shifted norms": ({"norm": "head", "plus": 1.0}, {"qk_norm": "head", "qk_norm_offset": 1.0}),
    "late norms": ({"norm": "head", "late": True, "turn": "half"}, {"qk_norm_after_rotary": True}),
    "bare norms": ({"norm": "bare", "turn": "half"}, {"qk_norm": "head", "qk_norm_scaled": False}),
    "whole norms": ({"norm": "whole", "turn": "half"}, {"qk_norm": "whole"}),
    "values are keys": ({"shared": True, "norm": "head", "value_norm": True}, {"value_is_key": True}),
    "value norm": ({"value_norm": True}, {"value_norm_eps": 3e-6}),
    "element gate": ({"gate": "element", "out_norm": True}, {"gate": "sigmoid", "output_norm_eps": 3e-6}),
    "head gate": ({"gate": "head", "act": "softplus"}, {"gate": "softplus", "gate_per_head": True}),
    "sinks": ({"sinks": True, "turn": "half"}, {"sinks": True}),
    "cap": ({"cap": 7.0}, {"softcap": 7.0}),
    "clip": ({"clip": 0.7}, {"clip": 0.7}),
    "factor": ({"factor": 1.7, "turn": "half"}, {"key_factor": 1.7}),
    "factor of 1": ({"factor": 1.0, "turn": "half"}, {"key_factor": 1.0}),
    "window": ({"window": 5, "turn": "half"}, {"window": 5}),
    "chunk": ({"chunk": 5, "turn": "half"}, {"chunk": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_is_found_and_proven(case):
    how, wanted = CASES[case]
    found = site(**how)
    candidates = propose_attention(found)
    assert 1 <= len(candidates) <= 8
    holding, objections = proven(found, candidates)
    assert holding, objections
    arguments = holding[0].spec(found.module, found.config).arguments
    assert {name: arguments.get(name) for name in wanted} == wanted
    unasked = {"gate", "sinks", "softcap", "clip", "window", "chunk", "key_factor", "value_norm_eps", "qk_norm"}
    assert unasked & arguments.keys() <= {*wanted, *({"gate"} if "gate" in how else ()), *_norms(how)}


def _norms(how):
    return [*(["qk_norm"] if "norm" in how else []), *(["value_norm_eps"] if "value_norm" in how else [])]


def test_evidence_follows_another_module():
    """The same claims on a module with other numbers."""
    first, second = site(window=5, cap=7.0, turn="half"), site(window=4, cap=3.0, turn="half")
    (candidate,) = propose_attention(first)
    arguments = candidate.spec(second.module, second.config).arguments
    assert (arguments["window"], arguments["softcap"]) == (4, 3.0)
    holding, objections = proven(second, [candidate])
    assert holding == [candidate], objections


@pytest.mark.parametrize("change", ["output", "scores", "gate"])
def test_what_is_more_than_that_is_not_found(change):
    class More(Lens):
        def forward(self, z, pair, veil):
            if change == "scores":
                veil = veil + torch.linspace(0, 1, S, dtype=torch.float64)[None, None, None]
            if change == "gate":
                return self.dd(super().forward(z, pair, veil).sin()[..., :1].expand(-1, -1, N * D))
            return super().forward(z, pair, veil) + (z if change == "output" else 0.0)

    lens = More(turn="half").double()
    with torch.no_grad():
        for parameter in lens.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.4)
    model = Tube(lens)
    calls, _ = record_calls(model, torch.zeros(2, S, dtype=torch.int64))
    found = site_of(calls, "lens", model.config)
    assert proven(found, propose_attention(found))[0] == []


def test_a_bias_by_distance_is_found():
    class Far(Lens):
        def __init__(self):
            super().__init__(norm="head")
            self.rr = nn.Linear(H, N * 4, bias=False)
            self.pp = nn.Parameter(torch.empty(4, 6))

        def forward(self, z, pair, veil):
            at = torch.arange(S)
            age = at[:, None] - at
            made = (self.rr(z).unflatten(-1, (N, 4)) @ self.pp).transpose(1, 2)
            made = made.gather(-1, age.clamp(0, 5).expand(2, N, -1, -1)).masked_fill((age < 0) | (age >= 6), 0.0)
            return super().forward(z, pair, veil + made)

    lens = Far().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lens.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    model = Tube(lens)
    calls, _ = record_calls(model, torch.zeros(2, S, dtype=torch.int64))
    found = site_of(calls, "lens", model.config)
    assert proven(found, propose_attention(found))[0] == []
    (candidate,) = propose_relative_attention(found)
    holding, objections = proven(found, [candidate])
    assert holding, objections
    arguments = candidate.spec(found.module, found.config).arguments
    assert (arguments["relative_dim"], arguments["extent"]) == (4, 6)
