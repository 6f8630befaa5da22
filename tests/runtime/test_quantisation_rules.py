"""Quantised checkpoints through the rules: loaded decoded, in shards too, and exported with the bytes they had."""

import math

import pytest
import torch
from expressions import cases, regions
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised import grid_of, specimen
from safetensors.torch import save_file

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.hf_checkpoint import write_checkpoint
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.precision import stored_dtypes
from dayzero.runtime.quantisation import FORMATS, decode, quantised_groups
from dayzero.runtime.quantisation.requantise import OFFERED
from dayzero.runtime.safetensors_reader import SafetensorsReader, TensorsReader
from dayzero.runtime.weights import (
    BoundRule,
    Cast,
    Concat,
    Decoded,
    Deinterleave,
    Part,
    Rule,
    Stack,
    Stored,
    Transpose,
    bind,
)

# Role -> what follows the weight's name in published checkpoints
SUFFIXES = {
    "fp8_block": {"weight": "", "scale": "_scale_inv"},
    "fp8_ue8m0": {"weight": "", "scale": "_scale_inv"},
    "mxfp8": {"weight": "", "scale": "_scale"},
    "mxfp4_packed": {"packed": "_packed", "scale": "_scale"},
    "mxfp4_blocks": {"blocks": "_blocks", "scales": "_scales"},
    "int4_packed": {"packed": "_packed", "scale": "_scale", "shape": "_shape"},
    "nvfp4": {"packed": "_packed", "scale": "_scale", "scale_2": "_scale_2"},
}
EXPERTS, GATE, DOWN = 3, (40, 64), (64, 96)


def finite(parts):
    """The same without the codes of NaN, which no trained weight has."""
    if "weight" in parts:
        raw = parts["weight"].view(torch.uint8)
        parts["weight"] = torch.where(raw & 0x7F == 0x7F, 1, raw).view(torch.float8_e4m3fn)
    return parts


def tensors_of(name):
    """(a checkpoint's tensors, the values of each quantised weight)."""
    tensors, values = {"norm.weight": torch.rand(40, dtype=torch.bfloat16)}, {}
    for expert in range(EXPERTS):
        for number, (which, shape) in enumerate({"gate": GATE, "up": GATE, "down": DOWN}.items()):
            parts = finite(specimen(name, shape, seed=10 * expert + number))
            weight = f"experts.{expert}.{which}.weight"
            values[weight] = decode(FORMATS[name], parts)
            tensors |= {weight + SUFFIXES[name][role]: part.contiguous() for role, part in parts.items()}
    return tensors, values


def decoded(name, weight):
    return Decoded(name, tuple((role, weight + suffix) for role, suffix in SUFFIXES[name].items()))


