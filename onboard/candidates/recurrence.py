"""Candidates for mixers that blend each token with the one before it: a decaying weighted mean, and a gated layer."""

import itertools

import torch

from dayzero.onboard.candidates.evidence import Candidate, Site, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import equal_values, vector
from dayzero.runtime.weights import Stored


def propose_time_mix(site: Site) -> list[Candidate]:
    """Three projections of blends, each with the vector that made its blend; which is which is enumerated."""
    linears = linear_calls(site)
    output = [path for path, call in linears.items() if equal_values(call.result, site.call.result)]
    blends = _blends(site)
    others = [
        name for name in _vectors(site) if name not in blends.values() and site.module.get_parameter(name).ndim == 1
    ]
    if len(output) != 1 or len(blends) != 3 or len(others) != 2 or len(linears) != 4:
        return []
    found = []
    for (key, value, receptance), (decay, bonus) in itertools.product(
        itertools.permutations(blends), itertools.permutations(others)
    ):
        roles = {"key": key, "value": value, "receptance": receptance}
        found.append(
            Candidate(
                "TimeMix",
                {"hidden": size(f"{key}.weight", 1), "width": size(f"{key}.weight", 0)},
                {f"{role}.weight": Stored(f"{path}.weight") for role, path in roles.items()}
                | {f"{role}_mix": vector(site, blends[path]) for role, path in roles.items()}
                | {"decay": Stored(decay), "bonus": Stored(bonus), "output.weight": Stored(f"{output[0]}.weight")},
            )
        )
    return found


def propose_channel_mix(site: Site) -> list[Candidate]:
    """Two projections of blends, one of which is squared and projected again."""
    linears = linear_calls(site)
    blends = _blends(site)
    if len(linears) != 3 or len(blends) != 2 or len(_vectors(site)) != 2:
        return []
    found = []
    for key, receptance in itertools.permutations(blends):
        inner = torch.relu(linears[key].result).square()
        behind = [path for path, call in linears.items() if equal_values(call.hidden, inner)]
        for value in behind:
            roles = {"key": key, "receptance": receptance}
            found.append(
                Candidate(
                    "ChannelMix",
                    {"hidden": size(f"{key}.weight", 1), "width": size(f"{key}.weight", 0)},
                    {f"{role}.weight": Stored(f"{path}.weight") for role, path in roles.items()}
                    | {f"{role}_mix": vector(site, blends[path]) for role, path in roles.items()}
                    | {"value.weight": Stored(f"{value}.weight")},
                )
            )
    return found


def _vectors(site: Site) -> list[str]:
    """Parameters of one dimension that is not 1."""
    return [name for name, p in site.module.named_parameters() if p.numel() == max(p.shape, default=0)]


def _blends(site: Site) -> dict[str, str]:
    """Linear -> the vector m for which it was fed m x_t + (1 - m) x_{t-1}, x being the module's input."""
    x = site.call.hidden
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) if x.ndim == 3 else None
    found: dict[str, str] = {}
    for path, call in linear_calls(site).items():
        for name in _vectors(site):
            mix = site.module.get_parameter(name).detach().flatten()
            if before is None or call.hidden.shape != x.shape or mix.shape != x.shape[-1:]:
                continue
            if torch.allclose(call.hidden, x * mix + before * (1 - mix), rtol=1e-12, atol=1e-13):
                found[path] = name
    return found
