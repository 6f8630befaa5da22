"""What is rendered: valid Python, and nothing of a checkpoint ever runs or becomes markup."""

import ast
import json
import subprocess
import sys
from html.parser import HTMLParser

import odd_specs
import onboarded
import pytest
import yaml

from dayzero.onboard.align import Alignment
from dayzero.onboard.claims import Claim
from dayzero.onboard.generate import (
    Unsafe,
    _kind_functions,
    call,
    model_py,
    proof_line,
    render_package,
    source_text,
    weights_py,
)
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.prove.interventions import Intervention
from dayzero.onboard.report.report import Findings
from dayzero.runtime.config import TrainConfig, load_config
from dayzero.runtime.package import load_package
from dayzero.runtime.plan import read_plan
from dayzero.runtime.spec import BlockSpec, LayerKind, ModelSpec, PartSpec, Proof, SourceSpec

NASTY = [
    "\"); open('sentinel', 'w'); (\"",
    "'''); open('sentinel', 'w') #",
    '""" + str(open("sentinel", "w")) + """',
    "{{ 7 * 7 }}{% for x in range(9) %}",
    "${7*7} $(touch sentinel) `touch sentinel`",
    "a\nimport os; os.mkdir('sentinel')\n",
    "\\", "\\'", "\r\n", "\u2028\u202e", "\x00", "é😀",
    "<script>document.title='sentinel'</script>", "</td></tr></table><img src=x onerror=alert(1)>",
    "a | b | **c** [d](javascript:alert(1)) <i>",
    "|\n| x | y |",
    "]]>--><!--",
]  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    """What a package is rendered from."""
    folder = onboarded.get("mixtral", align=True).package
    lock = json.loads((folder / "onboard.lock").read_text())
    return {
        "spec": ModelSpec.model_validate_json((folder / "spec.json").read_text()),
        "ledger": Ledger.model_validate_json((folder / "ledger.json").read_text()),
        "plan": read_plan(folder / "plan.yaml"),
        "train": load_config(folder / "train.yaml"),
        "findings": Findings.model_validate(lock["findings"]),
        "alignment": Alignment.model_validate(lock["alignment"]),
    }


def render(parts, **changes):
    held = {**parts, **changes}
    return render_package(*(held[name] for name in ("spec", "ledger", "plan", "train", "findings", "alignment")))


@pytest.mark.parametrize(("positions", "length"), [(77, 77), (None, 1024), (4096, 1024)])
def test_settings_train_as_they_are_written(parts, positions, length):
    spec = parts["spec"].model_copy(update={"max_positions": positions})
    train = parts["train"].model_copy(update={"data": TrainConfig().data})
    written = yaml.safe_load(render(parts, spec=spec, train=train)["train.yaml"])
    assert written["data"]["max_length"] == length


def rename(source, nasty):
    """The same expression over tensor names with `nasty` in them."""
    if source.op == "stored":
        return source.model_copy(update={"name": f"{source.name}.{escaped(nasty)}"})
    return source.model_copy(update={"parts": [rename(part, nasty) for part in source.parts]})


