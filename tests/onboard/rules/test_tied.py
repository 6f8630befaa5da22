"""Tensors of which the reference keeps one: stored once or twice, equal or not, promised and missing."""

import json
import shutil
from pathlib import Path

import onboarded
import pytest
import torch
from safetensors.torch import load_file, save_file

from dayzero.onboard.agent import Outcome, Run, execute
from dayzero.onboard.align import coverage_rung
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify, settle
from dayzero.onboard.oracle.reference import build, on_disk, redraw
from dayzero.onboard.rules.expressions import NoRule
from dayzero.onboard.rules.on_disk import with_prefix, with_shared, with_stored_copies
from dayzero.onboard.rules.search import find_rules
from dayzero.onboard.specify_checkpoint import real_shapes
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.hf_checkpoint import write_checkpoint
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Stored, Tie

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def copy(name, folder, change, **config):
    """The checkpoint with other tensors, change(tensors), and other config fields."""
    folder = Path(shutil.copytree(onboarded.checkpoint(name), folder))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def settled(checkpoint, spec):
    """(ledger, L0, hashes) of a checkpoint under the rules of another that was proven."""
    source = read_checkpoint(checkpoint)
    rules = with_stored_copies(spec.rules, source.headers.keys())
    spec = spec.model_copy(update={"rules": rules})
    ledger = settle(classify(source), source, spec, real_shapes(spec))
    return ledger, *coverage_rung(source, ledger, spec)