def rules_of(name, to=None):
    gate, up, down = (decoded(name, f"experts.{{expert}}.{which}.weight") for which in ("gate", "up", "down"))
    gate_up, down = Stack("expert", EXPERTS, Concat(0, (gate, up))), Stack("expert", EXPERTS, Transpose(down))
    if to:
        gate_up, down = Cast(to, gate_up), Cast(to, down)
    return [Rule("gate_up", gate_up), Rule("down", down), Rule("norm", Stored("norm.weight"))]


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.full((EXPERTS, 80, 64), 7, dtype=dtype))
        self.down = torch.nn.Parameter(torch.full((EXPERTS, 96, 64), 7, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.full((40,), 7, dtype=torch.bfloat16))


def bits(value):
    return value.contiguous().view(torch.uint8)


@pytest.fixture(params=sorted(FORMATS))
def case(request, tmp_path):
    tensors, values = tensors_of(request.param)
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return request.param, folder, tensors, values


def want(values, which):
    if which == "down":
        return torch.stack([values[f"experts.{e}.down.weight"].T for e in range(EXPERTS)])
    both = [(values[f"experts.{e}.gate.weight"], values[f"experts.{e}.up.weight"]) for e in range(EXPERTS)]
    return torch.stack([torch.cat(pair) for pair in both])


def test_groups_of_the_file_are_the_rules_tensors(case):
    name, folder, _, values = case
    groups = quantised_groups(read_headers(folder))
    assert {weight: group.shape for weight, group in groups.items()} == {w: tuple(v.shape) for w, v in values.items()}
    for weight, group in groups.items():
        assert Decoded(group.format, tuple(group.parts.items())).parts_of({}) == decoded(name, weight).parts_of({})


def test_loading(case):
    name, folder, tensors, values = case
    model = Model()
    read = load_checkpoint(model, rules_of(name), folder, read_headers(folder))
    assert torch.equal(model.gate_up, want(values, "gate_up"))
    assert torch.equal(model.down, want(values, "down"))
    every = sum(tensor.nbytes for tensor in tensors.values())
    assert every <= read <= every * 1.5  # small chunks read the scales of a block more than once
    rounded = Model(torch.bfloat16)
    load_checkpoint(rounded, rules_of(name, "bfloat16"), folder, read_headers(folder))
    assert torch.equal(rounded.gate_up, want(values, "gate_up").bfloat16())
    wide = Model()
    load_checkpoint(wide, rules_of(name, "bfloat16"), folder, read_headers(folder))
    assert torch.equal(wide.gate_up, rounded.gate_up.float())


def test_loading_values_that_the_parameter_cannot_hold(case):
    name, folder, _, values = case
    exact = torch.equal(want(values, "gate_up").bfloat16().float(), want(values, "gate_up"))
    if exact:
        load_checkpoint(Model(torch.bfloat16), rules_of(name), folder, read_headers(folder))
        return
    with pytest.raises(InputError, match=r"torch.float32 values that torch.bfloat16 cannot hold"):
        load_checkpoint(Model(torch.bfloat16), rules_of(name), folder, read_headers(folder))


def test_kept_dtypes(case):
    name, folder, _, _ = case
    headers = read_headers(folder)
    kept = {"gate_up": torch.float32, "down": torch.float32, "norm": torch.bfloat16}
    assert stored_dtypes(rules_of(name), headers) == kept
    assert stored_dtypes(rules_of(name, "bfloat16"), headers) == dict.fromkeys(kept, torch.bfloat16)


@pytest.mark.parametrize(
    "region", [(slice(1, 2), slice(0, 80), slice(0, 64)), (slice(0, 3), slice(33, 55), slice(3, 64))]
)
def test_a_shard_reads_only_its_blocks(case, region):
    name, _, tensors, values = case
    shapes = {n: tuple(tensor.shape) for n, tensor in tensors.items()}
    asked: dict[str, int] = {}

    class Counting(TensorsReader):
        def read(self, name, region=None):
            part = super().read(name, region)
            asked[name] = asked.get(name, 0) + part.nbytes
            return part

    rule = bind(rules_of(name))["gate_up"]
    into = torch.empty([part.stop - part.start for part in region], dtype=torch.float64)
    rule.fill(into, Counting(tensors), shapes, region)
    assert torch.equal(into, want(values, "gate_up")[region].double())
    per_byte = {"int4_packed": 2, "nvfp4": 2, "mxfp4_packed": 2, "mxfp4_blocks": 2}.get(name, 1)
    codes = sum(
        count for n, count in asked.items() if n.endswith(SUFFIXES[name][FORMATS[name].codes]) and "scale" not in n
    )
    assert codes <= into.numel() / per_byte * 64 / (64 - region[2].start) + 1
    assert all(int(n.split(".")[1]) in range(region[0].start, region[0].stop) for n in asked)


def test_untouched_tensors_keep_their_bytes(case, tmp_path):
    name, folder, _, _ = case
    out = tmp_path / "out"
    out.mkdir()
    write_checkpoint(out, folder, rules_of(name), ["norm"], lambda _: torch.rand(40))
    headers = read_headers(folder)
    before, after = ((f / "model.safetensors").read_bytes() for f in (folder, out))
    norm = headers["norm.weight"]
    assert before[norm.start : norm.end] != after[norm.start : norm.end]
    assert before[: norm.start] + before[norm.end :] == after[: norm.start] + after[norm.end :]


def test_training_them_needs_to_be_asked_for(case, tmp_path):
    name, folder, _, values = case
    with pytest.raises(
        InputError, match=r"experts\.0\.gate\.weight.*\n.*a trained tensor that the checkpoint stores as"
    ):
        write_checkpoint(tmp_path, folder, rules_of(name), ["gate_up"], lambda _: want(values, "gate_up"))


@pytest.mark.parametrize("to", [None, "bfloat16"])
def test_requantised(case, tmp_path, to):
    name, folder, tensors, values = case
    out = tmp_path / "out"
    out.mkdir()
    trained = want(values, "gate_up")
    trained = trained.bfloat16().float() if to else trained
    trained[1, 45:50] = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))  # rows 5 to 9 of expert 1's up
    costs = {}
    if name not in OFFERED:
        with pytest.raises(InputError, match="nvfp4 is read but not written"):
            write_checkpoint(out, folder, rules_of(name, to), ["gate_up"], lambda _: trained, costs.__setitem__)
        return
    write_checkpoint(out, folder, rules_of(name, to), ["gate_up"], lambda _: trained, costs.__setitem__)
    after = {n: SafetensorsReader(out).read(n) for n in tensors}
    changed = {n for n, tensor in tensors.items() if not torch.equal(bits(tensor), bits(after[n]))}
    assert changed
    assert all(n.startswith("experts.1.up.weight") for n in changed)
    assert len(costs) == 2 * EXPERTS
    assert {n.split(".weight")[0] for n, cost in costs.items() if cost.kept < cost.blocks} == {"experts.1.up"}
    parts = {role: after["experts.1.up.weight" + suffix] for role, suffix in SUFFIXES[name].items()}
    got = decode(FORMATS[name], parts)
    cost = next(cost for n, cost in costs.items() if n.startswith("experts.1.up"))
    away = (got - trained[1, 40:]).norm() / trained[1, 40:].norm()
    assert float(away) == pytest.approx(cost.relative, rel=1e-4)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_parts_of_one_quantised_tensor(name, tmp_path):
    """Fused qkv in one quantised tensor, three parameters; each is trained and written by itself."""
    parts = finite(specimen(name, (40, 64)))
    tensors = {"qkv.weight" + SUFFIXES[name][role]: part.contiguous() for role, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    leaf = decoded(name, "qkv.weight")
    rules = [
        Rule("q", Part(0, 0, 16, leaf)),
        Rule("k", Part(0, 16, 24, leaf)),
        Rule("v", Deinterleave(0, 2, Part(0, 24, 40, leaf))),
    ]
    shapes = {n: tuple(tensor.shape) for n, tensor in tensors.items()}
    bound, value = bind(rules), decode(FORMATS[name], parts)
    read = {n: rule.read(TensorsReader(tensors), shapes) for n, rule in bound.items()}
    assert torch.equal(torch.cat((read["q"], read["k"])), value[:24])
    assert torch.equal(read["v"], torch.cat((value[24::2], value[25::2])))
    if name not in OFFERED:
        return
    out = tmp_path / "out"
    out.mkdir()
    write_checkpoint(out, tmp_path, rules, ["q", "k", "v"], read.__getitem__, lambda name, cost: None)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    rule = BoundRule("q", Part(0, 0, 16, leaf), {})
    with pytest.raises(ValueError, match="writing it needs the checkpoint as it is"):
        list(rule.write(read["q"], shapes))


def quantised_leaves(source, shapes, odd):
    """The expression with every matrix decoded: MXFP4 where its columns are even and `odd` does not choose FP8."""
    if not isinstance(source, Stored):
        return source.with_children(tuple(quantised_leaves(child, shapes, odd) for child in source.children))
    name = source.name.split(".")[0]
    shape = shapes[name]
    if len(shape) < 2:
        return source
    made = "mxfp4_packed" if shape[-1] % 2 == 0 and int(name[1:]) % 2 != odd else "fp8_block"
    return Decoded(made, ((FORMATS[made].codes, source.name), (FORMATS[made].scale, f"{source.name}_scale")))


def coded(leaf, values, index):
    """Name -> tensor of a leaf's parts; codes of 0 where the values are 0, scales by row or by block of 32 x 32."""
    if isinstance(leaf, Stored):
        return {next(leaf.names(index)): values.double()}
    codes, scale = leaf.parts_of(index).values()
    if leaf.format == "fp8_block":
        raw = torch.where(values > 0, values % 126 + 1, 0).to(torch.uint8)
        grid = (*values.shape[:-2], *grid_of(values.shape[-2:], (32, 32)))
        return {codes: raw.view(torch.float8_e4m3fn), scale: torch.arange(1.0, 1.0 + math.prod(grid)).view(grid)}
    nibbles = torch.where(values > 0, values % 7 + 1, 0).to(torch.uint8)
    packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return {codes: packed, scale: (torch.arange(math.prod(values.shape[:-1])) % 9 + 120).to(torch.uint8)
            .view(*values.shape[:-1], 1)}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 1), st.data())
