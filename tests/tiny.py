"""Tiny random checkpoints in the format of real ones: config.json, safetensors, tokenizer with a chat template.

No two of a family's dimensions agree (heads, widths, vocabulary, also after gate and up are joined), so a transposed or
swapped weight does not fit by accident; OLMoE's query and output projections are square by definition. Hidden and feed-
forward widths are multiples of 8, as grouped matrix products in bfloat16 need.

    checkpoint = tiny.make("mixtral", tmp_path, num_hidden_layers=2, dtype=torch.bfloat16)
"""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).parents[1]
VOCABULARY = 307

_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {**_SHAPE, **_HEADS, "intermediate_size": 56},
    "qwen3": {**_SHAPE, **_HEADS, "intermediate_size": 56},
    "mixtral": {**_SHAPE, **_HEADS, **_EXPERTS, "intermediate_size": 32},
    "qwen3_moe": {
        **_SHAPE,
        **_HEADS,
        **_EXPERTS,
        "intermediate_size": 56,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "olmoe": {**_SHAPE, **_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32},
}


@functools.cache
def load(path: str) -> ModuleType:
    """A script of the repository as a module, e.g. load("demo/checkpoint.py"): the root is not on sys.path."""
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    tokenizer: bool = True,
    seed: int = 0,
    **config,
) -> Path:
    """Writes a random checkpoint of `family` (a key of FAMILIES) to `folder` and returns it.

    config: fields over the family's own, e.g. num_hidden_layers=2. Matrices are N(0, 1/columns); norms are around 1 and
    biases around 0, with a standard deviation of 0.2. max_shard_size="40KB" gives several files and an index.
    A vocabulary under 260 has no room for the tokenizer: pass tokenizer=False.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = config.get("vocab_size", VOCABULARY)
    tokens = load("demo/checkpoint.py").tiny_tokenizer(min(vocabulary, VOCABULARY)) if tokenizer else None
    special = {f"{name}_token_id": getattr(tokens, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    settings = AutoConfig.for_model(family, **{**FAMILIES[family], **special, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight.add_(torch.randn_like(weight), alpha=0.2)
                else:
                    weight.normal_(std=weight.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokens:
        tokens.save_pretrained(folder)
    return Path(folder)
