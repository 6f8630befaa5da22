"""Whole models on meshes, for tests of sharded models and of ranks that share a batch."""

import functools

import harness
import pytest
import ranks


def model_results(packages, cases):
    """results(world): of every rank, for all cases of that world in one go, computed once. cases: world -> name ->
    (package, layout, settings)."""

    @functools.cache
    def on(world):
        held = {
            name: (packages[package], {"layout": layout, **settings})
            for name, (package, layout, settings) in cases[world].items()
        }
        return harness.run(ranks.expert_parallel, world, held, timeout=200)

    return on


def by_world(cases):
    """(world, name) of all cases; those of more than two ranks are slow."""
    return [
        pytest.param(world, name, marks=() if world == 2 else pytest.mark.slow)
        for world, named in cases.items()
        for name in named
    ]
