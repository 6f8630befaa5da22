from dayzero.onboard.rules.listed import continued
from dayzero.runtime.weights import Stored


def test_a_list_goes_on_as_it_begins():
    known = {f"f.expert_{n}.w": Stored(f"d.{{layer}}.expert_{n}.fc.weight") for n in range(3)}
    known |= {"g.0.w": Stored("e.0"), "g.1.w": Stored("e.5"), "norm": Stored("n")}
    found = continued(known, ["f.expert_3.w", "f.expert_11.w", "g.2.w", "norm_2", "h.0.w"])
    assert found == {f"f.expert_{n}.w": Stored(f"d.{{layer}}.expert_{n}.fc.weight") for n in (3, 11)}
