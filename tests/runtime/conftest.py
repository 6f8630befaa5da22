"""A tiny Mixtral, its hand-written package, and two files of examples, made once."""

from types import SimpleNamespace

import handmade
import pytest
import tiny
from examples import write_examples


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """checkpoint, package, data, eval_data; and the settings that suit them."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = tiny.make("mixtral", folder / "checkpoint", num_hidden_layers=2)
    return SimpleNamespace(
        checkpoint=checkpoint,
        package=handmade.write(checkpoint, folder / "mixtral"),
        data=write_examples(folder / "train.jsonl", 60, seed=0),
        eval_data=write_examples(folder / "eval.jsonl", 12, seed=1),
        settings=[
            "data.max_length=96",
            "data.tokens_per_rank=128",
            "log.tensorboard=false",
            "train.precision=fp32",
            "optimizer.lr=3e-3",
            "optimizer.warmup=2",
        ],
    )
