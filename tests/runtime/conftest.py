"""A tiny Mixtral, its hand-written package, and two files of examples, made once."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import handmade
import pytest
import tiny

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "an", "old", "dog", "run", "after", "its", "tail"]


def write_examples(file: Path, rows: int, seed: int) -> Path:
    draw = random.Random(seed)
    with file.open("w") as stream:
        for _ in range(rows):
            question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return file


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
