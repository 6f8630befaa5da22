"""A family's checkpoint under other names: classes, functions, modules, tensors and model_type by a random dictionary.

    folder, words = renamed("mixtral", tmp_path, seed=3)

What comes out is a checkpoint with its own code: transformers' modeling and configuration files, every name of theirs
replaced. Its tensors lie under the new names of the modules themselves, since no table of transformers knows it. Names
that belong to others stay: those of torch, of the base classes, and the fields of config.json.
"""

import ast
import inspect
import io
import json
import random
import re
import sys
import tokenize
from pathlib import Path
from typing import Any

import torch
from zoo import families

_NOT_OURS = {"torch", "F", "nn", "functional", "config", "cache", "past_key_values", "math", "init", "cache_params"}
_OF_TORCH = {"weight", "bias", "forward", "training"}


def renamed(family: str, folder: Path, seed: int) -> tuple[Path, dict[str, str]]:
    """The checkpoint's folder, and old name -> new name."""
    from safetensors.torch import save_file

    from dayzero.onboard.oracle import remote_code
    from dayzero.onboard.oracle.reference import build, on_disk, redraw

    config = families.config(family)
    cls = families.model_class(family)
    modeling = sys.modules[cls.__module__]
    configuration = sys.modules[cls.config_class.__module__]  # type: ignore[attr-defined]
    original, _ = build(config, device="meta")
    classes = {name for module in (modeling, configuration) for name in _defined(inspect.getsource(module))}
    modules = {part for name, _ in original.named_modules() for part in name.split(".")}
    tensors = {name.rpartition(".")[2] for name, _ in (*original.named_parameters(), *original.named_buffers())}
    attributes = {name for name in modules | tensors if name and not name.isdigit()} - _OF_TORCH
    attributes = {name for name in attributes if not hasattr(torch.Tensor, name) and name not in classes}
    words = _dictionary(sorted(classes), sorted(attributes), config["model_type"], random.Random(seed))

    folder.mkdir(parents=True, exist_ok=True)
    home = cls.__module__.rpartition(".")[0]
    files = {"configuration": configuration, "modeling": modeling}
    for name, module in files.items():
        (folder / f"{name}_{words[config['model_type']]}.py").write_text(
            _rewritten(inspect.getsource(module), words, classes, attributes, home, module is modeling)
        )
    kind = words[config["model_type"]]
    config["model_type"] = kind
    config["architectures"] = [words[cls.__name__]]
    config["auto_map"] = {
        "AutoConfig": f"configuration_{kind}.{words[cls.config_class.__name__]}",  # type: ignore[attr-defined]
        "AutoModelForCausalLM": f"modeling_{kind}.{words[cls.__name__]}",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with remote_code.using(remote_code.remote_code(folder, config)):
        model, _ = build(config)
        redraw(model, torch.Generator().manual_seed(seed))
        stored = on_disk(model)
        assert len(list(model.parameters())) == len(list(original.parameters()))
    stored = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder, words


def _defined(source: str) -> list[str]:
    """Classes and functions of the file itself."""
    return [node.name for node in ast.parse(source).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]


def _dictionary(classes: list[str], attributes: list[str], model_type: str, chance: random.Random) -> dict[str, str]:
    made: dict[str, str] = {}
    for name in (*classes, *attributes, model_type):
        word = ""
        while not word or word in {held.lower() for held in made.values()}:
            word = "".join(chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") for _ in range(4))
        made[name] = word.capitalize() if name in classes and name[0].isupper() else word
    return made


def _rewritten(
    source: str, words: dict[str, str], classes: set[str], attributes: set[str], home: str, is_model: bool
) -> str:
    """The file with other names; its imports from transformers written in full."""
    source = _absolute(source, home, words)
    lines: list[tuple[int, str]] = []
    before = ["", ""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string
        if token.type == tokenize.NAME:
            is_attribute = before[1] == "." and before[0] not in _NOT_OURS
            if text in classes or (text in attributes and is_attribute):
                text = words[text]
        elif token.type == tokenize.STRING:
            text = _string(text, words, before)
        lines.append((token.type, text))
        if token.type not in {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}:
            before = [before[1], token.string]
    text = tokenize.untokenize(lines)
    if is_model and "embed_tokens" in words:
        own = re.findall(r"^class (\w+) *\(.*PreTrainedModel", text, re.M)
        text += "".join(f"\n{name}._input_embed_layer = {words['embed_tokens']!r}\n" for name in own)
    return text


def _string(text: str, words: dict[str, str], before: list[str]) -> str:
    """A literal: dotted paths, patterns of names, and the name of the inner model, by their components."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    if not isinstance(value, str) or "\n" in value or " " in value:
        return text
    if "." not in value and before not in (["base_model_prefix", "="], ["force_accelerate_hooks", "("]):
        return repr(words[value]) if value in words and "model_type" in before else text
    return repr(".".join(words.get(part, part) for part in value.split(".")))


def _absolute(source: str, home: str, words: dict[str, str]) -> str:
    """Relative imports: of the configuration file beside it, by its new name; of the rest of transformers, in full."""
    parts = home.split(".")

    def full(match: re.Match[str]) -> str:
        dots, rest = len(match[1]), match[2]
        if dots == 1 and rest.startswith("configuration_"):
            return f"from .configuration_{words[parts[-1]] if parts[-1] in words else words[rest[14:]]} import"
        base = ".".join(parts[: len(parts) - dots + 1])
        return f"from {base}{'.' if rest else ''}{rest} import"

    return re.sub(r"^from (\.+)([\w.]*) import", full, source, flags=re.M)


def proven(spec: Any) -> Any:
    """What a specification claims, without the names of the reference: blocks, arguments and wiring of every layer."""
    data = spec.model_dump(mode="json", exclude={"rules", "name", "checkpoint"})

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(held) for key, held in value.items() if key != "proof"}
        return [bare(held) for held in value] if isinstance(value, list) else value

    return bare(data)
