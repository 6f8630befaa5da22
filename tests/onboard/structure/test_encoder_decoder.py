"""Encoder-decoders: both stacks are found by what flows, proven on our blocks and put together; almost right is not."""

import functools

import pytest
import torch
from odd_specs import NO_CHECKPOINT
from zoo import families

from dayzero.onboard.candidates import site_of
from dayzero.onboard.candidates.positions import on_ids, propose_positions, with_first_ids
from dayzero.onboard.composition import load_reference, specification_of
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import TOLERANCE, prove, relative_error
from dayzero.onboard.prove.model import prove_model
from dayzero.onboard.shrink.layers import encoder_signatures, kind_of, layer_list, layer_signatures
from dayzero.onboard.shrink.shrink import shrink_model
from dayzero.onboard.structure.discover import discover
from dayzero.onboard.structure.encoder import by_stack
from dayzero.runtime.nn.distance_bias import BIAS

IDS = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(1))


def model_of(family, **changes):
    model, _ = reference.build({**families.config(family), **changes})
    reference.redraw(model, torch.Generator().manual_seed(0))
    return model


@functools.cache
def proven(family):
    model = model_of(family)
    return model, prove_model(model, IDS, torch.Generator().manual_seed(2))[0]


def blocks(layer):
    return [f"{part.unit.name} {part.attempt.candidate.block}" for part in layer.parts if "norm" not in part.unit.name]


def site_in(family, path, change=lambda module: None):
    model = model_of(family)
    change(model.get_submodule(path))
    calls, _ = record_calls(model, IDS)
    return site_of(calls, path, reference.text_config(model))


def test_both_stacks_are_found():
    parts = discover(model_of("nllb_moe"), IDS)
    assert (parts.embed, parts.layers, parts.positions) == (
        "model.decoder.embed_tokens",
        "model.decoder.layers",
        "model.decoder.embed_positions",
    )
    encoder = parts.encoder
    assert (encoder.embed, encoder.layers, encoder.count, encoder.norm, encoder.positions) == (
        "model.encoder.embed_tokens",
        "model.encoder.layers",
        2,
        "model.encoder.layer_norm",
        "model.encoder.embed_positions",
    )
    assert encoder.embed_scale == pytest.approx(80**0.5, rel=1e-10)
    assert discover(model_of("mixtral"), IDS).encoder is None


@pytest.mark.slow
def test_layers_of_both_stacks_are_proven_and_their_experts_are_ours():
    model, made = proven("switch_transformers")
    dense, routed = made.layers
    assert blocks(dense) == ["mixer DistanceBiasedAttention", "cross CrossAttention", "ffn FeedForward"]
    assert blocks(routed) == ["mixer DistanceBiasedAttention", "cross CrossAttention", "ffn MixtureOfExperts"]
    assert [blocks(layer)[-1] for layer in made.encoder.layers] == ["ffn FeedForward", "ffn MixtureOfExperts"]
    assert made.contradictions == {}
    spec = specification_of(model, reference.text_config(model), made, [0, 1], NO_CHECKPOINT, "x")
    own, later = (layer.blocks["mixer"].arguments for layer in spec.stacks()["encoder.layers"])
    assert (own["buckets"], own["max_distance"], own["both_ways"]) == (32, 128, True)
    assert "buckets" not in later
    assert not later["attention"].arguments["causal"]
    ours = spec.build().double()
    load_reference(ours, model, made)
    with torch.no_grad():
        got = ours(IDS.flatten(), torch.tensor([0, 24, 48])).view(2, 24, -1)
        assert relative_error(got, reference.run(model, IDS)) <= TOLERANCE


@pytest.mark.slow
def test_experts_that_contradict_their_router_are_copied_and_told_of():
    model, made = proven("nllb_moe")
    assert [blocks(layer)[-1] for layer in made.layers] == ["ffn FeedForward", "ffn Lifted"]
    assert made.contradictions.keys() == {"model.decoder.layers.1.ffn", "model.encoder.layers.1.ffn"}
    assert all("the reference contradicts itself" in said for said in made.contradictions.values())
    spec = specification_of(model, reference.text_config(model), made, [0, 1], NO_CHECKPOINT, "x")
    whys = [block.proof.why for block in spec.blocks() if block.proof and block.proof.status == "lifted"]
    assert sorted(whys) == sorted(made.contradictions.values())
    assert spec.positions.arguments == spec.encoder.positions.arguments
    assert {"width": 80, "first": 1, "padding": 0}.items() <= spec.positions.arguments.items()


