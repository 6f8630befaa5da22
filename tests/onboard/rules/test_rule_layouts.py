"""Layouts of published checkpoints: found by value in a small model, right in a larger one of other proportions.

Each layout is a function of the sizes, which gives a layer's parameters and how the checkpoint stores them. The rules
are found at the small sizes, resized, and then read and write the large one's tensors.
"""

import pytest
import torch

from dayzero.onboard.rules.on_disk import quantised_rules, with_prefix
from dayzero.onboard.rules.real_sizes import sizes_between
from dayzero.onboard.rules.search import NoRule, find_rules, full_rules, layer_templates
from dayzero.runtime.quantisation import QuantizedTensor
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import (
    Cast,
    Concat,
    Decoded,
    Deinterleave,
    Excerpt,
    Flatten,
    Part,
    Squeeze,
    Stack,
    Stored,
    Tie,
    Trim,
    bind,
    check_coverage,
)

SMALL = {"hidden": 14, "experts": 3, "width": 5, "heads": 6, "kv_heads": 22, "head_dim": 8, "key_heads": 7,
         "key_dim": 9, "value_dim": 26, "padded": 11, "kernel": 3}  # fmt: skip
LARGE = {"hidden": 40, "experts": 6, "width": 24, "heads": 12, "kv_heads": 2, "head_dim": 16, "key_heads": 5,
         "key_dim": 10, "value_dim": 36, "padded": 32, "kernel": 4}  # fmt: skip
LAYERS = 2
LAYOUTS = {}


def layout(function):
    LAYOUTS[function.__name__] = function
    return function


def ours(gate, up, down):
    """Our experts: gate above up, [E, 2F, H], and down, [E, H, F]."""
    return {"ffn.gate_up": torch.cat((gate, up), 1), "ffn.down": down}


def experts(new, s):
    gate, up = new(s["experts"], s["width"], s["hidden"]), new(s["experts"], s["width"], s["hidden"])
    return gate, up, new(s["experts"], s["hidden"], s["width"])


@layout
def gate_up_down_by_expert(new, s):
    made = dict(zip(("gate_proj", "up_proj", "down_proj"), experts(new, s), strict=True))
    stored = {f"mlp.experts.{e}.{n}.weight": held[e] for n, held in made.items() for e in range(s["experts"])}
    return ours(*made.values()), stored


@layout
def w1_w3_w2_by_expert(new, s):
    made = dict(zip(("w1", "w3", "w2"), experts(new, s), strict=True))
    stored = {f"moe.experts.{e}.{n}.weight": held[e] for n, held in made.items() for e in range(s["experts"])}
    return ours(*made.values()), stored


@layout
def dictionary_of_experts(new, s):
    made = dict(zip(("wi", "wg", "wo"), experts(new, s), strict=True))
    stored = {f"mlp.experts.expert_{e}.{n}.weight": held[e] for n, held in made.items() for e in range(s["experts"])}
    return ours(*made.values()), stored


@layout
def fused_in_halves(new, s):
    gate, up, down = experts(new, s)
    return ours(gate, up, down), {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1), "mlp.experts.down_proj": down}


@layout
def fused_interleaved(new, s):
    gate, up, down = experts(new, s)
    both = torch.stack((gate, up), 2).flatten(1, 2)
    return ours(gate, up, down), {"mlp.experts.gate_up_proj": both, "mlp.experts.down_proj": down}


@layout
def fused_interleaved_in_out(new, s):
    """gpt-oss: [E, H, 2F], columns alternating, with biases that alternate too."""
    gate, up, down = experts(new, s)
    both = torch.stack((gate, up), 2).flatten(1, 2)
    one, two = new(s["experts"], s["width"]), new(s["experts"], s["width"])
    parameters = ours(gate, up, down) | {"ffn.gate_up_bias": torch.cat((one, two), 1)}
    bias = torch.stack((one, two), 2).flatten(1)
    return parameters, {
        "mlp.experts.gate_up_proj": both.mT,
        "mlp.experts.gate_up_proj_bias": bias,
        "mlp.experts.down_proj": down.mT,
    }


@layout
def fused_in_out(new, s):
    gate, up, down = experts(new, s)
    return ours(gate, up, down), {"experts.gate_up_proj": torch.cat((gate, up), 1).mT, "experts.down_proj": down.mT}


@layout
def stacked_split(new, s):
    gate, up, down = experts(new, s)
    return ours(gate, up, down), {"moe.gate_proj.weight": gate, "moe.up_proj.weight": up, "moe.down_proj.weight": down}