def test_chains_of_rules_over_quantised_tensors_are_bijections(case, odd, data):
    """Read, and written back as they are: every byte of codes and scales comes back, through any chain."""
    templates = {name.split(".")[0]: shape for name, shape in case.shapes.items()}
    rules, tensors = {}, {}
    for name, rule in case.rules.items():
        rules[name] = BoundRule(name, quantised_leaves(rule.source, templates, odd), rule.index)
        stored = {next(leaf.names(inner)) for leaf, inner, _ in rule.source.leaves(rule.index)}
        for leaf, inner, _ in rules[name].source.leaves(rule.index):
            first = next(leaf.names(inner))
            assert first in stored
            tensors |= coded(leaf, case.tensors[first], inner)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    back = {name: torch.full_like(bits(tensor), 7) for name, tensor in tensors.items()}
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    for rule in rules.values():
        value = rule.read(TensorsReader(tensors), shapes)
        region = data.draw(regions(tuple(value.shape)))
        assert torch.equal(rule.read(TensorsReader(tensors), shapes, region), value[region])
        for name, where, part in rule.write(value, shapes, source=TensorsReader(held)):
            held[name][where] = part.to(held[name].dtype)
            back[name] = bits(held[name])
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], bits(tensor)) for name, tensor in tensors.items())
