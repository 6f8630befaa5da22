import hashlib
import shutil

import handmade
import harness
import pytest
import ranks_train
import tiny
import torch

from dayzero.runtime import checkpointing

SAVED, SMALLER = (1, 4, 2), (1, 2, 1)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpointing")
    config = {"num_hidden_layers": 2, "num_experts": 8, "tokenizer": False}
    return handmade.write(tiny.make("mixtral", folder / "checkpoint", **config), folder / "package")


@pytest.fixture(scope="module")
def saved(package, tmp_path_factory):
    """(run with checkpoints of steps 4, 6 and 8, all of one state; that state)."""
    run = tmp_path_factory.mktemp("run")
    states = harness.run(ranks_train.save, 4, package, SAVED, run, 3, [2, 4, 6, 8], 3)
    return run, states[0]


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_keeps_the_newest(saved):
    assert [path.name for path in checkpointing.checkpoints(saved[0])] == [f"step_0000000{n}" for n in (8, 6, 4)]
    assert checkpointing.step_of(checkpointing.latest(saved[0])) == 8


@pytest.mark.parametrize(
    ("world", "layout"), [slow(4, SAVED), slow(4, (2, 2, 4)), (2, SMALLER)], ids=["same", "ep4", "world2"]
)
def test_restores_bit_for_bit_on_other_meshes(world, layout, package, saved):
    for step, state, notes in harness.run(ranks_train.restore, world, package, layout, saved[0]):
        assert step == 8
        assert notes == []
        assert same(state, saved[1])


def by_expert(state):
    """(parameter or moment, number of the expert in the whole layer) -> hash of its values."""
    return {
        (name, expert): hashlib.sha256(part.numpy().tobytes()).hexdigest()
        for name, value in state.items()
        if ".experts." in name and value.ndim == 3
        for expert, part in enumerate(value)
    }


@pytest.mark.parametrize(("world", "layout"), [slow(4, (1, 4, 1)), slow(4, (4, 1, 2)), (2, (1, 2, 2)), (1, (1, 1, 1))])
def test_every_expert_comes_back_under_its_number(world, layout, package, saved):
    want = by_expert(saved[1])
    assert len(want) == 2 * 2 * 3 * 8  # layers, matrices, a value and two moments, experts
    assert len(set(want.values())) == len(want)  # no two alike: one in another's place would show
    for _, state, _ in harness.run(ranks_train.restore, world, package, layout, saved[0]):
        assert by_expert(state) == want


def test_reads_whole_tensors_in_one_process(saved):
    tensors = checkpointing.load_full(checkpointing.latest(saved[0]))
    want = {name.removesuffix(" "): value for name, value in saved[1].items() if name.endswith(" ")}
    assert same(dict(tensors), want)


def truncate(folder):
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    return "bytes, expected"


def flip_a_bit(folder):
    file = folder / "__2_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "changed"


def lose_a_file(folder):
    (folder / "__0_0.distcp").unlink()
    return "no such file"


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json"


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lose_a_file, lose_the_manifest])
def test_a_damaged_checkpoint_is_found(damage, run):
    newest = run / "checkpoints" / "step_00000008"
    says = damage(newest)
    assert says in checkpointing.problem(newest)
    assert checkpointing.latest(run).name == "step_00000006"


def test_falls_back_to_the_one_before(run, package, saved):
    flip_a_bit(run / "checkpoints" / "step_00000008")
    truncate(run / "checkpoints" / "step_00000006")
    results = harness.run(ranks_train.restore, 2, package, SMALLER, run)
    assert [step for step, _, _ in results] == [4, 4]
    assert all(same(state, saved[1]) for _, state, _ in results)
    assert [len(notes) for _, _, notes in results] == [2, 0]  # rank 0 speaks
    damaged = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert damaged == ["step_00000004", "step_00000006.damaged", "step_00000008.damaged"]


def test_nothing_but_damaged_checkpoints_is_an_error(run, package):
    for folder in checkpointing.checkpoints(run):
        flip_a_bit(folder)
    with pytest.raises(harness.RankError, match=r"(?s)InputError.*only damaged checkpoints.*without --resume"):
        harness.run(ranks_train.restore, 2, package, SMALLER, run)


@pytest.mark.slow
def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint_alone(run, package, saved):
    with pytest.raises(harness.RankError, match="rank 1: the process died"):
        harness.run(ranks_train.die_while_saving, 2, package, SMALLER, run, 10)
    assert checkpointing.step_of(checkpointing.latest(run)) == 8
    harness.run(ranks_train.save, 2, package, SMALLER, run, 3, [10], 5)  # over the remains
    assert checkpointing.step_of(checkpointing.latest(run)) == 10


def test_other_parameters_are_refused(run, tmp_path):
    checkpoint = tiny.make("mixtral", tmp_path / "checkpoint", num_hidden_layers=2, num_experts=6, tokenizer=False)
    package = handmade.write(checkpoint, tmp_path / "package")
    with pytest.raises(harness.RankError, match=r"(?s)InputError.*step_00000008.*Resume with the settings"):
        harness.run(ranks_train.restore, 2, package, SMALLER, run)


def test_an_empty_run_has_no_checkpoint(tmp_path):
    assert checkpointing.latest(tmp_path) is None
