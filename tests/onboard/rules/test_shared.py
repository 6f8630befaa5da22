"""Rules of parts that layers share: found by the layers that hold them, read once."""

from dayzero.onboard.rules.search import full_rules, layer_templates
from dayzero.onboard.rules.shared import as_own, as_shared, own_shapes
from dayzero.onboard.sharing import SharedParts
from dayzero.runtime.weights import Part, Stored, Tie


def test_rules_of_shared_parts_are_found_again_where_other_layers_share():
    small, real = [SharedParts((1, 3), ("mixer",))], [SharedParts((2, 4, 6), ("mixer",))]
    copies = (Stored("h.1.block.w"), Stored("h.3.block.w"))
    found = {"layers.0.ffn.w": Stored("h.0.w"), "layers.1.ffn.w": Stored("h.1.w"), "layers.3.ffn.w": Stored("h.3.w")}
    found["shared.0.mixer.up"] = Part(0, 0, 3, Tie(copies))
    found["shared.0.mixer.gate"] = Part(0, 3, 6, Tie(copies))
    shapes = {f"layers.{layer}.ffn.w": (4,) for layer in (0, 2, 4, 6)}
    shapes |= {"shared.0.mixer.up": (5, 4), "shared.0.mixer.gate": (5, 4)}
    templates = layer_templates(as_own(found, small))
    follows = [0, 0, 1, 0, 3, 0, 3]
    rules = as_shared(full_rules(templates, follows, own_shapes(shapes, real)), real)
    held = {rule.parameter: rule.build().source for rule in rules}
    names = (Stored("h.2.block.w"), Stored("h.4.block.w"), Stored("h.6.block.w"))
    assert held["shared.0.mixer.up"] == Part(0, 0, 5, Tie(names))
    assert held["shared.0.mixer.gate"] == Part(0, 5, 10, Tie(names))
    assert [name for name in held if "mixer" in name] == ["shared.0.mixer.up", "shared.0.mixer.gate"]