@layout
def flattened(new, s):
    """dbrx: all experts' rows in one matrix; down transposed."""
    gate, up, down = experts(new, s)
    stored = {"ffn.mlp.w1": gate.flatten(0, 1), "ffn.mlp.v1": up.flatten(0, 1), "ffn.mlp.w2": down.mT.flatten(0, 1)}
    return ours(gate, up, down), stored


@layout
def separate_gate_and_up_of_fused(new, s):
    """Our block keeps gate and up apart; the file alternates their rows."""
    gate, up, _ = experts(new, s)
    return {"ffn.gate": gate, "ffn.up": up}, {"experts.gate_up_proj": torch.stack((gate, up), 2).flatten(1, 2)}


@layout
def fused_qkv(new, s):
    q, k = new(s["heads"] * s["head_dim"], s["hidden"]), new(s["kv_heads"] * s["head_dim"], s["hidden"])
    v = new(s["kv_heads"] * s["head_dim"], s["hidden"])
    return {"mixer.q": q, "mixer.k": k, "mixer.v": v}, {"attn.qkv.weight": torch.cat((q, k, v))}


@layout
def qkv_by_group(new, s):
    """Every key head beside its own queries and value."""
    q = new(s["key_heads"], 2 * s["head_dim"], s["hidden"])
    k, v = new(s["key_heads"], s["head_dim"], s["hidden"]), new(s["key_heads"], s["head_dim"], s["hidden"])
    parameters = {f"mixer.{n}": held.flatten(0, 1) for n, held in (("q", q), ("k", k), ("v", v))}
    return parameters, {"attn.qkv.weight": torch.cat((q, k, v), 1).flatten(0, 1)}


@layout
def in_proj_qkvz_and_ba(new, s):
    """Qwen3-Next: for every key head its q, k, v and z rows; then b and a of its value heads."""
    g, dk, dv = s["key_heads"], s["key_dim"], s["value_dim"]
    q, k, v, z = new(g, dk, s["hidden"]), new(g, dk, s["hidden"]), new(g, dv, s["hidden"]), new(g, dv, s["hidden"])
    b, a = new(g, 2, s["hidden"]), new(g, 2, s["hidden"])
    parts = {"q": q, "k": k, "v": v, "z": z, "b": b, "a": a}
    stored = {"lin.in_proj_qkvz.weight": torch.cat((q, k, v, z), 1), "lin.in_proj_ba.weight": torch.cat((b, a), 1)}
    return (
        {f"mixer.{name}": held.flatten(0, 1) for name, held in parts.items()},
        {name: held.flatten(0, 1) for name, held in stored.items()},
    )


@layout
def in_proj_qkvz_into_one_qkv(new, s):
    """The same file for a block that wants [all q | all k | all v] and z."""
    g, dk, dv = s["key_heads"], s["key_dim"], s["value_dim"]
    q, k, v, z = new(g, dk, s["hidden"]), new(g, dk, s["hidden"]), new(g, dv, s["hidden"]), new(g, dv, s["hidden"])
    qkv = torch.cat([held.flatten(0, 1) for held in (q, k, v)])
    stored = {"lin.in_proj_qkvz.weight": torch.cat((q, k, v, z), 1).flatten(0, 1)}
    return {"mixer.qkv": qkv, "mixer.z": z.flatten(0, 1)}, stored


@layout
def split_in_proj(new, s):
    q, k = new(s["key_heads"] * s["key_dim"], s["hidden"]), new(s["key_heads"] * s["key_dim"], s["hidden"])
    v, z = new(s["value_dim"] * 2, s["hidden"]), new(s["value_dim"] * 2, s["hidden"])
    stored = {"lin.in_proj_qkv.weight": torch.cat((q, k, v)), "lin.in_proj_z.weight": z}
    return {"mixer.q": q, "mixer.k": k, "mixer.v": v, "mixer.z": z}, stored


@layout
def doubled_gated_query(new, s):
    """Every head's query rows, then the rows of its gate."""
    q, gate = (new(s["heads"], s["head_dim"], s["hidden"]) for _ in range(2))
    stored = {"attn.q_proj.weight": torch.cat((q, gate), 1).flatten(0, 1)}
    return {"mixer.q": q.flatten(0, 1), "mixer.gate": gate.flatten(0, 1)}, stored


