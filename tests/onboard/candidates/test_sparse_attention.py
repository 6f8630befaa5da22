"""Latent and sparse attention of references are proven, with what each layer takes from an earlier one."""

import functools
from dataclasses import replace

import pytest
import torch
from zoo import families

from dayzero.onboard.candidates import Candidate, site_of
from dayzero.onboard.candidates.evidence import literal
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import attempt, prove
from dayzero.onboard.structure.left import left_by_earlier
from dayzero.runtime.nn.selected_attention import SELECTED

# family, module, block, arguments that must have been found; "indexer.x" is an argument of the block inside.
PROVEN = [
    ("deepseek_v2", "layers.0.self_attn", "LatentAttention", {"query_rank": 44, "rotary": "interleaved"}),
    ("kimi_linear", "layers.3.self_attn", "LatentAttention", {"rotary": None, "rope_dim": 8}),
    ("longcat_flash", "layers.0.self_attn.0", "LatentAttention", {"query_scale": (80 / 44) ** 0.5}),
    ("bailing_hybrid", "layers.1.self_attn", "LatentAttention", {"gate": "head"}),
    ("mistral4", "layers.0.self_attn", "LatentAttention", {"position_scale": 0.1}),
    ("axk2", "layers.0.self_attn", "LatentAttention", {"query_from": "both", "gate": "element", "gate_from": "query"}),
    ("dots3_note", "layers.0.self_attn", "LatentAttention", {"window": 7, "gate": "head"}),
    ("deepseek_v32", "layers.0.self_attn", "LatentAttention", {"indexer.top_k": 9, "indexer.rotary": "half"}),
    ("glm_moe_dsa", "layers.0.self_attn", "LatentAttention", {"indexer.top_k": 9, "indexer.rotary": "interleaved"}),
    ("glm_moe_dsa", "layers.2.self_attn", "LatentAttention", {"selection_from_earlier": True}),
    ("hy_v4", "layers.0.self_attn", "LatentAttention", {"sinks": True, "rotary": "half", "indexer.rotary_at": "last"}),
    ("glm5_next", "layers.2.self_attn", "LatentAttention", {"indexer.block": "PooledIndexer", "indexer.tail": True}),
    ("mistral_large4", "layers.1.self_attn", "LatentAttention", {"leaves": "rope", "rotary": "deinterleaved"}),
    ("mistral_large4", "layers.2.self_attn", "LatentAttention", {"takes": "rope", "selection_from_earlier": True}),
    ("minimax_m3_vl", "layers.1.self_attn", "IndexedAttention", {"indexer.block": "BlockIndexer", "indexer.local": 1}),
    ("deepseek_v4", "layers.0.self_attn", "CompressedAttention", {"window": 7, "sinks": True}),
    ("deepseek_v4", "layers.1.self_attn", "CompressedAttention", {"indexer.top_k": 5}),
]


@functools.cache
def calls_of(family, **changes):
    config = families.config(family)
    config.get("text_config", config).update(changes)
    model, _ = reference.build(config)
    reference.redraw(model, torch.Generator().manual_seed(0))
    text = model.config.get_text_config()  # type: ignore[operator]
    ids = torch.randint(3, 190, (2, families.SEQUENCE), generator=torch.Generator().manual_seed(0))
    return record_calls(model, ids)[0], text


def site(family, path, **changes):
    calls, text = calls_of(family, **changes)
    return site_of(calls, next(name for name in calls if name.endswith(path)), text)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "path", "block", "wanted"), PROVEN)
def test_is_proven(family, path, block, wanted):
    here = site(family, path)
    verdict = prove("mixer", here, torch.Generator().manual_seed(0))
    assert verdict.survivors, [a.objection for a in verdict.attempts[:3]]
    best = verdict.survivors[0]
    assert best.error < 1e-10
    spec = best.candidate.spec(here.module, here.config)
    assert spec.block == block
    found = dict(spec.arguments)
    if found.get("indexer") is not None:
        inner = found["indexer"]
        found |= {"indexer.block": inner.block} | {f"indexer.{name}": v for name, v in inner.arguments.items()}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("path", ["layers.2.self_attn", "layers.3.self_attn"])
def test_tokens_that_nothing_is_chosen_for(path):
    """Without the tail the first token of a document sees no complete pool: the reference then averages all values."""
    here = site("glm5_next", path, index_kpool_always_select_tail=False)
    best = prove("mixer", here, torch.Generator().manual_seed(0)).survivors[0].candidate
    assert best.spec(here.module, here.config).arguments["unseeing"] == "all"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "argument", "value"),
    [
        ("deepseek_v32", "top_k", 8),
        ("deepseek_v32", "rotary", "interleaved"),
        ("deepseek_v32", "rotary_at", "last"),
        ("hy_v4", "rotary_at", "first"),
        ("glm5_next", "tail", False),
        ("minimax_m3_vl", "local", 2),
        ("minimax_m3_vl", "norm_offset", 0.0),
        ("deepseek_v4", "top_k", 4),
    ],
)
def test_an_indexer_that_chooses_otherwise_is_not(family, argument, value):
    path = {
        "glm5_next": "layers.2.self_attn",
        "minimax_m3_vl": "layers.1.self_attn",
        "deepseek_v4": "layers.1.self_attn",
    }
    here = site(family, path.get(family, "layers.0.self_attn"))
    best = prove("mixer", here, torch.Generator().manual_seed(0)).survivors[0].candidate
    indexer = best.arguments["indexer"]
    assert isinstance(indexer, Candidate)
    other = replace(indexer, arguments={**indexer.arguments, argument: literal(value, "changed")})
    mutant = replace(best, arguments={**best.arguments, "indexer": other})
    changed = attempt(mutant, here, torch.Generator().manual_seed(0), thorough=True)
    assert not changed.proven
    assert changed.error > 1e-4


def test_a_layer_is_handed_the_selection_that_an_earlier_one_made():
    calls, _ = calls_of("glm_moe_dsa")
    by_path = {path.split("layers.")[1]: call for path, call in calls.items() if path.endswith("self_attn")}
    handed = left_by_earlier(by_path["2.self_attn"])[SELECTED]
    assert handed.shape == (48, 1, 9)
    made = next(call for path, call in calls.items() if path.endswith("layers.1.self_attn.indexer")).output
    assert torch.equal(handed, made.reshape(48, 1, 9).long())
    assert SELECTED not in left_by_earlier(by_path["0.self_attn"])
