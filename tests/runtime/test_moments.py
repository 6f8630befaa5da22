"""Moments in bfloat16 and 8 bits: how far off they are, that they do not drift, and that no mesh changes them."""

import handmade
import harness
import pytest
import ranks_optimizer
import tiny
import torch

from dayzero.runtime.config import Optimizer
from dayzero.runtime.moments import BLOCK, Moments, Noise
from dayzero.runtime.optimizer import CHUNK, make_optimizer

ROWS = slice(0, None)


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kept, value, root, seed=0):
    """What is read after `value` was written."""
    moments, parameter = Moments(kept), torch.nn.Parameter(value)
    state = moments.zeros(parameter, "m")
    moments.write(state, "m", value, ROWS, root, Noise(value, seed))
    return moments.read(state, "m", value.device, ROWS, root), state


def largest_of_block(value):
    width = value.shape[-1]
    blocks = [part.abs().amax(-1, keepdim=True).expand(-1, part.shape[-1]) for part in value.split(BLOCK, -1)]
    return torch.cat(blocks, -1)[..., :width]


@pytest.mark.parametrize("seed", [0, 1])
def test_errors_are_as_stated(seed):
    value = drawn((50, 600)) * torch.logspace(-6, 3, 50).unsqueeze(1)
    got, _ = stored("bf16", value, False, seed)
    assert float(((got - value) / value).abs().max()) < 2**-7
    got, state = stored("8bit", value, False, seed)
    assert float(((got - value).abs() / largest_of_block(value)).max()) < 1 / 70
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "m": ((50, 600), torch.uint8), "m.scale": ((50, 3), torch.float32),
    }  # fmt: skip
    second = value.square()
    got, _ = stored("8bit", second, True, seed)
    assert float(((got.sqrt() - value.abs()).abs() / largest_of_block(value)).max()) < 1 / 140
    assert float(got[second > 0].min()) > 0


def test_what_was_stored_is_stored_again_unchanged():
    for root in (False, True):
        once, _ = stored("8bit", drawn((20, 300)).abs(), root)
        again, _ = stored("8bit", once, root, seed=5)
        assert torch.allclose(again, once, rtol=1e-6, atol=0)
    nothing, _ = stored("8bit", torch.zeros(3, 5), root=True)
    assert torch.equal(nothing, torch.zeros(3, 5))


@pytest.mark.parametrize(("kept", "root"), [("bf16", False), ("8bit", False), ("8bit", True)])
def test_an_average_that_moves_less_than_a_rounding_step_still_moves(kept, root):
    """Beta 0.999 towards 4 from 1: to the nearest, none of these would ever leave 1."""
    state, moments = None, Moments(kept)
    value = torch.ones(4, 256)
    for step in range(700):
        if state is None:
            state = moments.zeros(torch.nn.Parameter(value), "m")
        else:
            value = moments.read(state, "m", value.device, ROWS, root)
        value = 0.999 * value + 0.001 * 4
        moments.write(state, "m", value, ROWS, root, Noise(value, step))
    want = 4 - 3 * 0.999**700
    assert float(value.mean()) == pytest.approx(want, rel=0.03)


def test_noise_is_even_and_independent():
    value = drawn((300, 400))
    noise = torch.stack([Noise(value, seed).bits(value, 0).double() for seed in (0, 1, 2)]) / 65536
    assert noise.mean(dim=(1, 2)).tolist() == pytest.approx([0.5] * 3, abs=0.005)
    assert noise.std(dim=(1, 2)).tolist() == pytest.approx([12**-0.5] * 3, abs=0.005)
    shifted = torch.stack([*noise, noise[0].roll(1, 0), noise[0].roll(1, 1)]).flatten(1)
    assert float((torch.corrcoef(shifted) - torch.eye(5)).abs().max()) < 0.02
    assert torch.equal(Noise(value, 3).bits(value[7:9], 7), Noise(value, 3).bits(value, 0)[7:9])


