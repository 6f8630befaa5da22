"""Rows of a training file: which of the usual formats they have, and what each row says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.runtime.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    **{role: role for role in ROLES},
}


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, and which of them are trained."""

    messages: list[dict]
    trained: list[bool]
    tools: list[dict] | None = None


@dataclass(frozen=True)
class Passage:
    """Plain text without a template: the prompt is context, the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Format:
    """fields: what every row must have. read(row, where) raises InputError for a row it cannot read."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], Conversation | Passage] = field(repr=False)


def detect(row: Mapping[str, Any], where: str) -> Format:
    """The format whose fields the row has. Raises InputError, naming all formats, if there is none."""
    for format in FORMATS:
        if all(name in row for name in format.fields):
            return format
    known = "; ".join(" + ".join(format.fields) for format in FORMATS)
    raise InputError(where, found=f"fields {', '.join(map(str, row)) or 'none'}", expected=f"one of: {known}")


def shown(value: Any) -> str:
    """A value as an error message shows it: its JSON type, and the value if it is short."""
    kinds = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    kind = kinds.get(type(value), "a list" if isinstance(value, list) else "an object")
    text = repr(value)
    return kind if value is None or len(text) > 40 else f"{kind}, {text}"


def _text(row: Mapping[str, Any], name: str, where: str, optional: bool = False) -> str:
    value = row.get(name)
    if isinstance(value, str) or (value is None and optional):
        return value or ""
    raise InputError(f"{where}: {name}", found=shown(value), expected="a string")


def _conversation(messages: list[dict], loss: list[bool], where: str, tools: Any = None) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(
            where,
            found=f"roles {', '.join(message['role'] for message in messages) or 'none'}",
            expected="at least one assistant message",
            hint="Only what the assistant says is trained, so this row teaches nothing.",
        )
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{where}: tools", found=shown(tools), expected="a list of tool descriptions")
    trained = [train and message["role"] == "assistant" for message, train in zip(messages, loss, strict=True)]
    return Conversation(messages, trained, tools or None)


def _wants_loss(message: Mapping[str, Any], where: str) -> bool:
    for name in ("loss", "weight"):
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise InputError(f"{where}.{name}", found=shown(value), expected="true or false (or 1 or 0)")
        if value is not None and not value:
            return False
    return True


def _content(value: Any, where: str, may_be_empty: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and may_be_empty:
        return ""
    if isinstance(value, list):
        for i, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = part.get("type") if isinstance(part, dict) else part
                raise InputError(f"{where}[{i}]", found=f"a part of type {found!r}", expected="parts of type text")
        return "".join(part["text"] for part in value)
    raise InputError(where, found=shown(value), expected="a string, or a list of text parts")


def _messages(row: Mapping[str, Any], where: str, name: str = "messages") -> Conversation:
    rows = row[name]
    if not isinstance(rows, list) or not all(isinstance(message, dict) for message in rows):
        raise InputError(f"{where}: {name}", found=shown(rows), expected="a list of messages with role and content")
    messages, loss = [], []
    for i, message in enumerate(rows):
        at = f"{where}: {name}[{i}]"
        if message.get("role") not in ROLES:
            raise InputError(f"{at}.role", found=shown(message.get("role")), expected=f"one of {', '.join(ROLES)}")
        calls = bool(message.get("tool_calls"))
        content = _content(message.get("content"), f"{at}.content", may_be_empty=calls)
        rest = {key: value for key, value in message.items() if key not in ("loss", "weight", "content")}
        messages.append({**rest, "content": content})
        loss.append(_wants_loss(message, at))
    return _conversation(messages, loss, where, row.get("tools"))


def _sharegpt(row: Mapping[str, Any], where: str) -> Conversation:
    rows = row["conversations"]
    if isinstance(rows, list) and rows and all(isinstance(turn, dict) and "role" in turn for turn in rows):
        return _messages(row, where, "conversations")
    if not isinstance(rows, list) or not all(isinstance(turn, dict) for turn in rows):
        raise InputError(f"{where}: conversations", found=shown(rows), expected="a list of turns with from and value")
    system = _text(row, "system", where, optional=True)
    messages = [{"role": "system", "content": system}] if system else []
    loss = [True] * len(messages)
    for i, turn in enumerate(rows):
        at = f"{where}: conversations[{i}]"
        role = _SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            expected = f"one of {', '.join(_SHAREGPT_ROLES)}"
            raise InputError(f"{at}.from", found=shown(turn.get("from")), expected=expected)
        messages.append({"role": role, "content": _content(turn.get("value"), f"{at}.value", may_be_empty=False)})
        loss.append(_wants_loss(turn, at))
    return _conversation(messages, loss, where)


def _history(row: Mapping[str, Any], where: str) -> list[dict]:
    system = _text(row, "system", where, optional=True)
    messages = [{"role": "system", "content": system}] if system else []
    history = row.get("history") or []
    pairs = isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history)
    if not pairs or not all(isinstance(text, str) for pair in history for text in pair):
        raise InputError(f"{where}: history", found=shown(history), expected="a list of [question, answer]")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _exchange(row: Mapping[str, Any], where: str, question: str, answer: str) -> Conversation:
    messages = _history(row, where)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(messages, [True] * len(messages), where)


def _alpaca(row: Mapping[str, Any], where: str) -> Conversation:
    instruction, given = _text(row, "instruction", where), _text(row, "input", where, optional=True)
    question = f"{instruction}\n{given}" if given else instruction
    return _exchange(row, where, question, _text(row, "output", where))


def _query_response(row: Mapping[str, Any], where: str) -> Conversation:
    return _exchange(row, where, _text(row, "query", where), _text(row, "response", where))


def _prompt_completion(row: Mapping[str, Any], where: str) -> Conversation | Passage:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        both = _messages({**row, "both": row["prompt"] + row["completion"]}, where, "both")
        asked = len(row["prompt"])
        trained = [train and i >= asked for i, train in enumerate(both.trained)]
        return Conversation(both.messages, trained, both.tools)
    return Passage(_text(row, "prompt", where), _text(row, "completion", where))


def _plain_text(row: Mapping[str, Any], where: str) -> Passage:
    return Passage("", _text(row, "text", where))


FORMATS = (
    Format("messages", ("messages",), _messages),
    Format("sharegpt", ("conversations",), _sharegpt),
    Format("prompt-completion", ("prompt", "completion"), _prompt_completion),
    Format("alpaca", ("instruction", "output"), _alpaca),
    Format("query-response", ("query", "response"), _query_response),
    Format("text", ("text",), _plain_text),
)
