"""Which tokens of a conversation are trained: those that the assistant says, up to and with its end-of-turn token.

The tokenizer's own chat template decides how a conversation reads. Where the template marks what the assistant says
(`{% generation %}`), the marks are used. Otherwise the conversation is rendered up to each assistant message, with the
generation prompt, and up to its end: what the second has and the first has not is what the model has to write.
"""

import bisect
import re
from collections.abc import Sequence
from typing import Any

from dayzero.runtime.errors import InputError

Tokens = tuple[list[int], list[bool]]  # ids, and which of them are trained
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tokenizer: Any,
    messages: Sequence[dict],
    trained: Sequence[bool],
    where: str,
    tools: list[dict] | None = None,
) -> list[Tokens]:
    """The conversation as tokens. trained: for each message, whether its tokens are (False unless the assistant's).

    One result, unless the template shows a turn differently once others follow (Qwen3 drops the reasoning of earlier
    turns): then one a trained message, each with the history as the model sees it when it answers.

    Raises InputError, beginning with `where`, if there is no template, if the template rejects the conversation, or if
    it changes the history in a way that leaves no assistant part to be found.
    """
    template = _template(tokenizer, where, tools)
    if _GENERATION.search(template):
        return [_marked(tokenizer, messages, trained, where, tools)]
    whole = _render(tokenizer, messages, where, tools)
    turns = [_turn(tokenizer, messages, i, where, tools) for i, train in enumerate(trained) if train]
    if all(whole.startswith(text) for text, _ in turns):
        return [encode_text(tokenizer, whole, [span for _, span in turns], where, special=False)]
    return [encode_text(tokenizer, text, [span], where, special=False) for text, span in turns]


def encode_text(tokenizer: Any, text: str, spans: Sequence[Span], where: str, special: bool) -> Tokens:
    """Tokens of `text`; those that share a character with a span are trained.

    spans: [start, end) in characters, in order. special: let the tokenizer add its own first and last tokens,
    untrained.
    Raises InputError for a tokenizer that cannot say where its tokens come from.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            where,
            found=f"{type(tokenizer).__name__}, which does not report the place of a token in the text",
            expected="a fast tokenizer (tokenizer.json)",
            hint="Without it the assistant's tokens cannot be told from the others.",
        )
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    firsts = [first for first, _ in spans]
    trained, reached = [], 0
    for start, end in encoded["offset_mapping"]:
        # Byte-level tokenizers report white space as (n, n): a token reaches back to the end of the one before it.
        start, reached = min(start, reached), max(end, reached)
        span = bisect.bisect_left(firsts, end) - 1
        trained.append(span >= 0 and max(start, firsts[span]) < min(end, spans[span][1]))
    return list(encoded["input_ids"]), trained


def _template(tokenizer: Any, where: str, tools: list[dict] | None) -> str:
    try:
        return tokenizer.get_chat_template(tools=tools)
    except ValueError:
        raise InputError(
            where,
            found="a conversation, and a tokenizer without a chat template",
            expected="a checkpoint with chat_template.jinja or a template in tokenizer_config.json",
            hint="A base model learns from rows with `text`, or with `prompt` and `completion`.",
        ) from None


def _render(
    tokenizer: Any, messages: Sequence[dict], where: str, tools: list[dict] | None, prompt: bool = False
) -> str:
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages) or "nothing"
        raise InputError(
            where,
            found=f"the chat template rejects this conversation ({roles}): {error}",
            expected="an order of roles that the template knows",
        ) from None


def _turn(tokenizer: Any, messages: Sequence[dict], i: int, where: str, tools: list[dict] | None) -> tuple[str, Span]:
    """(the conversation up to the end of message i, the characters of it that the assistant writes)."""
    history = _render(tokenizer, messages[:i], where, tools) if i else ""
    prompt = _render(tokenizer, messages[:i], where, tools, prompt=True) if i else ""
    text = _render(tokenizer, messages[: i + 1], where, tools)
    # A generation prompt may open what this message has not (`<think>`): the model writes all after the common part.
    pairs = enumerate(zip(prompt, text, strict=False))
    start = next((place for place, (asked, got) in pairs if asked != got), min(len(prompt), len(text)))
    if start < len(history) or len(text) <= start:
        raise InputError(
            f"{where}: messages[{i}]",
            found="the chat template renders what comes before this message differently once it is there",
            expected="a template in which a conversation begins with its own beginning",
            hint="Mark the assistant's part in the template with {% generation %} ... {% endgeneration %}.",
        )
    return text, (start, _end_of_turn(tokenizer, text))


def _end_of_turn(tokenizer: Any, text: str) -> int:
    """Where the turn ends: after its last special token, if only white space follows that; else at the very end."""
    stripped = text.rstrip()
    added = tokenizer.get_added_vocab()
    return len(stripped) if any(token and stripped.endswith(token) for token in added) else len(text)


def _marked(
    tokenizer: Any, messages: Sequence[dict], trained: Sequence[bool], where: str, tools: list[dict] | None
) -> Tokens:
    """By the template's own marks; an end-of-turn token right behind a mark is trained as well."""
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        raise InputError(where, found=f"the chat template rejects this conversation: {error}") from None
    ids = list(encoded["input_ids"])
    mask = [bool(mark) for mark in encoded["assistant_masks"]]
    runs = [i for i in range(len(ids)) if mask[i] and (i == 0 or not mask[i - 1])]
    said = [train for message, train in zip(messages, trained, strict=True) if message["role"] == "assistant"]
    if len(runs) != len(said):
        raise InputError(
            where,
            found=f"{len(runs)} parts that the chat template marks with {{% generation %}}",
            expected=f"{len(said)}, one an assistant message",
        )
    special = set(tokenizer.get_added_vocab().values())
    for first, train in zip(runs, said, strict=True):
        last = first
        while last < len(ids) and mask[last]:
            mask[last] = train
            last += 1
        closed = any(token in special for token in ids[max(first, last - 2) : last])
        if last < len(ids) and ids[last] in special and not closed:
            mask[last] = train
    return ids, mask
