"""Tiny checkpoints onboarded once a process, in process, for every test that looks at the result.

made = onboarded.get("mixtral")                  # a family of tests/tiny.py
made = onboarded.get("mixtral, window")          # a key of VARIANTS: the same family with other config values
"""

import atexit
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tiny
import torch

from dayzero.onboard.agent import Outcome, Run, execute

VARIANTS = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, gelu_pytorch_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, no grouped heads": ("llama", {"num_key_value_heads": 4}),
    "llama, bfloat16 in shards": ("llama", {"dtype": torch.bfloat16, "max_shard_size": "20KB"}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, two kinds of layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mixtral, window": ("mixtral", {"sliding_window": 5}),
    "mixtral, one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral, bfloat16 in shards": ("mixtral", {"dtype": torch.bfloat16, "max_shard_size": "20KB"}),
    "qwen3_moe, one expert a token": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_moe, attention bias": ("qwen3_moe", {"attention_bias": True}),
    "olmoe, clip": ("olmoe", {"clip_qkv": 0.5}),
    "olmoe, weights that sum to one": ("olmoe", {"norm_topk_prob": True}),
    "olmoe, no grouped heads": ("olmoe", {"num_key_value_heads": 4}),
}


@dataclass(frozen=True)
class Onboarded:
    """checkpoint, package: folders. outcome: what the run said."""

    checkpoint: Path
    package: Path
    outcome: Outcome


@functools.cache
def scratch() -> Path:
    """A folder that lives as long as the process."""
    held = tempfile.TemporaryDirectory()
    atexit.register(held.cleanup)
    return Path(held.name)


@functools.cache
def checkpoint(name: str) -> Path:
    """The checkpoint folder of a family or a variant. Shared: copy it before changing anything."""
    family, settings = VARIANTS.get(name, (name, {}))
    return tiny.make(family, scratch() / "checkpoints" / name.replace(", ", "_").replace(" ", "_"), **settings)


@functools.cache
def get(name: str, *, align: bool = False) -> Onboarded:
    """The package of a family or a variant. align: with the ladder, as `onboard PATH`; else as `onboard generate`."""
    source = checkpoint(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = Run(source, scratch() / ("aligned" if align else "generated"), source.name, 8, 64.0, align)
        outcome = list(execute(run))[-1]
    finally:
        torch.set_num_threads(threads)
    assert isinstance(outcome, Outcome)
    assert not outcome.unproven, outcome.unproven
    return Onboarded(source, outcome.package, outcome)
