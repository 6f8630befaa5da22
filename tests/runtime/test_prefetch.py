"""Which parameters are gathered early, as the plan says: by the order of events, and by the units that there are."""

import functools

import handmade
import harness
import pytest
import ranks_prefetch
import tiny

from dayzero.runtime.plan import make_plan


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    return handmade.specify(tiny.make("mixtral", folder, tokenizer=False, num_hidden_layers=3))


@pytest.fixture(scope="module")
def events(spec):
    @functools.cache
    def events(prefetch, recomputed):
        return harness.run(ranks_prefetch.events, 2, spec.model_dump_json(), prefetch, recomputed)[0]

    return events


def before(log, *names):
    places = [log.index(name) for name in names]
    return places == sorted(places)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_experts_and_the_next_layer_travel_while_attention_computes(prefetch, events):
    forward, _ = events(prefetch, False)
    for layer in (0, 1):
        assert before(forward, f"gather experts {layer}", f"gather layer {layer + 1}", f"attention {layer}")
        assert before(forward, f"free experts {layer}", f"gather experts {layer + 1}")  # and no earlier


@pytest.mark.parametrize("recomputed", [False, True])
def test_backward_reaches_experts_first(recomputed, events):
    backward = {prefetch: _from_gradients(events(prefetch, recomputed)[1]) for prefetch in (1, 2)}
    for layer in (1, 2):
        before_it = f"gather experts {layer - 1}"
        for log in backward.values():
            assert before(log, f"gather layer {layer - 1}", f"attention {layer}")
        assert before(backward[1], f"attention {layer}", f"free layer {layer}", before_it)
        assert before(backward[2], f"experts {layer}", before_it, f"attention {layer}", f"free layer {layer}")


@pytest.mark.parametrize("recomputed", [False, True])
def test_without_prefetch_nothing_is_gathered_before_it_is_needed(recomputed, events):
    forward, backward = events(0, recomputed)
    for layer in (0, 1):
        assert before(forward, f"attention {layer}", f"gather experts {layer}", f"free layer {layer}")
        assert before(forward, f"free layer {layer}", f"gather layer {layer + 1}")
        assert before(backward, f"free layer {layer + 1}", f"gather layer {layer}", f"gather experts {layer}")


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("recomputed", [False, True])
def test_every_unit_is_gathered_once_in_each_pass(prefetch, recomputed, events):
    """As the plan counts them; recomputing gathers nothing again."""
    for log in events(prefetch, recomputed):
        gathered = sorted(event for event in log if event.startswith("gather"))
        assert gathered == sorted(f"gather {unit} {layer}" for unit in ("layer", "experts") for layer in range(3))


def test_the_units_are_those_of_the_plan(spec):
    planned = sorted(
        (unit.parameters, unit.over)
        for unit in make_plan(spec, devices=2, mode="full", tokens_per_device=8).units
        for _ in range(unit.count)
    )
    assert harness.run(ranks_prefetch.units, 2, spec.model_dump_json())[0] == planned


def _from_gradients(log):
    """Without what is computed again, which comes first: the last time that each part computes is for its gradient."""
    last = {event: place for place, event in enumerate(log)}
    return [event for place, event in enumerate(log) if last[event] == place]
