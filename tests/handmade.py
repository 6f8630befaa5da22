"""Packages written by hand for tiny Mixtral and Qwen3-MoE checkpoints: the runtime's tests need no onboarding.

package = handmade.write(tiny.make("mixtral", tmp_path / "checkpoint"), tmp_path / "package")
"""

import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path

from routed import routed

from dayzero.runtime.headers import headers_sha256, read_headers
from dayzero.runtime.spec import BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec, RuleSpec, SourceSpec

MODEL = '''"""Written by tests/handmade.py."""
from pathlib import Path

from dayzero.runtime.spec import ModelSpec

SPEC = ModelSpec.model_validate_json((Path(__file__).parent / "spec.json").read_text())


def build():
    return SPEC.build()
'''
WEIGHTS = MODEL.partition("\n\ndef build")[0] + "RULES = [rule.build() for rule in SPEC.rules]\n"
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
NAMES = {
    "mixtral": ("block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"}),
    "qwen3_moe": ("mlp", {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"}),
}


def write(checkpoint: Path, folder: Path) -> Path:
    """Writes the package of `checkpoint`, which tests/tiny.py made, to `folder` and returns it."""
    return write_package(specify(checkpoint), checkpoint, folder)


def write_package(spec: ModelSpec, checkpoint: Path, folder: Path) -> Path:
    """The same for any checkpoint, by its specification."""
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.model_dump_json(indent=1))
    (folder / "model.py").write_text(MODEL)
    (folder / "weights.py").write_text(WEIGHTS)
    (folder / "checkpoint").symlink_to(checkpoint.resolve(), target_is_directory=True)
    return folder


def specify(checkpoint: Path) -> ModelSpec:
    """The specification, read off config.json with the knowledge of one who knows the two families."""
    text = (checkpoint / "config.json").read_text()
    config, headers = json.loads(text), read_headers(checkpoint)
    hidden, eps, layers = config["hidden_size"], config["rms_norm_eps"], config["num_hidden_layers"]
    qwen = config["model_type"] == "qwen3_moe"
    norm = _block("RMSNorm", width=hidden, eps=eps)
    attention = _block(
        "GroupedQueryAttention",
        hidden=hidden,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        scale=config["head_dim"] ** -0.5,
        **({"qk_norm": "head", "qk_norm_eps": eps} if qwen else {}),
    )
    experts = routed(
        hidden,
        config["num_local_experts"],
        config["num_experts_per_tok"],
        config["moe_intermediate_size" if qwen else "intermediate_size"],
        config.get("norm_topk_prob", True),
    )
    dense = _block("GatedFeedForward", hidden=hidden, width=config["intermediate_size"], act="silu")
    kinds = [LayerKind.pre_norm(norm, attention, norm, ffn) for ffn in (experts, dense)]
    kind_of_layer = [int(layer in config.get("mlp_only_layers", [])) for layer in range(layers)]
    runs, first = [], 0
    for kind, run in itertools.groupby(kind_of_layer):
        runs.append(LayerRun(first=first, count=len(list(run)), kind=kind))
        first += runs[-1].count
    return ModelSpec(
        name=config["model_type"],
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
        rotaries=[_block("Rotary", dim=config["head_dim"], theta=config["rope_parameters"]["rope_theta"])],
        layer_kinds=kinds,
        layers=runs,
        norm=norm,
        max_positions=config["max_position_embeddings"],
        rules=_rules(config["model_type"], layers, runs, config["num_local_experts"], config["tie_word_embeddings"]),
    )


def _block(block: str, **arguments) -> BlockSpec:
    return BlockSpec(block=block, arguments=arguments)


def _rules(family: str, layers: int, runs: list[LayerRun], experts: int, tied: bool) -> list[RuleSpec]:
    prefix, every = "model.layers.{layer}.", {"layer": (0, layers)}
    ffn, parts = NAMES[family]
    rules = [_rule("embed.weight", "model.embed_tokens.weight"), _rule("norm.weight", "model.norm.weight")]
    if not tied:
        rules.append(_rule("head.weight", "lm_head.weight"))
    names = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"mixer.{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()}
    if family == "qwen3_moe":
        names |= {"mixer.query_norm": "self_attn.q_norm", "mixer.key_norm": "self_attn.k_norm"}
    for ours, theirs in names.items():
        rules.append(_rule(f"layers.{{layer}}.{ours}.weight", f"{prefix}{theirs}.weight", every))
    for run in runs:
        ranges = {"layer": (run.first, run.first + run.count)}
        if run.kind == 1:
            for ours, theirs in parts.items():
                rules.append(_rule(f"layers.{{layer}}.ffn.{ours}.weight", f"{prefix}{ffn}.{theirs}.weight", ranges))
            continue
        stored = {
            part: SourceSpec(op="stored", name=f"{prefix}{ffn}.experts.{{expert}}.{name}.weight")
            for part, name in parts.items()
        }
        joined = SourceSpec(op="concat", dim=0, parts=[stored["gate"], stored["up"]])
        rules.append(_rule("layers.{layer}.ffn.router.weight", f"{prefix}{ffn}.gate.weight", ranges))
        for parameter, part in (("gate_up", joined), ("down", stored["down"])):
            source = SourceSpec(op="stack", over="expert", count=experts, parts=[part])
            rules.append(RuleSpec(parameter=f"layers.{{layer}}.ffn.experts.{parameter}", source=source, ranges=ranges))
    return rules


def _rule(parameter: str, name: str, ranges: dict[str, tuple[int, int]] | None = None) -> RuleSpec:
    return RuleSpec(parameter=parameter, source=SourceSpec(op="stored", name=name), ranges=ranges or {})
