"""Training files to examples: a JSON object a line (or one JSON list), in any of the formats of `formats`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.runtime.chat import Tokens, encode_chat, encode_text
from dayzero.runtime.errors import InputError
from dayzero.runtime.formats import Conversation, Format, Passage, detect, shown

NO_LOSS = -100


@dataclass(frozen=True)
class Example:
    """One document. labels[t] is the token that follows ids[t], or NO_LOSS where that token is not trained."""

    ids: list[int]
    labels: list[int]


@dataclass(eq=False)
class Examples(list[Example]):
    """The examples of a file, and what became of its rows.

    truncated: rows longer than max_length. dropped: rows with no trained token (left). split: rows that became several
    examples, one a turn, because the chat template shows a turn differently once others follow.
    """

    format: str
    rows: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self)

    @property
    def trained_tokens(self) -> int:
        return sum(label != NO_LOSS for example in self for label in example.labels)

    def summary(self) -> str:
        """One line for the log."""
        parts = [f"{self.rows} rows ({self.format})", f"{self.tokens} tokens, {self.trained_tokens} trained"]
        counts = {"truncated": self.truncated, "dropped without a trained token": self.dropped}
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        if self.split:
            parts.append(f"{self.split} split by turn as their chat template needs")
        return ", ".join(parts)


def load_tokenizer(checkpoint: Path) -> Any:
    """The checkpoint's own tokenizer. Runs no code of the checkpoint and fetches nothing.

    Raises InputError if transformers is not installed, or the folder has no tokenizer that it can read.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError(
            "transformers is not installed",
            expected="it reads the checkpoint's tokenizer",
            hint="Install it with: pip install dayzero[train]",
        ) from None
    if not checkpoint.is_dir():
        raise InputError(str(checkpoint), found="no such folder", expected="a Hugging Face checkpoint folder")
    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise InputError(
            str(checkpoint),
            found=f"no readable tokenizer ({' '.join(str(error).split())[:200]})",
            expected="tokenizer.json and tokenizer_config.json",
            hint="A tokenizer that needs code from the checkpoint is not run: convert it to tokenizer.json first.",
        ) from None


def read_examples(path: Path, tokenizer: Any, *, max_length: int) -> Examples:
    """The file's rows as examples of at most `max_length` tokens, in the file's order.

    The format is that of the first row. Raises InputError with file and line for a row that is not JSON, lacks a field
    or has one of another type, or has no assistant message; and for a file that is missing, empty, or has no trained
    token at all.
    """
    examples, format = None, None
    for where, row in _rows(path):
        if not isinstance(row, dict):
            raise InputError(where, found=shown(row), expected='a JSON object such as {"messages": [...]}')
        if examples is None or format is None:
            format = detect(row, where)
            examples = Examples(format.name)
        _add(examples, _encode(format, row, where, tokenizer), max_length)
    if examples is None:
        raise InputError(str(path), found="an empty file", expected="at least one row")
    if not examples:
        raise InputError(
            str(path),
            found=f"no trained token in any of {examples.rows} rows",
            expected=f"an answer within the first {max_length} tokens of a row",
            hint="Raise the maximal length, or check `loss` and `weight` of the messages.",
        )
    return examples


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, value) of every row."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise InputError(str(path), found=found, expected="a training file (JSON lines)")
    with path.open("rb") as stream:
        first = stream.read(4)
        if first == b"PAR1":
            raise InputError(
                str(path),
                found="a Parquet file",
                expected="JSON lines",
                hint="Convert it with: datasets.Dataset.from_parquet(FILE).to_json(FILE.jsonl)",
            )
        stream.seek(0)
        if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            rows = _parse(stream.read(), path, 1)
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{path}:{number}", _parse(line.strip(), path, number)


def _parse(text: bytes, path: Path, line: int) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line += text[: error.start].count(b"\n")
        raise InputError(f"{path}:{line}", found=f"not UTF-8 ({error.reason})", expected="JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{line + error.lineno - 1}",
            found=f"not JSON: {error.msg} at column {error.colno}",
            expected="one JSON object a line",
        ) from None


def _encode(format: Format, row: dict, where: str, tokenizer: Any) -> list[Tokens]:
    if missing := [name for name in format.fields if name not in row]:
        raise InputError(
            f"{where}: {missing[0]}",
            found=f"no such field, only {', '.join(map(str, row)) or 'none'}",
            expected=f"{' + '.join(format.fields)}, as in the first row",
        )
    match format.read(row, where):
        case Conversation(messages, trained, tools):
            return encode_chat(tokenizer, messages, trained, where, tools)
        case Passage(prompt, completion):
            span = (len(prompt), len(prompt) + len(completion))
            ids, mask = encode_text(tokenizer, prompt + completion, [span], where, special=True)
            if completion and tokenizer.eos_token_id is not None:
                if ids[-1:] == [tokenizer.eos_token_id]:
                    ids, mask = ids[:-1], mask[:-1]
                ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
            return [(ids, mask)]


def _add(examples: Examples, encoded: list[Tokens], max_length: int) -> None:
    """Shifts, truncates and counts one row."""
    before = len(examples)
    for ids, mask in encoded:
        labels = [token if train else NO_LOSS for token, train in zip(ids, mask, strict=True)][1 : max_length + 1]
        if any(label != NO_LOSS for label in labels):
            examples.append(Example(ids[: len(labels)], labels))
    added = len(examples) - before
    examples.rows += 1
    examples.truncated += any(len(ids) - 1 > max_length for ids, _ in encoded)
    examples.dropped += added == 0
    examples.split += added > 1
