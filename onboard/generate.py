"""Renders a package: model.py, weights.py, operators/, tests/, plan, settings, reports. A pure function of its inputs.

Values that came from a checkpoint reach Python files as literals only, never as code.
"""

import hashlib
import importlib.metadata
import inspect
import json
import math
import re
import subprocess
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

import dayzero.templates
from dayzero.onboard.align import Alignment
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.inspect.tensor_names import ranges
from dayzero.onboard.lifted_operators import lifted_operators, operator_files
from dayzero.onboard.operators import OperatorCalls, operator_calls
from dayzero.onboard.report.layers import layers_of
from dayzero.onboard.report.report import Findings, render_html, render_markdown
from dayzero.runtime import nn
from dayzero.runtime.config import TrainConfig, render_yaml
from dayzero.runtime.custom_operators import SMALL
from dayzero.runtime.plan import Plan, plan_text
from dayzero.runtime.recorded_hashes import FILE as HASHES
from dayzero.runtime.recorded_hashes import hashes_as_data
from dayzero.runtime.spec import BlockSpec, LayerKind, ModelSpec, SourceSpec
from dayzero.runtime.weights import Source

VERSION = importlib.metadata.version("dayzero")
LOCK = "onboard.lock"


class Unsafe(Exception):
    """A value that would reach generated code as something else than a literal or a plain word."""


def _word(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.{}\-]*", value):
        raise Unsafe(f"{value!r} is not a plain word")
    return value