def test_an_untied_encoder_has_an_embedding_of_its_own():
    model = model_of("switch_transformers", tie_word_embeddings=False)
    parts = discover(model, IDS)
    embeds = [model.get_submodule(path).weight for path in (parts.embed, parts.encoder.embed)]
    assert embeds[0] is not embeds[1]
    assert parts.logits.scale == 1.0


def scaled(name, factor):
    def change(module):
        plain = getattr(module, name)
        setattr(module, name, lambda *args, **kwargs: plain(*args, **kwargs) * factor)

    return change


BIASED, CROSS = "decoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention"


def test_a_bias_that_an_earlier_layer_made_is_taken_as_it_is():
    site = site_in("switch_transformers", "decoder.block.1.layer.0.SelfAttention")
    assert site.context.shared[BIAS].shape == (47, 8)
    (best, *_) = prove("mixer", site, torch.Generator().manual_seed(2)).survivors
    assert "buckets" not in best.candidate.arguments


@pytest.mark.parametrize("factor", [1 + 1e-6, 2.0])
def test_another_bias_is_not_proven(factor):
    site = site_in("switch_transformers", BIASED, scaled("compute_bias", factor))
    assert not prove("mixer", site, torch.Generator().manual_seed(2)).survivors
    site = site_in("switch_transformers", BIASED)
    assert prove("mixer", site, torch.Generator().manual_seed(2)).survivors


def test_attention_to_the_encoder_is_proven_and_another_is_not():
    site = site_in("switch_transformers", CROSS)
    (best, *_) = prove("cross", site, torch.Generator().manual_seed(2)).survivors
    spec = best.candidate.spec(site.module, site.config)
    assert (spec.arguments["heads"], spec.arguments["head_dim"], spec.arguments["scale"]) == (8, 12, 1.0)

    def beside(module):
        plain = module.k.forward
        module.k.forward = lambda x: plain(x) + 1e-6 * x.mean(1, keepdim=True)[..., :1]

    assert not prove("cross", site_in("switch_transformers", CROSS, beside), torch.Generator()).survivors


def test_positions_follow_their_module_or_are_none():
    model = model_of("nllb_moe", pad_token_id=1)
    calls, _ = record_calls(model, IDS)
    call = calls["model.decoder.embed_positions"]
    found = propose_positions(call, IDS, model.config)
    assert found.spec(call.module, model.config).arguments == {"width": 80, "base": 10000.0, "first": 2, "padding": 1}
    # Text has no padding: only ids that are named as such tell a block that counts it from one that does not.
    counting = found.spec(call.module, model.config).build()
    counting.padding = None
    for ids, apart in ((IDS, False), (with_first_ids(IDS), True)):
        ours, theirs = on_ids(counting, call, IDS, ids)
        assert (relative_error(ours, theirs) > 0.1) is apart
    call.module.weights[7, 3] += 1e-6
    assert propose_positions(call, IDS, model.config) is None


def test_parameters_of_both_stacks_are_told_apart():
    named = dict.fromkeys(["layers.0.a", "encoder.layers.0.a", "encoder.norm.weight", "embed.weight"], 1)
    rest, inside = by_stack(named)
    assert list(rest) == ["layers.0.a", "encoder.norm.weight", "embed.weight"]
    assert list(inside) == ["layers.0.a"]


@pytest.mark.parametrize(("encoder", "decoder"), [(12, 12), (6, 4)])
def test_a_small_model_has_all_kinds_of_layers_of_both(encoder, decoder):
    counts = {"num_layers": encoder, "num_decoder_layers": decoder}
    counts |= {"num_sparse_encoder_layers": encoder // 2, "num_sparse_decoder_layers": decoder // 2}
    config = {**families.config("switch_transformers"), **counts}
    cut = shrink_model(config)
    real, small = (reference.build(held, device="meta")[0] for held in (config, cut.config))
    for signatures in (encoder_signatures, layer_signatures):
        assert {kind_of(s) for s in signatures(real)} == {kind_of(s) for s in signatures(small)}
    assert len(layer_list(small)) < decoder
    assert len(cut.follows) == decoder
