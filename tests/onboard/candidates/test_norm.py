"""Whether a norm rounds before its weight multiplies no float64 tells: our block does as the casts of the reference."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dayzero.onboard.candidates.evidence import Site
from dayzero.onboard.oracle.calls import Call
from dayzero.onboard.prove.block import prove


class Norm(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.weight, self.form, self.eps = nn.Parameter(torch.randn(48)), form, 1e-5

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.form == "rounded, then weighed":
            return self.weight * wide.to(x.dtype)
        if self.form == "weighed, then rounded":
            return (self.weight * wide).to(x.dtype)
        return (wide * (1.0 + self.weight.to(torch.float32))).to(x.dtype)


@pytest.mark.parametrize("form", ["rounded, then weighed", "weighed, then rounded", "weighed by one more"])
def test_the_weight_multiplies_where_the_reference_has_it(form):
    torch.manual_seed(0)
    module, x = Norm(form).double(), torch.randn(2, 24, 48, dtype=torch.float64)
    call = Call("norm", module, (x,), {}, module(x.double()).double())
    site = Site(call, {}, SimpleNamespace(to_dict=dict))
    candidate = prove("norm", site, torch.Generator().manual_seed(1)).survivors[0].candidate
    first = form.startswith("rounded")
    assert candidate.spec(module, site.config).arguments.get("weight_after_cast", True) == first
    block = candidate.build(module, site.config)
    with torch.no_grad():
        block.weight.copy_(module.weight)
        assert torch.equal(block.bfloat16()(x.bfloat16()), module.bfloat16()(x.bfloat16()))
