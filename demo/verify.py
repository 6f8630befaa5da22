"""Loads what was exported in transformers and in peft, and compares their logits with ours.

python demo/verify.py PACKAGE RUN EXPORT ADAPTER HELD_OUT
"""

import json
import sys
import warnings
from pathlib import Path

import torch

from dayzero.runtime import checkpointing
from dayzero.runtime.data import load_tokenizer, read_examples
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.lora import LoRALinear, apply_lora
from dayzero.runtime.nn import CausalLM
from dayzero.runtime.package import load_package

TOLERANCE = 1e-5  # float32, relative


def main(package: Path, run: Path, export: Path, adapter: Path, held_out: Path) -> None:
    """Raises SystemExit where a figure is out of bounds."""
    warnings.filterwarnings("ignore")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = load_package(package).checkpoint
    assert source is not None
    theirs, info = AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    keys = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    counts = ", ".join(f"{len(names)} {kind.replace('_', ' ')}" for kind, names in keys.items())
    print(f"transformers loads the export: {counts}")
    if any(keys.values()):
        sys.exit(f"error: {keys}")
    before, after = read_headers(source), read_headers(export)
    if {n: (h.dtype, h.shape) for n, h in before.items()} != {n: (h.dtype, h.shape) for n, h in after.items()}:
        sys.exit("error: names, shapes or dtypes of the export differ from the source's")
    print(f"its {len(after)} tensors have the source's names, shapes and dtypes")
    examples = read_examples(held_out, load_tokenizer(source), max_length=128)
    ids = torch.tensor(examples[0].ids)
    compare("exported model", logits(ours(package, export), ids), theirs(input_ids=ids[None]).logits[0])
    tokenizer = AutoTokenizer.from_pretrained(export)
    question = json.loads(held_out.read_text().splitlines()[0])["messages"][0]
    answer(theirs, tokenizer, question)
    del theirs

    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    wrapped = PeftModel.from_pretrained(base, adapter)
    compare("adapter in peft", logits(ours(package, source, run), ids), wrapped(input_ids=ids[None]).logits[0])


def ours(package: Path, weights: Path, run: Path | None = None) -> CausalLM:
    """Our generated model in float32, with the weights of a checkpoint and the adapters of a run."""
    made = load_package(package)
    with torch.device("meta"):
        model = made.build()
    adapters: dict[str, torch.Tensor] = {}
    if run is not None:
        settings = json.loads((run / "run.json").read_text())["config"]["lora"]
        apply_lora(model, settings["rank"], settings["alpha"], targets=settings["targets"])
        newest = checkpointing.latest(run)
        assert newest is not None
        adapters = dict(checkpointing.load_full(newest))
    model.to_empty(device="cpu")
    load_checkpoint(model, made.rules, weights, read_headers(weights), elsewhere=adapters.keys())
    with torch.no_grad():
        for name, value in adapters.items():
            model.get_parameter(name).copy_(value)
    assert not adapters or any(isinstance(module, LoRALinear) for module in model.modules())
    return model.eval()


@torch.no_grad()
def logits(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] for one document."""
    return model(ids, torch.tensor([0, len(ids)]))


@torch.no_grad()
def compare(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Prints the relative difference. Exits where it is not small."""
    error = float((mine - theirs).norm() / theirs.norm())
    print(f"{what}: logits differ from ours by {error:.1e} (at most {TOLERANCE:.0e})")
    if not error <= TOLERANCE:
        sys.exit(f"error: {what} gives other logits than ours")


@torch.no_grad()
def answer(model, tokenizer, message: dict) -> None:
    """What the trained model says to a held-out question."""
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(out[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"asked:    {message['content']}\nanswered: {' '.join(text.split())}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
