"""Names do not matter: a family under other names is proven with the same blocks, from its own code; and nothing in the
source decides by the name of a model."""

import ast
import re
from pathlib import Path
from unittest import mock

import pytest
from zoo import families
from zoo.mutants import specified
from zoo.renamed import proven, renamed

from dayzero.onboard import specify
from dayzero.onboard.align.climb import climb
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.oracle import remote_code
from dayzero.onboard.specify_checkpoint import specify_checkpoint

ROOT = Path(__file__).parents[2]
TEN = [
    "mixtral", "mamba2", "deepseek_v3", "cohere2_moe", "granitemoe", "qwen2_moe", "olmoe", "gpt_oss", "lfm2_moe",
    "kimi_linear",
]  # fmt: skip

# Names in transformers' registry that say something else here.
ALLOWED = {
    "align", "bit", "clip", "git",  # plain words: the ladder's command, bits, a limit of values, version control
    "mamba", "mamba2",  # blocks of runtime/nn, named as their papers name the method (arXiv:2312.00752, 2405.21060)
    "vit",  # a word of tensor names that describes a vision tower in `onboard inspect`; it decides nothing
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name if name in TEN[:2] else pytest.param(name, marks=pytest.mark.zoo) for name in TEN]
)
def test_a_family_under_other_names_is_proven_with_the_same_blocks(family, tmp_path):
    folder, words = renamed(family, tmp_path / "checkpoint", seed=TEN.index(family))
    checkpoint = read_checkpoint(folder)
    assert family not in folder.joinpath("config.json").read_text()
    assert not any(re.search(r"attn|mlp|layernorm|embed|head", name) for name in checkpoint.headers)
    assert len(words) > 20
    with (
        remote_code.using(remote_code.remote_code(folder, checkpoint.config)),
        mock.patch.object(specify, "intervene", return_value=[]),
    ):
        specification, ledger = specify_checkpoint(checkpoint, "x", {}, lambda line: None)
        alignment = climb(checkpoint, specification, ledger, lambda line: None)
    assert alignment.verdict == "PASS", [rung.where for rung in alignment.rungs.values()]
    assert proven(specification.spec) == proven(specified(family)[1].spec)


@pytest.mark.parametrize("folder", ["onboard", "runtime", "kernels"])
def test_no_code_decides_by_the_name_of_a_model(folder):
    """No identifier, and no word of a string other than a docstring, is a model_type or the stem of a model's class."""
    from transformers import CONFIG_MAPPING

    known = {name.lower() for name in (*CONFIG_MAPPING, *families.FAMILIES)} - ALLOWED
    known |= {name.replace("_", "") for name in known if len(name) > 4}
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for line, word in _words(ast.parse(file.read_text())):
            stem = re.sub(r"(ForCausalLM|ForConditionalGeneration|Config|Model)$", "", word)
            if {word.lower(), stem.lower()} & known:
                found.append(f"{file.relative_to(ROOT)}:{line}: {word}")
    assert not found


def test_the_check_of_names_sees_them():
    text = 'class A:\n    "mixtral, cited"\n    x = MixtralConfig\n\ndef f(m):\n    return m == "gpt_oss" or m.jamba\n'
    assert sorted(word for _, word in _words(ast.parse(text))) == ["MixtralConfig", "gpt_oss", "jamba", "m", "m", "x"]


def _words(tree):
    """(line, word) of every name, attribute, import and string but docstrings."""
    held = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body[0] for node in ast.walk(tree) if isinstance(node, held) and node.body]
    docstrings = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                words = re.findall(r"\w+", text)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                words = [name]
            case ast.alias(name=name):
                words = name.split(".")
            case _:
                continue
        yield from ((node.lineno, word) for word in words)
