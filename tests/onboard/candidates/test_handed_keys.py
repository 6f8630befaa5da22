"""Attention that leaves its keys and values for a later layer, and attention that takes them, by what is handed."""

from types import SimpleNamespace

import pytest
import torch
from strange import Ledge
from torch import nn

from dayzero.onboard.candidates import site_of
from dayzero.onboard.candidates.evidence import Candidate, literal
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import attempt, prove
from dayzero.onboard.structure.token_mixing import mixes_tokens

H, N, G, D, S = 20, 4, 2, 6, 9


class Look(nn.Module):
    """name: under which keys and values are left, or found where `own` is False."""

    def __init__(self, name, own):
        super().__init__()
        self.name, self.own, self.eye_dim, self.kv_pools = name, own, D, G
        self.aa, self.dd = nn.Linear(H, N * D, bias=False), nn.Linear(N * D, H, bias=False)
        if own:
            self.bb, self.cc = nn.Linear(H, G * D, bias=False), nn.Linear(H, G * D, bias=False)

    def forward(self, z, veil, chest):
        q = self.aa(z).unflatten(-1, (N, D)).transpose(1, 2)
        if self.own:
            chest[self.name] = tuple(f(z).unflatten(-1, (G, D)).transpose(1, 2) for f in (self.bb, self.cc))
        k, v = (part.repeat_interleave(N // G, 1) for part in chest[self.name])
        got = (q @ k.transpose(2, 3) * 0.3 + veil).softmax(-1) @ v
        return self.dd(got.transpose(1, 2).flatten(2))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Ledge(eyes=N)
        self.near, self.far, self.ask = Look("near", own=True), Look("far", own=True), Look("near", own=False)

    def forward(self, input_ids, use_cache=False):
        z = torch.randn(2, S, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        veil = torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        chest = {}
        for look in (self.near, self.far, self.ask):
            z = z + look(z, veil, chest)
        return SimpleNamespace(logits=z)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    model = Pair().double()
    return model, record_calls(model, torch.zeros(2, S, dtype=torch.int64))[0]


def test_replays_leave_what_was_handed_alone(pair):
    _, calls = pair
    chest = calls["far"].args[2]
    assert chest.keys() == {"near"}  # as it was when the module was called
    before = {name: held[0].clone() for name, held in calls["ask"].args[2].items()}
    calls["near"].replay(2 * calls["near"].hidden)
    calls["far"].replay(2 * calls["far"].hidden)
    assert chest.keys() == {"near"}
    assert all(torch.equal(held[0], before[name]) for name, held in calls["ask"].args[2].items())


@pytest.mark.parametrize("change", [{"leaves": "far"}, {"leaves": None}])
def test_a_block_that_leaves_something_else_is_refused(pair, change):
    model, calls = pair
    site, generator = site_of(calls, "near", model.config), torch.Generator().manual_seed(0)
    (right,) = (tried.candidate for tried in prove("mixer", site, generator).survivors)
    kept = {name: argument for name, argument in right.arguments.items() if name != "leaves"}
    named = {name: literal(value, "") for name, value in change.items() if value is not None}
    wrong = Candidate(right.block, kept | named, right.parameters)
    tried = attempt(wrong, site, generator, thorough=True)
    assert tried.objection == f"leaves {['far'] if named else 'nothing'} for later layers, the module ['near']"
    # Nothing may be left that the module does not leave; less may, where nobody takes it.
    assert attempt(wrong, site, generator, thorough=True, leaves_all=False).proven == (not named)


@pytest.mark.parametrize(
    ("path", "found"),
    [("near", {"leaves": "near"}), ("far", {"leaves": "far"}), ("ask", {"takes": "near"})],
)
def test_names_are_those_under_which_the_values_stand(pair, path, found):
    model, calls = pair
    assert mixes_tokens(calls[path])
    verdict = prove("mixer", site_of(calls, path, model.config), torch.Generator().manual_seed(0))
    arguments = verdict.survivors[0].candidate.spec(calls[path].module, model.config).arguments
    assert {name: arguments[name] for name in ("leaves", "takes") if name in arguments} == found
    assert (arguments["heads"], arguments["kv_heads"], arguments["head_dim"], arguments["scale"]) == (N, G, D, 0.3)