def escaped(text):
    return text.replace("{", "{{").replace("}", "}}")  # names are format strings: {layer}


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, tuple(name for name, _ in attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.slow
@pytest.mark.parametrize("nasty", NASTY)
def test_text_of_a_checkpoint_reaches_a_package_as_literals_only(parts, nasty, tmp_path):
    spec, ledger = parts["spec"], parts["ledger"]
    spec = spec.model_copy(
        update={"rules": [rule.model_copy(update={"source": rename(rule.source, nasty)}) for rule in spec.rules]}
    )
    groups = [
        group.model_copy(update={"pattern": f"{group.pattern}.{nasty}", "reason": nasty}) for group in ledger.groups
    ]
    ledger = ledger.model_copy(update={"groups": groups, "quantization": {nasty: nasty}, "unread_config": [nasty]})
    found = Intervention(field=nasty, value=nasty, altered=[nasty], effect="unexplained", detail=nasty)
    claims = [Claim(field=nasty, states=nasty, verdict=v, proven=nasty) for v in ("confirmed", "contradicted")]
    findings = Findings(interventions=[found], claims=claims, ignored_config={nasty: nasty})
    files = render(parts, spec=spec, ledger=ledger, findings=findings)
    clean = render(parts)
    for name in ("model.py", "operators/swiglu.py", "tests/test_package.py"):
        assert files[name] == clean[name]
    assert ModelSpec.model_validate_json(files["spec.json"]) == spec
    assert Ledger.model_validate_json(files["ledger.json"]) == ledger
    assert Findings.model_validate(json.loads(files["onboard.lock"])["findings"]) == findings
    # weights.py: the same program but for string literals, and those are the names.
    tree, before = ast.parse(files["weights.py"]), ast.parse(clean["weights.py"])
    shape = [type(node).__name__ for node in ast.walk(tree)]
    assert shape == [type(node).__name__ for node in ast.walk(before)]
    (tmp_path / "p").mkdir()
    for name in ("weights.py", "model.py", "spec.json"):
        (tmp_path / "p" / name).write_text(files[name], encoding="utf-8")
    package = load_package(tmp_path / "p")
    assert [rule.source for rule in package.rules] == [rule.source.build() for rule in spec.rules]
    # report.html: the tags of the clean one, and the text in full.
    nasty_page, page = Tags(files["report.html"]), Tags(clean["report.html"])
    extra = set(nasty_page.tags) - set(page.tags)
    assert extra <= {("span", ("class",)), ("br", ())}, extra
    assert "<script" not in files["report.html"]
    # REPORT.md: every row of the tensor table is one line with five cells, no live markup.
    rows = [line for line in files["REPORT.md"].split("\n") if line.startswith("| `")]
    assert len(rows) == len(groups)
    for row in rows:
        assert row.replace("\\|", "").count("|") == 6, row
    assert not any(tag in files["REPORT.md"] for tag in ("<script", "<img", "<i>"))
    assert not list(tmp_path.rglob("sentinel"))


@pytest.mark.parametrize("nasty", NASTY)
def test_words_that_stand_outside_of_literals_are_plain_or_refused(parts, nasty):
    """Module paths and the architecture's name go into comments and docstrings of model.py."""
    spec = parts["spec"]
    block = spec.norm.model_copy(update={"proof": Proof(status="proven", module=nasty, error=1e-12)})
    identity = spec.checkpoint.model_copy(update={"architecture": nasty})
    for changed in (spec.model_copy(update={"norm": block}), spec.model_copy(update={"checkpoint": identity})):
        with pytest.raises(Unsafe):
            model_py(changed)


def test_python_files_parse_and_are_formatted(parts):
    files = render(parts)
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120, name
            assert text.endswith("\n")
            assert not text.endswith("\n\n")
    assert yaml.safe_load(files["plan.yaml"])["devices"] == 8


def test_rendering_is_a_function_of_its_inputs(parts):
    assert render(parts) == render(parts)


def test_a_call_leaves_out_what_is_the_default():
    assert (
        call(BlockSpec(block="RMSNorm", arguments={"width": 4, "eps": 1e-6, "offset": 0.0}))
        == "RMSNorm(width=4, eps=1e-06)"
    )
    assert call(BlockSpec(block="RMSNorm", arguments={"width": 4, "eps": 1e-6, "offset": 1.0})).endswith("offset=1.0)")


def test_a_block_without_proof_says_so():
    assert proof_line(BlockSpec(block="RMSNorm", arguments={"width": 4, "eps": 1e-6})) == "# UNVERIFIED"


def test_an_expression_reads_as_python():
    one, two = SourceSpec(op="stored", name="a'b"), SourceSpec(op="stored", name="c")
    both = SourceSpec(op="concat", dim=1, parts=[one, SourceSpec(op="transpose", parts=[two])])
    text = source_text(SourceSpec(op="stack", over="expert", count=2, parts=[both]))
    assert text == """Stack('expert', 2, Concat(1, (Stored("a'b"), Transpose(Stored('c')),)))"""


def test_generated_code_is_the_specification(parts):
    spec = parts["spec"]
    assert weights_py(spec).count("Rule(") == len(spec.rules)
    package = load_package(onboarded.get("mixtral", align=True).package)
    assert str(package.build()) == str(spec.build())


@pytest.mark.slow
def test_the_tests_that_come_with_a_package_pass():
    package = onboarded.get("qwen3_moe", align=True).package
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")]
    result = subprocess.run(command, cwd=package, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "11 passed" in result.stdout


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("jetmoe", ["routed_layer"]),  # of attention too
        ("deepseek_v4", ["routed_layer_1", "routed_layer_2", "routed_layer_3"]),  # inside another block
        ("jamba", ["dense_layer_1", "routed_layer", "dense_layer_2"]),
        ("zamba", ["mixer_layer_1", "mixer_layer_2", "dense_layer"]),
    ],
)
def test_a_kind_of_layer_is_named_by_what_it_is(spec, names):
    assert _kind_functions(odd_specs.read(spec)) == names


def test_a_layer_that_was_copied_as_a_whole_says_so():
    layer = BlockSpec(block="Lifted", arguments={"module": "Layer", "settings": {}, "handed": {"x": "stream"}})
    spec = odd_specs.read("jetmoe")
    copied = LayerKind(parts=[PartSpec(name="layer", block=layer, reads="x")], gives="layer")
    kinds = [copied, *spec.layer_kinds]
    assert _kind_functions(spec.model_copy(update={"layer_kinds": kinds})) == ["lifted_layer", "routed_layer"]
