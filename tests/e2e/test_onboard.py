"""From a checkpoint on disk to a generated package that computes what transformers computes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import onboarded
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dayzero.onboard.oracle.reference import Promote, on_disk, quiet
from dayzero.onboard.oracle.top_k import ForceTopK
from dayzero.runtime.headers import read_headers
from dayzero.runtime.hf_checkpoint import write_checkpoint
from dayzero.runtime.nn import MixtureOfExperts
from dayzero.runtime.package import load_package
from dayzero.runtime.safetensors_reader import SafetensorsReader, TensorsReader
from dayzero.runtime.weights import bind

LENGTHS = (13, 2, 1, 9)  # packed documents: longer than the window, and one that has nothing to predict
TOLERANCE = 1e-9  # relative, float64
# Parameters whose gradient is zero in exact arithmetic: a single weight divided by itself.
UNTRAINED = {"mixtral, one expert a token": "ffn.router.weight"}
VARIANTS = [pytest.param(name, marks=pytest.mark.slow) for name in onboarded.VARIANTS]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(checkpoint):
    from transformers import AutoModelForCausalLM

    with quiet(), Promote():  # rotary frequencies are a float32 island of the constructor
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    return model.eval()


def ours(package):
    """The generated model in float64 with the weights that lie on disk."""
    model = package.build().double()
    shapes = {name: header.shape for name, header in read_headers(package.checkpoint).items()}
    reader = SafetensorsReader(package.checkpoint)
    weights = {name: rule.read(reader, shapes) for name, rule in bind(package.rules).items()}
    model.load_state_dict(weights, strict=True)
    return model


def forced(choices):
    """choices: ((experts, top_k) of a router, what it has to choose [T, top_k]), one for every routed layer."""
    if not choices:
        return contextlib.nullcontext()
    return ForceTopK([index for _, index in choices], {like for like, _ in choices})


def their_results(model, documents, choices):
    """Logits [T, V], the summed loss by transformers' own loss function, and gradients by parameter name."""
    logits, loss, start = [], torch.zeros((), dtype=torch.float64), 0
    model.zero_grad()
    for document in documents:
        mine = [(like, index[start : start + len(document)]) for like, index in choices]
        start += len(document)
        with Promote(), forced(mine) as force:
            output = model(input_ids=document[None], labels=document[None], use_cache=False)
        assert force is None or force.calls == len(choices)
        logits.append(output.logits[0].detach())
        if len(document) > 1:
            loss = loss + output.loss * (len(document) - 1)
    loss.backward()
    return torch.cat(logits), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def our_results(model, documents, choices):
    ids = torch.cat(documents)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    labels = torch.cat([torch.cat((document[1:], torch.tensor([-100]))) for document in documents])
    model.zero_grad()
    with forced(choices) as force, torch.no_grad():
        logits = model(ids, bounds)
    assert force is None or force.calls == len(choices)
    with forced(choices):
        loss = model(ids, bounds, labels, loss_chunk=7)
    loss.backward()
    return logits, loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def relative(got, want):
    assert got.shape == want.shape
    assert got.dtype == want.dtype == torch.float64
    size = float(want.norm())
    assert size > 0, "not exercised"
    return float((got - want).norm()) / size


def random_choices(model, generator):
    """Distinct random experts a token for every routed layer, as `forced` takes them."""
    routers = [module.router for module in model.modules() if isinstance(module, MixtureOfExperts)]
    sizes = [(router.experts, router.top_k) for router in routers]
    scores = [torch.rand(sum(LENGTHS), experts, generator=generator) for experts, _ in sizes]
    return [(like, score.topk(like[1], -1).indices) for like, score in zip(sizes, scores, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*tiny.FAMILIES, *VARIANTS])
