"""Files of examples whose words the tokenizer of tests/tiny.py knows."""

import json
import random
from pathlib import Path

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "an", "old", "dog", "run", "after", "its", "tail"]


def write_examples(file: Path, rows: int, seed: int) -> Path:
    """One question and one answer a row, drawn; returns `file`."""
    draw = random.Random(seed)
    with file.open("w") as stream:
        for _ in range(rows):
            question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return file
