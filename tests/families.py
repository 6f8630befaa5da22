"""Specifications of tiny Llama and OLMoE checkpoints, by hand; those of tests/handmade.py for its own families."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import handmade
from routed import routed

from dayzero.runtime.headers import headers_sha256, read_headers
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.spec import BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec, RuleSpec, SourceSpec
from dayzero.runtime.weights import bind


def specify(checkpoint: Path) -> ModelSpec:
    text = (checkpoint / "config.json").read_text()
    config, headers = json.loads(text), read_headers(checkpoint)
    family = config["model_type"]
    if family in handmade.NAMES:
        return handmade.specify(checkpoint)
    hidden, eps, layers = config["hidden_size"], config["rms_norm_eps"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    sparse = family == "olmoe"
    norm = _block("RMSNorm", width=hidden, eps=eps)
    attention = _block(
        "GroupedQueryAttention",
        hidden=hidden,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        **({"qk_norm": "whole", "qk_norm_eps": eps} if sparse else {}),
    )
    if sparse:
        experts, top_k = config["num_experts"], config["num_experts_per_tok"]
        ffn = routed(hidden, experts, top_k, config["intermediate_size"], config["norm_topk_prob"])
    else:
        ffn = _block("GatedFeedForward", hidden=hidden, width=config["intermediate_size"], act="silu")
    return ModelSpec(
        name=family,
        checkpoint=CheckpointId(
            architecture=config["architectures"][0],
            config_sha256=hashlib.sha256(text.encode()).hexdigest(),
            headers_sha256=headers_sha256(headers),
            tensors=len(headers),
            bytes=sum(header.bytes for header in headers.values()),
            dtypes=dict(Counter(header.dtype for header in headers.values())),
        ),
        vocabulary=config["vocab_size"],
        hidden=hidden,
        tied=config["tie_word_embeddings"],
        rotaries=[_block("Rotary", dim=head_dim, theta=config["rope_parameters"]["rope_theta"])],
        layer_kinds=[LayerKind.pre_norm(norm, attention, norm, ffn)],
        layers=[LayerRun(first=0, count=layers, kind=0)],
        norm=norm,
        rules=_rules(layers, config["num_experts"] if sparse else 0, config["tie_word_embeddings"]),
    )


def load(checkpoint: Path, spec: ModelSpec):
    """Our model with the checkpoint's weights, in their own dtype."""
    shapes = {name: header.shape for name, header in read_headers(checkpoint).items()}
    reader, rules, model = SafetensorsReader(checkpoint), bind([rule.build() for rule in spec.rules]), spec.build()
    for name, parameter in model.named_parameters():
        parameter.data = rules[name].read(reader, shapes).contiguous()
    return model


def _block(block: str, **arguments) -> BlockSpec:
    return BlockSpec(block=block, arguments=arguments)


def _rules(layers: int, experts: int, tied: bool) -> list[RuleSpec]:
    prefix, ranges = "model.layers.{layer}.", {"layer": (0, layers)}
    names = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"mixer.{ours}": f"self_attn.{theirs}" for ours, theirs in handmade.ATTENTION.items()}
    if experts:
        names |= {
            "mixer.query_norm": "self_attn.q_norm",
            "mixer.key_norm": "self_attn.k_norm",
            "ffn.router": "mlp.gate",
        }
    else:
        names |= {f"ffn.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    rules = [_stored("embed.weight", "model.embed_tokens.weight"), _stored("norm.weight", "model.norm.weight")]
    if not tied:
        rules.append(_stored("head.weight", "lm_head.weight"))
    for ours, theirs in names.items():
        rules.append(_stored(f"layers.{{layer}}.{ours}.weight", f"{prefix}{theirs}.weight", ranges))
    if experts:
        gate, up, down = (
            SourceSpec(op="stored", name=f"{prefix}mlp.experts.{{expert}}.{part}_proj.weight")
            for part in ("gate", "up", "down")
        )
        for ours, part in (("gate_up", SourceSpec(op="concat", dim=0, parts=[gate, up])), ("down", down)):
            stack = SourceSpec(op="stack", over="expert", count=experts, parts=[part])
            rules.append(RuleSpec(parameter=f"layers.{{layer}}.ffn.experts.{ours}", source=stack, ranges=ranges))
    return rules


def _stored(parameter: str, name: str, ranges: dict[str, tuple[int, int]] | None = None) -> RuleSpec:
    return RuleSpec(parameter=parameter, source=SourceSpec(op="stored", name=name), ranges=ranges or {})