def _lit(value: Any) -> str:
    """A Python literal of plain data."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_lit(key)}: {_lit(held)}" for key, held in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_lit, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise Unsafe(f"{value!r} is not plain data")


def _plain(text: str) -> str:
    """Text inside a docstring: one line, and nothing that would end it or be an escape."""
    return "".join(letter if letter.isprintable() and letter not in '"\\' else "'" for letter in text)


@cache
def environment() -> jinja2.Environment:
    """Templates with strict names: a misspelt variable is an error, not an empty string."""
    loader = jinja2.FileSystemLoader(Path(dayzero.templates.__path__[0]))
    env = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters |= {"word": _word, "lit": _lit, "plain": _plain}
    return env


def format_python(text: str) -> str:
    """The text as the pinned ruff formats it, whatever settings surround the package. Import order included."""
    from ruff import find_ruff_bin

    where = ["--isolated", "--line-length", "120", "--stdin-filename", "generated.py", "-"]
    sort = [find_ruff_bin(), "check", "--select", "I", "--fix", "--quiet", *where]
    form = [find_ruff_bin(), "format", *where]
    for command in (form, sort, form):
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def call(block: BlockSpec) -> str:
    """The constructor call of a block, blocks inside it included; arguments with their default value are left out."""
    signature = inspect.signature(nn.BLOCKS[block.block].__init__)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    given = [
        f"{name}={_argument(block, name, value)}"
        for name, value in block.arguments.items()
        if value != defaults.get(name, object()) and not (block.block == "Lifted" and value in ([], {}))
    ]
    return f"{_word(block.block)}({', '.join(given)})"


def _argument(block: BlockSpec, name: str, value: Any) -> str:
    if isinstance(value, BlockSpec):
        return call(value)
    if getattr(nn.BLOCKS[block.block], "holds_lifted", False) and name == "module":
        if not re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII):
            raise Unsafe(f"{value!r} is not the name of a class")
        return f"operators.{value}"
    if block.block == "Lifted" and name == "replace":
        return "{" + ", ".join(f"{_lit(path)}: {call(held)}" for path, held in value.items()) + "}"
    return _lit(value)


def proof_line(block: BlockSpec) -> str:
    """The comment over a block: which module it stands for and how well."""
    proof = block.proof
    if proof is None:
        return "# UNVERIFIED"
    if proof.error is None:
        return f"# {_word(proof.module)}: UNVERIFIED"
    return f"# {_word(proof.module)}: {_word(proof.status)}, differs by less than {proof.error:.0e}"


def source_text(source: SourceSpec) -> str:
    """A weight expression as Python: the fields of its node in order, those with their default left out."""
    return _node_text(source.build())


def _node_text(node: Source) -> str:
    arguments = []
    for field in fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        if field.name == "part":
            text = _node_text(value)
        elif field.name == "parts":
            text = f"({', '.join(map(_node_text, value))},)"
        else:
            text = _tuple_lit(value)
        if field.default is MISSING:
            arguments.append(text)
        elif value != field.default:
            arguments.append(f"{field.name}={text}")
    return f"{type(node).__name__}({', '.join(arguments)})"


def _tuple_lit(value: Any) -> str:
    return f"({', '.join(map(_tuple_lit, value))},)" if isinstance(value, tuple) else _lit(value)


def model_py(spec: ModelSpec) -> str:
    """model.py of the specification."""
    functions = _kind_functions(spec)
    held: dict[int, list[str]] = {}
    for whose, number, layers in reversed(layers_of(spec)):
        held.setdefault(number, []).append(f"Layers {ranges(layers)}{' of the encoder' if whose else ''}")
    kinds = []
    for number, kind in enumerate(spec.layer_kinds):
        kinds.append(
            {
                "function": functions[number],
                "layers": "; ".join(held.get(number, [])),
                "kind": kind,
                "makes_shared": number in spec.shared,
                "takes_shared": any(part.shared for part in kind.parts),
            }
        )
    uses = spec.uses()
    blocks = {
        "CausalLM",
        "DecoderLayer",
        *(["Encoder"] if spec.encoder is not None else []),
        *(["Loop"] if spec.loop is not None else []),
    } | {inner.block for block in spec.blocks() for inner in block.walk()}
    text = (
        environment()
        .get_template("model.py.j2")
        .render(
            spec=spec,
            version=VERSION,
            kinds=kinds,
            blocks=sorted(blocks),
            runs=[
                {
                    "function": functions[run.kind],
                    "count": run.count,
                    "shared": run.shared,
                    "uses": [use for _, _, use in uses[run.first : run.first + run.count]],
                }
                for run in spec.layers
            ],
            shared=[functions[kind] for kind in spec.shared],
            encoder_runs=[
                {"function": functions[run.kind], "count": run.count}
                for run in (spec.encoder.layers if spec.encoder is not None else ())
            ],
            call=call,
            proof_line=proof_line,
            lifted=list(operator_files(spec).values()),
        )
    )
    return format_python(text)


def model_files(spec: ModelSpec) -> dict[str, str]:
    """File name -> content of what `build()` and the weights need: model.py, weights.py, spec.json, and lifted.py and
    its operators where something is lifted."""
    files = {
        "model.py": model_py(spec),
        "weights.py": weights_py(spec),
        "spec.json": canonical_json(spec.model_dump(mode="json")),
    }
    template = environment().get_template("operators/lifted.py.j2")
    for lifted in lifted_operators(spec):
        files[f"operators/{lifted.name}.py"] = format_python(
            template.render(operator=lifted, spec=spec, version=VERSION)
        )
    return files | ({"lifted.py": format_python(spec.lifted)} if spec.lifted else {})


def _kind_functions(spec: ModelSpec) -> list[str]:
    """A function name for every kind of layer, by what it is; numbered where two are alike."""
    words = [_word_for(kind) for kind in spec.layer_kinds]
    return [f"{word}_{words[:i].count(word) + 1}" if words.count(word) > 1 else word for i, word in enumerate(words)]


def _word_for(kind: LayerKind) -> str:
    """Whose tokens choose experts, in whatever block these are; otherwise by whether it has a feed-forward part. One
    that was copied as a whole says so."""
    inside = {inner.block for block in kind.blocks.values() for inner in block.walk()}
    if any(issubclass(nn.BLOCKS[name], nn.Routed) for name in inside):
        return "routed_layer"
    if [part.block.block for part in kind.parts] == ["Lifted"]:
        return "lifted_layer"
    return "dense_layer" if any(part.name.startswith("ffn") for part in kind.parts) else "mixer_layer"


def weights_py(spec: ModelSpec) -> str:
    """weights.py of the specification."""
    rules = [
        {"parameter": rule.parameter, "source": source_text(rule.source), "ranges": rule.ranges} for rule in spec.rules
    ]
    used = {name for rule in spec.rules for name in _node_names(rule.source.build())}
    text = (
        environment()
        .get_template("weights.py.j2")
        .render(spec=spec, version=VERSION, rules=rules, names=sorted({"Rule", *used}))
    )
    return format_python(text)


def _node_names(source: Source) -> set[str]:
    return {type(source).__name__}.union(*(_node_names(child) for child in source.children))


def _operator_files(operators: list[OperatorCalls]) -> dict[str, str]:
    files = {"operators/__init__.py": environment().get_template("operators/__init__.py.j2").render(version=VERSION)}
    template = environment().get_template("operators/operator.py.j2")
    for operator in operators:
        files[f"operators/{operator.name}.py"] = format_python(template.render(operator=operator, version=VERSION))
    return files


def _lifted_tests(spec: ModelSpec, small: ModelSpec | None) -> dict[str, str]:
    """The test of what is written by hand for lifted classes, and the small model that it runs on."""
    if small is None or not spec.lifted:
        return {}
    names = list(operator_files(spec).values())
    test = environment().get_template("tests/test_lifted.py.j2").render(spec=spec, version=VERSION, names=names)
    small = small.model_copy(update={"rules": [], "lifted": ""})
    return {"tests/test_lifted.py": format_python(test), SMALL: canonical_json(small.model_dump(mode="json"))}


def _within_positions(train: TrainConfig, spec: ModelSpec) -> TrainConfig:
    """Settings whose examples are no longer than the model has positions, so that they train as they are written."""
    longest = min(train.data.max_length, spec.max_positions or train.data.max_length)
    return train.model_copy(update={"data": train.data.model_copy(update={"max_length": longest})})


def canonical_json(value: Any) -> str:
    """JSON in the order of the fields, one space of indent and a final newline."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def render_package(
    spec: ModelSpec,
    ledger: Ledger,
    plan: Plan,
    train: TrainConfig,
    findings: Findings,
    alignment: Alignment,
    small: ModelSpec | None = None,
) -> dict[str, str]:
    """File name -> content of the whole package, the lock included. small: the shrunk model, on which a package with
    lifted classes compares what is written by hand for them."""
    operators = operator_calls(spec)
    package_test = environment().get_template("tests/test_package.py.j2")
    files = {
        **model_files(spec),
        "plan.yaml": plan_text(plan),
        "train.yaml": render_yaml(_within_positions(train, spec)),
        "ledger.json": canonical_json(ledger.model_dump(mode="json")),
        HASHES: canonical_json(hashes_as_data(alignment.hashes, [rule.build() for rule in spec.rules])),
        **_operator_files(operators),
        "tests/test_package.py": format_python(
            package_test.render(spec=spec, version=VERSION, operators=operators, parameters=ledger.mapped_parameters())
        ),
        **_lifted_tests(spec, small),
        "REPORT.md": render_markdown(spec, ledger, plan, findings, alignment),
        "report.html": render_html(spec, ledger, plan, findings, alignment),
    }
    lock = {
        "version": VERSION,
        "templates_sha256": templates_sha256(),
        "checkpoint": spec.checkpoint.model_dump(mode="json"),
        "findings": findings.model_dump(mode="json"),
        "alignment": alignment.model_dump(mode="json", exclude={"hashes"}),
        "files": {name: _sha256(text) for name, text in sorted(files.items())},
    }
    lock["sha256"] = _sha256(canonical_json(lock))  # of all that stands above it
    return {**files, LOCK: canonical_json(lock)}


def templates_sha256() -> str:
    """Digest of every template, by name and content."""
    folder = Path(dayzero.templates.__path__[0])
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.j2")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