def test_logits_loss_and_every_gradient_are_those_of_transformers(name):
    made = onboarded.get(name)
    theirs, package = reference(made.checkpoint), load_package(made.package)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, tiny.VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    mine, rules = ours(package), bind(package.rules)
    choices = random_choices(mine, generator)
    for routing in ([], choices) if choices else ([],):
        want_logits, want_loss, want_grads = their_results(theirs, documents, routing)
        got_logits, got_loss, got_grads = our_results(mine, documents, routing)
        assert relative(got_logits, want_logits) <= TOLERANCE
        assert relative(got_loss, want_loss) <= TOLERANCE
        stored = on_disk(theirs, want_grads)
        shapes = {key: tuple(value.shape) for key, value in stored.items()}
        largest = max(float(grad.norm()) for grad in got_grads.values())
        assert got_grads.keys() == rules.keys()
        for parameter, gradient in got_grads.items():
            want = rules[parameter].read(TensorsReader(stored), shapes)
            if parameter.endswith(UNTRAINED.get(name, "\0")):
                assert max(float(gradient.norm()), float(want.norm())) <= 1e-13 * largest, parameter
                continue
            assert relative(gradient, want) <= TOLERANCE, parameter


def export(package, out):
    """Writes every parameter of the package, read through its rules, to a new checkpoint folder."""
    shapes = {name: header.shape for name, header in read_headers(package.checkpoint).items()}
    rules, reader = bind(package.rules), SafetensorsReader(package.checkpoint)
    out.mkdir()

    def read(parameter):
        return rules[parameter].read(reader, shapes)

    return write_checkpoint(out, package.checkpoint, package.rules, list(rules), read)


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *tiny.FAMILIES,
        pytest.param("llama, tied", marks=pytest.mark.slow),
        pytest.param("mixtral, bfloat16 in shards", marks=pytest.mark.slow),
    ],
)
def test_an_untouched_checkpoint_comes_back_bit_for_bit(name, tmp_path):
    made = onboarded.get(name)
    written = export(load_package(made.package), tmp_path / "out")
    before, after = tensors_of(made.checkpoint), tensors_of(tmp_path / "out")
    assert written == before.keys() == after.keys()
    for tensor_name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[tensor_name].dtype, after[tensor_name].shape)
        assert torch.equal(tensor.view(torch.uint8), after[tensor_name].view(torch.uint8)), tensor_name
    assert read_headers(made.checkpoint) == read_headers(tmp_path / "out")


def test_a_changed_parameter_changes_its_own_tensors_and_no_other(tmp_path):
    made = onboarded.get("mixtral")
    package = load_package(made.package)
    shapes = {name: header.shape for name, header in read_headers(made.checkpoint).items()}
    rules, reader = bind(package.rules), SafetensorsReader(made.checkpoint)
    (tmp_path / "out").mkdir()
    name = "layers.1.ffn.experts.gate_up"
    value = rules[name].read(reader, shapes)
    value[3] *= 2
    write_checkpoint(tmp_path / "out", made.checkpoint, package.rules, [name], lambda parameter: value)
    before, after = tensors_of(made.checkpoint), tensors_of(tmp_path / "out")
    changed = {tensor for tensor in before if not torch.equal(before[tensor], after[tensor])}
    prefix = "model.layers.1.block_sparse_moe.experts.3"
    assert changed == {f"{prefix}.w1.weight", f"{prefix}.w3.weight"}
    assert torch.equal(after[f"{prefix}.w3.weight"], 2 * before[f"{prefix}.w3.weight"])


def test_the_ladder_of_a_whole_run():
    made = onboarded.get("mixtral", align=True)
    rungs = made.outcome.alignment.rungs
    assert list(rungs) == ["L0", "L1", "L2"]
    assert {name: rung.verdict for name, rung in rungs.items()} == dict.fromkeys(rungs, "PASS")
    assert rungs["L0"].worst == 0.0
    assert 0 < rungs["L1"].worst <= 1e-9
    assert 0 < rungs["L2"].worst <= 1e-8
    assert any(line.startswith("real weights") for line in rungs["L2"].details)
    index = json.loads((made.package / "ledger.json").read_text())
    with safe_open(made.checkpoint / "model.safetensors", "pt") as file:
        assert sum(group["count"] for group in index["groups"]) == len(list(file.keys()))
    assert {group["fate"] for group in index["groups"]} == {"mapped"}


