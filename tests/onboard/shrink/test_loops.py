"""A small model whose layers run again keeps enough of them that what one pass hands to the next differs."""

import pytest
from zoo import families

from dayzero.onboard.oracle.reference import build
from dayzero.onboard.shrink.canonical_config import canonical
from dayzero.onboard.shrink.layers import cut_layers, kind_of, layer_signatures
from dayzero.onboard.shrink.loops import handed_alike
from dayzero.onboard.shrink.shrink import shrink_model
from dayzero.onboard.shrink.trial import trial

CONFIG = families.config("inkling2_loop")


def test_messages_mixed_of_one_state_are_all_the_same():
    """A pass over two layers keeps nothing beside what it gives, one over four keeps a state in between."""
    short = {"num_hidden_layers": 5, "layer_types": CONFIG["layer_types"][:5], "loop_layer_index_end": 4}
    assert handed_alike({**CONFIG, **short}) == [2, 3]
    assert handed_alike(CONFIG) == []
    assert handed_alike(families.config("mixtral")) == []


def test_whether_layers_run_again_is_seen_by_running_them():
    assert trial(CONFIG).again
    assert not trial(families.config("mixtral")).again
    assert not trial({**CONFIG, "loop_num_passes": 1}).again


def test_several_layers_of_a_kind_are_kept_on_demand():
    config = canonical(CONFIG)
    signatures = layer_signatures(build(config, device="meta")[0])
    again = dict.fromkeys((kind_of(signatures[2]), kind_of(signatures[3])), 2)
    assert cut_layers(config, (), signatures).kept == [0, 1, 2, 3, 6]
    assert cut_layers(config, (), signatures, several=again).kept == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_small_model_has_what_tells_messages_apart():
    shrunk = shrink_model(CONFIG)
    assert shrunk.kept == [0, 1, 2, 3, 4, 5, 6]
    assert shrunk.config["loop_num_passes"] == CONFIG["loop_num_passes"]
    assert handed_alike(shrunk.config) == []
