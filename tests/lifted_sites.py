"""Modules of the conformance field's layers, lifted and held against themselves.

for name, verdict in lifted_sites.verdicts("mixtral"):      # "" where the copy is proven, else why not
"""

from collections.abc import Iterator

import torch
from torch import nn
from zoo import families

from dayzero.onboard.candidates.evidence import Site, site_of
from dayzero.onboard.lift.lifting import prove_lifted
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls

_KEPT: list[nn.Module] = []  # a module alone does not keep its model, whose other layers are looked at too


def sites(family: str, depth: int = 1) -> Iterator[tuple[str, Site]]:
    """(path, site) of one of each kind of layer and of their modules, `depth` levels down."""
    model, _ = reference.build(families.config(family))
    _KEPT.append(model)
    reference.redraw(model, torch.Generator().manual_seed(0))
    ids = torch.randint(3, 190, (2, families.SEQUENCE), generator=torch.Generator().manual_seed(0))
    calls, _ = record_calls(model, ids)
    text = reference.text_model(model)
    lists = [module for module in text.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda held: sum(parameter.numel() for parameter in held.parameters()))
    prefix = next(path for path, module in model.named_modules() if module is layers)
    seen = set()
    for path, call in calls.items():
        below = path.removeprefix(f"{prefix}.")
        own = not type(call.module).__module__.startswith(("torch.", "transformers.activations"))
        if not path.startswith(f"{prefix}.") or below.count(".") > depth or not own or not call.has_stream:
            continue
        kind = (type(call.module), tuple(name for name, _ in call.module.named_parameters()))
        if kind not in seen:
            seen.add(kind)
            yield path, site_of(calls, path, reference.text_config(model))


def verdicts(family: str) -> Iterator[tuple[str, str]]:
    """(path and class, why the copy is not proven or "") for each of them."""
    for path, site in sites(family):
        proven, _, why = prove_lifted(site, {}, torch.Generator().manual_seed(0))
        yield f"{path} {type(site.module).__name__}", "" if proven is not None else why
