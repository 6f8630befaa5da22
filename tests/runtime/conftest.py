"""A tiny Mixtral, its hand-written package, and two files of examples, made once; models that plans are made for."""

from types import SimpleNamespace

import handmade
import large_model
import pytest
import tiny
import torch
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


@pytest.fixture(scope="session")
def spec(tmp_path_factory):
    """A small model with routed experts, in bfloat16."""
    folder = tmp_path_factory.mktemp("qwen")
    return handmade.specify(tiny.make("qwen3_moe", folder, tokenizer=False, dtype=torch.bfloat16))


@pytest.fixture(scope="session")
def large():
    return large_model.large()