# --- the command, as processes --------------------------------------------------------------------------------------


def start(*arguments, cwd, hash_seed="random"):
    command = [Path(sys.executable).with_name("onboard"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(hash_seed)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


def contents(package):
    """File name -> bytes of a package, without the link to its checkpoint."""
    found = {}
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        if path.is_file() and "__pycache__" not in name and not name.startswith("checkpoint"):
            found[name] = path.read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_same_checkpoint_gives_the_same_bytes(name, tmp_path):
    """Another process, another place of the checkpoint, another output folder, another hash seed."""
    made = onboarded.get(name, align=True)
    elsewhere = Path(shutil.copytree(made.checkpoint, tmp_path / "moved" / "again"))
    process = start(elsewhere, "-o", "packages", "--name", made.package.name, cwd=tmp_path, hash_seed=7)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    package = tmp_path / "packages" / made.package.name
    assert contents(package) == contents(made.package)
    assert (package / "checkpoint").resolve() == elsewhere.resolve()
    assert sorted(path.name for path in (tmp_path / "packages").iterdir()) == [made.package.name]
    for text in contents(package).values():
        assert str(tmp_path).encode() not in text


def stop(process, line, how):
    """Sends the signal once the process has written `line`; (exit code, standard error before, and after)."""
    seen = []
    for text in process.stderr:
        seen.append(text)
        if line in text:
            process.send_signal(how)
            break
    _, rest = process.communicate(timeout=60)
    assert line in seen[-1], "".join(seen)
    return process.returncode, "".join(seen), rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "line"),
    [
        (signal.SIGINT, "specify: proving"),
        (signal.SIGINT, "align: L0"),
        (signal.SIGTERM, "specify: varying rope"),
        (signal.SIGKILL, "specify: proving"),
        (signal.SIGKILL, "align: comparing"),
    ],
)
def test_a_run_that_was_stopped_goes_on_and_gives_the_same_bytes(how, line, tmp_path):
    made = onboarded.get("llama", align=True)
    arguments = (made.checkpoint, "-o", "out", "--name", made.package.name)
    code, _, after = stop(start(*arguments, cwd=tmp_path), line, how)
    assert not (tmp_path / "out" / made.package.name).exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".state"]
    if how is signal.SIGINT:
        assert code == 130
        said = [text for text in after.splitlines() if not text.startswith("[")]
        assert said == ["interrupted; the same command goes on where this one stopped"]
        assert after.count("\n") <= 3, "it went on for a while"
    again = start(*arguments, cwd=tmp_path)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, out + err
    assert "going on where the last run stopped" in err
    assert ("specify: proving" in err) == line.startswith("specify")
    assert contents(tmp_path / "out" / made.package.name) == contents(made.package)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [made.package.name]


@pytest.mark.slow
def test_what_changed_since_the_interruption_starts_anew(tmp_path):
    """State of another checkpoint or other settings is never continued."""
    made = onboarded.get("llama", align=True)
    checkpoint = Path(shutil.copytree(made.checkpoint, tmp_path / "checkpoint"))
    arguments = (checkpoint, "-o", "out", "--name", made.package.name)
    stop(start(*arguments, cwd=tmp_path), "align: comparing", signal.SIGKILL)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 3e-5}))
    again = start(*arguments, cwd=tmp_path)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, out + err
    assert "going on" not in err
    assert "eps=3e-05" in (tmp_path / "out" / made.package.name / "model.py").read_text()


@pytest.mark.slow
def test_a_damaged_state_is_not_the_end(tmp_path):
    made = onboarded.get("llama", align=True)
    arguments = (made.checkpoint, "-o", "out", "--name", made.package.name)
    stop(start(*arguments, cwd=tmp_path), "align: comparing", signal.SIGKILL)
    for file in (tmp_path / "out" / ".state" / made.package.name).iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again = start(*arguments, cwd=tmp_path)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, out + err
    assert contents(tmp_path / "out" / made.package.name) == contents(made.package)