def trained(settings, steps=60, seed=0):
    """(loss, bytes of the state) of a small network after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.Linear(96, 32))
    x, teacher = drawn((256, 32), 1), drawn((32, 32), 2) / 5
    y = torch.tanh(x @ teacher)
    optimizer = make_optimizer(model, settings)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    size = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
    return float(loss.detach()), size


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize(("kept", "share"), [("bf16", 0.55), ("8bit", 0.35)])
def test_training_is_as_good_with_small_states(kept, share, betas):
    loss, size = trained(Optimizer(lr=3e-3, betas=betas))
    small_loss, small_size = trained(Optimizer(lr=3e-3, betas=betas, states=kept))
    assert small_loss == pytest.approx(loss, rel=0.02)
    assert small_size < share * size
    assert trained(Optimizer(lr=3e-3, betas=betas), steps=1)[0] > 3 * loss  # it has learned


@pytest.mark.parametrize("kept", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_on_the_host_change_nothing(name, kept):
    here = trained(Optimizer(name=name, lr=3e-3, states=kept), steps=5)
    assert trained(Optimizer(name=name, lr=3e-3, states=kept, offload=True), steps=5) == here


def test_large_parameters_go_a_few_rows_at_a_time(monkeypatch):
    assert CHUNK > 32 * 96
    for name in ("adamw", "muon"):
        settings = Optimizer(name=name, lr=3e-3, states="8bit")
        at_once = trained(settings, steps=4)
        with monkeypatch.context() as patch:
            patch.setattr("dayzero.runtime.optimizer.CHUNK", 200)
            assert trained(settings, steps=4) == at_once


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moments")
    config = {"num_hidden_layers": 2, "num_experts": 6, "tokenizer": False}
    return handmade.write(tiny.make("mixtral", folder / "checkpoint", **config), folder / "package")


@pytest.mark.slow
def test_every_mesh_rounds_alike(package):
    """The same gradients give the same codes wherever the shards lie, but for what the last bit of a sum decides."""
    cases = [Optimizer(lr=0.05, weight_decay=0.1, states=kept) for kept in ("bf16", "8bit")]
    one, *_ = harness.run(ranks_optimizer.steps_of, 1, package, [((1, 1, 1), case, torch.float32) for case in cases])
    layouts = ((2, 2, 2), (1, 2, 2, 2))  # the second cuts rows, which are shorter than a block
    settings = [(layout, case, torch.float32) for layout in layouts for case in cases]
    one = one * len(layouts)
    every = harness.run(ranks_optimizer.steps_of, 4, package, settings)
    for of_rank in every:
        for want, got in zip(one, of_rank, strict=True):
            assert got.keys() == want.keys()
            for key, value in want.items():
                assert got[key].dtype == value.dtype
                if value.dtype in (torch.uint8, torch.bfloat16):
                    assert float((got[key] != value).float().mean()) < 2e-3, key
                else:
                    assert torch.allclose(got[key], value, rtol=1e-3, atol=1e-5), key
            kinds = {value.dtype for value in want.values()}
    assert kinds == {torch.uint8, torch.float32}
    assert all(of_rank[1][key].equal(every[0][1][key]) for of_rank in every for key in of_rank[1])  # copies stay copies


@pytest.mark.parametrize(
    ("shape", "dim"), [((5, 600), 1), ((5, 601), 1), ((4, 4), 1), ((3, 1024), 1), ((3, 4, 300), 2), ((5, 300), 0)]
)
def test_rows_cut_within_blocks_have_the_codes_of_whole_rows(shape, dim):
    """Bit for bit, whatever the rows' length; one rank's last part may be empty."""
    alone = harness.run(ranks_optimizer.cut_rows, 1, shape, dim)[0]
    for of_rank in harness.run(ranks_optimizer.cut_rows, 3 if shape == (4, 4) else 2, shape, dim):
        for want, got in zip(alone, of_rank, strict=True):
            assert got[0].dtype == torch.uint8
            assert len(got[0].unique()) > 1
            assert got[1].shape == (*shape[:-1], -(-shape[-1] // BLOCK))
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