def repeat(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """(checkpoint whose tied head is stored, what onboarding made of it)."""
    folder = copy("llama, tied", tmp_path_factory.mktemp("twice") / "checkpoint", repeat)
    outcome = list(execute(Run(folder, folder.parent / "generated", "made", 8, 64.0, align=False)))[-1]
    assert isinstance(outcome, Outcome)
    assert not outcome.unproven, outcome.unproven
    return folder, outcome


@pytest.fixture(scope="module")
def spec(twice):
    return load_package(twice[1].package).spec


def test_a_copy_has_a_fate_and_is_no_parameter_more(twice, spec):
    folder, outcome = twice
    groups = {group.pattern: group for group in outcome.ledger.groups}
    assert (groups[HEAD].fate, groups[HEAD].parameter) == ("mapped", "embed.weight")
    assert (groups[HEAD].copy_of, groups[EMBEDDING].copy_of) == (EMBEDDING, None)
    made = load_package(outcome.package)
    assert outcome.ledger.mapped_parameters() == sum(parameter.numel() for parameter in made.build().parameters())
    rules = {rule.parameter: rule.source for rule in made.rules}
    assert rules["embed.weight"] == Tie((Stored(EMBEDDING), Stored(HEAD)))
    ledger, rung, _ = settled(folder, spec)
    assert ledger.groups == outcome.ledger.groups
    assert rung.verdict == "PASS"
    assert rung.where.startswith(f"{ledger.tensors} tensors")


def test_a_copy_is_compared_on_loading_and_written_on_export(twice, spec, tmp_path):
    folder, outcome = twice
    made = load_package(outcome.package)
    model, headers = made.build(), read_headers(folder)
    read = load_checkpoint(model, made.rules, folder, headers, hashes=settled(folder, spec)[2])
    assert read == sum(header.bytes for header in headers.values())
    (tmp_path / "same").mkdir()
    write_checkpoint(tmp_path / "same", folder, made.rules, ["embed.weight"], model.get_parameter)
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    (tmp_path / "trained").mkdir()
    written = write_checkpoint(tmp_path / "trained", folder, made.rules, ["embed.weight"], model.get_parameter)
    assert written == {EMBEDDING, HEAD}
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(after[HEAD], after[EMBEDDING])
    assert torch.equal(after[HEAD], model.embed.weight)
    other = copy("llama, tied", tmp_path / "other", turn)
    with pytest.raises(InputError, match="differs from the tensor that it should repeat"):
        load_checkpoint(made.build(), made.rules, other, read_headers(other))


def test_a_copy_in_another_dtype(spec, tmp_path):
    """The same values, and each comes back in its own dtype."""

    def narrow(tensors):
        for name in list(tensors):
            tensors[name] = tensors[name].bfloat16()
        tensors[HEAD] = tensors[EMBEDDING].float()

    assert settled(copy("llama, tied", tmp_path / "checkpoint", narrow), spec)[1].verdict == "PASS"


def turn(tensors):
    """A head that is the embedding but for its last value."""
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 2.0**-10


def test_two_values_where_the_reference_keeps_one(spec, tmp_path):
    folder = copy("llama, tied", tmp_path / "checkpoint", turn)
    with pytest.raises(InputError) as error:
        settled(folder, spec)
    said = str(error.value)
    assert said.startswith(f"{EMBEDDING} and {HEAD}\n  found     two tensors of different values: {HEAD} differs")
    assert "tie_word_embeddings=True in config.json" in said
    assert "set tie_word_embeddings to false in config.json" in said


@pytest.mark.slow
def test_what_the_error_tells_to_do_works(tmp_path):
    folder = copy("llama, tied", tmp_path / "checkpoint", turn, tie_word_embeddings=False)
    outcome = list(execute(Run(folder, tmp_path / "generated", "made", 8, 64.0, align=True)))[-1]
    assert isinstance(outcome, Outcome)
    assert outcome.alignment.verdict == "PASS"
    assert not load_package(outcome.package).spec.tied


def test_only_the_second_name_is_stored(spec, tmp_path):
    """transformers then ties the other way round."""

    def rename(tensors):
        tensors[HEAD] = tensors.pop(EMBEDDING)

    ledger, rung, _ = settled(copy("llama, tied", tmp_path / "checkpoint", rename), spec)
    assert rung.verdict == "PASS"
    (group,) = (group for group in ledger.groups if group.pattern == HEAD)
    assert (group.parameter, group.copy_of) == ("embed.weight", None)


@pytest.fixture(scope="module")
def untied():
    return load_package(onboarded.get("llama").package).spec


def test_no_head_and_a_config_that_ties_nothing(untied, tmp_path):
    folder = copy("llama", tmp_path / "checkpoint", lambda tensors: tensors.pop(HEAD))
    with pytest.raises(InputError) as error:
        settled(folder, untied)
    said = str(error.value)
    for text in (
        f"{HEAD}\n  found     not in the checkpoint",
        "a tensor [307, 40] for head.weight",
        "ties it to nothing (tie_word_embeddings=False in config.json)",
        "random values",
        f"repeat {EMBEDDING}, set tie_word_embeddings to true",
    ):
        assert text in said
    fields = json.loads((folder / "config.json").read_text())
    del fields["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="the architecture's own default holds"):
        settled(folder, untied)


def test_a_shard_that_is_missing_is_no_question_of_ties(untied, tmp_path):
    """Nor is a tensor that as large a one could stand for, where there are several of that size."""
    name = "model.layers.1.mlp.down_proj.weight"
    folder = copy("llama", tmp_path / "checkpoint", lambda tensors: tensors.pop(name))
    with pytest.raises(InputError, match=r"down_proj\.weight\n(?s:.*)0 of the 1 tensors of layers\.1\.ffn\.down"):
        settled(folder, untied)


def shared_model():
    """A reference that ties, and what transformers writes of it."""
    config = json.loads((onboarded.checkpoint("llama, tied") / "config.json").read_text())
    reference, _ = build(config)
    redraw(reference, torch.Generator().manual_seed(0))
    return reference, on_disk(reference)


def test_what_transformers_leaves_out_is_known_by_its_own_name():
    reference, stored = shared_model()
    assert HEAD not in stored
    every = with_shared(reference, stored)
    assert every.keys() == stored.keys() | {HEAD}
    assert torch.equal(every[HEAD], stored[EMBEDDING])
    source = find_rules({"embed.weight": stored[EMBEDDING]}, {n: every[n] for n in (EMBEDDING, HEAD)})["embed.weight"]
    assert source == Tie((Stored(EMBEDDING), Stored(HEAD)))


def rule(parameter, source, layers=None):
    ranges = {"layer": (0, layers)} if layers else {}
    return RuleSpec(parameter=parameter, source=SourceSpec.of(source), ranges=ranges)


def test_copies_are_kept_for_the_layers_that_have_them():
    tied = rule("layers.{layer}.w", Tie((Stored("h.{layer}.a"), Stored("h.{layer}.b"))), 4)
    names = {"h.0.a", "h.1.a", "h.2.a", "h.1.b", "h.2.b", "h.3.b"}
    found = [(made.ranges["layer"], made.source.build()) for made in with_stored_copies([tied], names)]
    both = Tie((Stored("h.{layer}.a"), Stored("h.{layer}.b")))
    assert found == [((0, 1), Stored("h.{layer}.a")), ((1, 3), both), ((3, 4), Stored("h.{layer}.b"))]
    (made,) = with_stored_copies([tied], ())
    assert made.source.build() == Stored("h.{layer}.a")


@pytest.mark.parametrize("there", [{"x.model.e", "x.head"}, {"x.model.e"}, {"x.head"}])
def test_a_copy_may_be_absent_where_all_names_have_another_prefix(there):
    rules = [rule("embed", Tie((Stored("model.e"), Stored("head")))), rule("norm", Stored("model.n"))]
    names = {*there, "x.model.n"}
    made = with_stored_copies(with_prefix(rules, names), names)
    found = {name for one in made for bound in [one.build()] for name in bound.source.names({})}
    assert found == names


def test_a_prefix_that_fits_no_copy():
    with pytest.raises(NoRule, match="head is not in the checkpoint under any prefix"):
        with_prefix([rule("embed", Tie((Stored("model.e"), Stored("head"))))], {"other"})