@layout
def rotary_pairs(new, s):
    """The file pairs neighbouring rows of a head for the rotation, our block its halves."""
    q = new(s["heads"], 2, s["head_dim"] // 2, s["hidden"])
    return {"mixer.q": q.flatten(0, 2)}, {"attn.q_proj.weight": q.transpose(1, 2).flatten(0, 2)}


@layout
def rotary_halves(new, s):
    q = new(s["heads"], s["head_dim"] // 2, 2, s["hidden"])
    return {"mixer.q": q.flatten(0, 2)}, {"attn.q_proj.weight": q.transpose(1, 2).flatten(0, 2)}


@layout
def partly_rotary_pairs(new, s):
    """Only the first half of every head is rotated."""
    rotated = new(s["heads"], 2, s["head_dim"] // 4, s["hidden"])
    rest = new(s["heads"], s["head_dim"] // 2, s["hidden"])
    mine = torch.cat((rotated.flatten(1, 2), rest), 1).flatten(0, 1)
    return {"mixer.q": mine}, {
        "attn.q.weight": torch.cat((rotated.transpose(1, 2).flatten(1, 2), rest), 1).flatten(0, 1)
    }


@layout
def four_dimensional_a_log(new, s):
    a = new(s["heads"])
    return {"mixer.A_log": a}, {"attn.A_log": a.reshape(1, 1, -1, 1)}


@layout
def padded_a_log(new, s):
    a = new(s["heads"])
    padded = torch.cat((a, torch.zeros(s["padded"] + 12 - s["heads"], dtype=a.dtype)))
    return {"mixer.A_log": a}, {"attn.A_log": padded}


@layout
def convolution_with_one_channel(new, s):
    conv = new(s["hidden"], s["kernel"])
    return {"mixer.conv": conv}, {"attn.conv1d.weight": conv.unsqueeze(1)}


@layout
def row_vector(new, s):
    gate = new(1, s["hidden"])
    return {"ffn.shared_gate": gate}, {"mlp.shared_gate": gate[0]}


@layout
def correction_bias_outside_the_router(new, s):
    weight, bias = new(s["experts"], s["hidden"]), new(s["experts"])
    return {"ffn.router.weight": weight, "ffn.router.bias": bias}, {"moe.gate.weight": weight, "moe.e_score_bias": bias}


def model(function, sizes, seed, prefix="model."):
    """(parameters, stored) of `LAYERS` layers and an embedding, every value different."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parameters, stored = {"embed.weight": new(29, sizes["hidden"])}, {}
    stored[f"{prefix}embed_tokens.weight"] = parameters["embed.weight"]
    for layer in range(LAYERS):
        mine, theirs = function(new, sizes)
        parameters |= {f"layers.{layer}.{name}": value.contiguous() for name, value in mine.items()}
        stored |= {f"{prefix}layers.{layer}.{name}": value.contiguous() for name, value in theirs.items()}
    return parameters, stored


def found(function):
    small, large = model(function, SMALL, 1), model(function, LARGE, 2)
    templates = layer_templates(find_rules(*small))
    shapes = {name: tuple(value.shape) for name, value in large[0].items()}
    rules = full_rules(templates, list(range(LAYERS)), shapes, sizes_between(SMALL, LARGE))
    return templates, rules, large


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name):
    _, rules, (parameters, stored) = found(LAYOUTS[name])
    assert len(rules) == 1 + (len(parameters) - 1) // LAYERS  # one rule for all layers
    bound = bind([RuleSpec.model_validate_json(rule.model_dump_json()).build() for rule in rules])
    assert bound.keys() == parameters.keys()
    shapes = {tensor: tuple(value.shape) for tensor, value in stored.items()}
    check_coverage(bound, shapes)
    back = {tensor: torch.full_like(value, torch.nan) for tensor, value in stored.items()}
    for parameter, rule in bound.items():
        value = rule.read(TensorsReader(stored), shapes)
        assert torch.equal(value, parameters[parameter]), rule.source
        for tensor, region, part in rule.write(value, shapes):
            assert back[tensor][region].isnan().all()
            back[tensor][region] = part
    assert all(torch.equal(back[tensor], value) for tensor, value in stored.items())


def test_expressions_are_readable():
    def rule(name, layout_name):
        return found(LAYOUTS[layout_name])[0][1][0][name]

    base = "model.layers.{layer}."
    qkvz = Stored(base + "lin.in_proj_qkvz.weight")
    assert rule("ffn.gate_up", "fused_interleaved") == Deinterleave(1, 2, Stored(base + "mlp.experts.gate_up_proj"))
    assert rule("mixer.k", "in_proj_qkvz_and_ba") == Part(0, 9, 18, qkvz, groups=7)
    assert rule("mixer.A_log", "four_dimensional_a_log") == Squeeze((0, 1, 3), Stored(base + "attn.A_log"))
    assert rule("mixer.A_log", "padded_a_log") == Trim(0, 6, Stored(base + "attn.A_log"))
    assert rule("mixer.q", "rotary_pairs") == Deinterleave(0, 2, Stored(base + "attn.q_proj.weight"), block=8)
    expert = base + "mlp.experts.expert_{expert}."
    parts = (Stored(expert + "wi.weight"), Stored(expert + "wg.weight"))
    assert rule("ffn.gate_up", "dictionary_of_experts") == Stack("expert", 3, Concat(0, parts))
    assert isinstance(rule("mixer.q", "partly_rotary_pairs"), Flatten)


def test_a_size_that_is_no_size_of_the_config():
    small = model(LAYOUTS["rotary_pairs"], SMALL, 1)
    templates = layer_templates(find_rules(*small))
    with pytest.raises(NoRule, match="8 is no size of the config"):
        full_rules(templates, [0, 1], {name: tuple(value.shape) for name, value in small[0].items()})


def test_a_number_that_stands_for_two_sizes_is_no_size():
    assert sizes_between({"a": 4, "b": {"c": 4, "d": 6}}, {"a": 8, "b": {"c": 9, "d": 12}}) == {6: 12}


def test_the_id_of_a_token_is_no_size():
    assert sizes_between({"groups": 2, "bos_token_id": 2}, {"groups": 16, "bos_token_id": 2}) == {2: 16}


def test_a_tied_head_that_is_stored():
    embedding = torch.randn(7, 3, dtype=torch.float64)
    stored = {"model.embed.weight": embedding, "lm_head.weight": embedding.clone()}
    assert find_rules({"embed.weight": embedding}, stored) == {
        "embed.weight": Tie((Stored("model.embed.weight"), Stored("lm_head.weight")))
    }
    head = torch.randn(7, 3, dtype=torch.float64)
    untied = find_rules({"embed.weight": embedding, "head.weight": head}, stored | {"lm_head.weight": head})
    assert untied == {"embed.weight": Stored("model.embed.weight"), "head.weight": Stored("lm_head.weight")}


def test_a_part_that_nobody_takes_is_named():
    tensor = torch.randn(6, 3, dtype=torch.float64)
    with pytest.raises(NoRule, match=r"2 of 6 rows of x \[6, 3\] are read for nothing, from 4"):
        find_rules({"a": tensor[:2], "b": tensor[2:4]}, {"x": tensor})
    with pytest.raises(NoRule, match="the same part of x is read for b and a"):
        find_rules({"a": tensor[:4], "b": tensor[3:]}, {"x": tensor})


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_beside_one_that_is_carried(row):
    """Shrunk: biases of 6 classes, two rows of which the model uses one. Real: 9 classes."""
    bias = torch.randn(2, 6, dtype=torch.float64)
    stored, idle = {"h.0.b": bias}, {"h.0.b": torch.ones(2, 6, dtype=torch.bool)}
    idle["h.0.b"][row] = False
    found = find_rules({"layers.0.bias": bias[row]}, stored, idle)
    assert found == {"layers.0.bias": Excerpt(0, 6 * row, 6 * row + 6, Flatten(0, Stored("h.0.b")))}
    (rule,) = full_rules(layer_templates(found), [0, 0], {f"layers.{layer}.bias": (9,) for layer in (0, 1)})
    bound = bind([rule.build()])
    shapes = {f"h.{layer}.b": (2, 9) for layer in (0, 1)}
    check_coverage(bound, shapes)
    real = torch.randn(2, 9)
    assert torch.equal(bound["layers.1.bias"].read(TensorsReader({"h.1.b": real}), shapes), real[row])


def test_what_is_carried_is_what_the_model_does_not_use():
    bias = torch.randn(3, 6, dtype=torch.float64)
    with pytest.raises(NoRule, match="values of x that the model uses are not those"):
        find_rules({"a": bias[0]}, {"x": bias}, {"x": torch.arange(3)[:, None].expand(3, 6) == 1})
    with pytest.raises(NoRule, match=r"of x .* are read for nothing"):
        find_rules({"a": bias[0]}, {"x": bias})


def test_padding_must_be_zero():
    tensor = torch.randn(6, dtype=torch.float64)
    with pytest.raises(NoRule, match="2 of 6 rows of x"):
        find_rules({"a": tensor[:4]}, {"x": tensor})


def rules(*pairs):
    return [
        RuleSpec(
            parameter=parameter, source=SourceSpec.of(source), ranges={"layer": (0, 3)} if "{" in parameter else {}
        )
        for parameter, source in pairs
    ]


WEIGHT = "layers.{layer}.experts.{expert}.w1.weight"


@pytest.mark.parametrize(
    ("old", "new"), [("", "model."), ("", "language_model.model."), ("model.", ""), ("model.", "a.b.")]
)
def test_prefixes(old, new):
    made = rules(
        ("layers.{layer}.w", Stack("expert", 2, Stored(old + WEIGHT))), ("head.weight", Stored("lm_head.weight"))
    )
    names = {f"{new}layers.{layer}.experts.{expert}.w1.weight" for layer in range(3) for expert in range(2)}
    changed = with_prefix(made, names | {"lm_head.weight", "vision.layers.0.experts.0.w1.weight"})
    assert [rule.source.build() for rule in changed] == [
        Stack("expert", 2, Stored(new + WEIGHT)),
        Stored("lm_head.weight"),
    ]
    assert with_prefix(changed, names | {"lm_head.weight"}) == changed


def test_a_prefix_that_does_not_do_for_all():
    made = rules(("layers.{layer}.w", Stored("layers.{layer}.w")))
    with pytest.raises(NoRule, match=r"layers\.0\.w is not in the checkpoint under any prefix, nor 2 others"):
        with_prefix(made, {"model.layers.0.w", "model.layers.1.w"})
    with pytest.raises(NoRule, match="but under 2"):
        with_prefix(made, {f"{prefix}.layers.{layer}.w" for prefix in "ab" for layer in range(3)})


def packed(name):
    return QuantizedTensor("mxfp4_packed", {"packed": name + "_packed", "scale": name + "_scale"}, (8, 32), "BF16")


def test_quantised_tensors_are_decoded_where_they_are():
    made = rules(("layers.{layer}.w", Stack("expert", 2, Concat(0, (Stored(WEIGHT), Stored(WEIGHT + "2"))))))
    names = [f"layers.{layer}.experts.{expert}.w1.weight" for layer in (1, 2) for expert in range(2)]
    plain, decoded = quantised_rules(made, {name: packed(name) for name in names})
    assert plain == made[0].model_copy(update={"ranges": {"layer": (0, 1)}})
    leaf = Decoded("mxfp4_packed", (("packed", WEIGHT + "_packed"), ("scale", WEIGHT + "_scale")))
    assert decoded.ranges == {"layer": (1, 3)}
    assert decoded.source.build() == Stack("expert", 2, Concat(0, (Cast("bfloat16", leaf), Stored(WEIGHT + "2"))))
    (exact,) = quantised_rules(rules(("w", Stored("a.weight"))), {"a.weight": packed("a.weight")}, to=None)
    assert exact.source.build() == Decoded("mxfp4_packed", (("packed", "a.weight_packed"), ("scale", "a.weight_scale")))
    scale = QuantizedTensor("fp8_ue8m0", {"weight": "a.weight", "scale": "a.scale"}, (8, 32), "BF16")
    (other,) = quantised_rules(rules(("w", Stored("a.weight"))), {"a.weight": scale}, to=None)
    assert other.source.build() == Decoded("fp8_ue8m0", (("weight", "a.weight"), ("scale", "a.scale")))


def test_experts_that_are_stored_in_two_ways():
    made = rules(("layers.{layer}.w", Stack("expert", 2, Stored(WEIGHT))))
    name = "layers.1.experts.1.w1.weight"
    with pytest.raises(NoRule, match=r"layers\.1\.experts\.1\.w1\.weight is stored in another way than its siblings"):
        quantised_rules(made, {name: packed(name)})


def test_values_that_occur_more_than_once():
    """Random float16 numbers repeat within and between tensors; most of them still tell where they are from."""
    generator = torch.Generator().manual_seed(0)
    stored = {f"e.{e}.{n}": torch.randn(29, 24, generator=generator).half().double() for e in range(10) for n in "ab"}
    both = torch.stack([torch.cat((stored[f"e.{e}.a"], stored[f"e.{e}.b"])) for e in range(10)])
    values = torch.cat([tensor.flatten() for tensor in stored.values()])
    assert len(values.unique()) < 0.8 * len(values)
    want = Stack("expert", 10, Concat(0, (Stored("e.{expert}.a"), Stored("e.{expert}.b"))))
    assert find_rules({"w": both}, stored) == {"w": want}
