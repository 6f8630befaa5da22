"""Training files: every format, which tokens are trained, and what a bad row says."""

import json
import subprocess
import sys

import pytest
import tiny
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from dayzero.runtime.data import NO_LOSS, load_tokenizer, read_examples
from dayzero.runtime.errors import InputError

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
)
# As Qwen3's: earlier answers lose their reasoning, the last one always has some.
FORGETS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
USER = {"role": "user", "content": "What is  a list?"}
HELLO = {"role": "assistant", "content": "  A list \n\n  of items, é."}


@pytest.fixture
def tokenizer():
    """A fresh one a test: some change the template."""
    made = tiny.load("demo/checkpoint.py").tiny_tokenizer(tiny.VOCABULARY)
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        **made.special_tokens_map,
        chat_template=made.chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def trained(tokenizer, example):
    """The trained parts of an example as text, one a run of trained tokens."""
    runs = [[]]
    for label in example.labels:
        if label == NO_LOSS:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


def said(*messages):
    return [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]


def test_labels_are_the_next_tokens_of_what_the_assistant_says(tokenizer, write):
    messages = [{"role": "system", "content": "Be brief."}, USER, HELLO, USER, {"role": "assistant", "content": "Yes"}]
    (example,) = read_examples(write({"messages": messages}), tokenizer, max_length=500)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert example.ids == whole[:-1]
    assert all(label in (NO_LOSS, following) for label, following in zip(example.labels, whole[1:], strict=True))
    assert trained(tokenizer, example) == said(*messages)


def test_white_space_tokens_without_offsets_are_trained(tokenizer, write):
    path = write({"messages": [USER, HELLO]})
    (want,) = read_examples(path, tokenizer, max_length=500)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    try:
        (got,) = read_examples(path, tokenizer, max_length=500)
    finally:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    assert got == want


def test_generation_marks_and_rendering_agree(tokenizer, write):
    other = {"role": "assistant", "content": "No", "loss": False}
    path = write({"messages": [USER, HELLO, USER, other, USER, HELLO]})
    (want,) = read_examples(path, tokenizer, max_length=500)
    tokenizer.chat_template = MARKED
    (got,) = read_examples(path, tokenizer, max_length=500)
    assert got == want
    assert trained(tokenizer, got) == said(HELLO, HELLO)


@pytest.mark.parametrize("silent", [{"loss": False}, {"weight": 0}])
def test_messages_without_loss(tokenizer, write, silent):
    path = write({"messages": [USER, {**HELLO, **silent}, USER, {"role": "assistant", "content": "Yes"}]})
    (example,) = read_examples(path, tokenizer, max_length=500)
    assert trained(tokenizer, example) == ["Yes<|im_end|>"]


def test_a_template_that_forgets_gives_one_example_a_turn(tokenizer, write):
    tokenizer.chat_template = FORGETS
    answers = [{"role": "assistant", "content": word} for word in ("one", "two")]
    examples = read_examples(write({"messages": [USER, answers[0], USER, answers[1]]}), tokenizer, max_length=500)
    assert examples.split == 1
    assert len(examples) == 2
    for example, answer in zip(examples, answers, strict=True):
        (text,) = trained(tokenizer, example)
        assert text == f"\n</think>\n\n{answer['content']}<|im_end|>"  # "<think>\n" was in the prompt
    assert "<think>" not in tokenizer.decode(examples[1].ids).split("two")[0].split("one")[0]


@pytest.mark.parametrize("marks", [True, False])
def test_a_template_without_a_prefix_property(tokenizer, write, marks):
    tokenizer.chat_template = "{{ messages | length }} messages" + (MARKED if marks else tokenizer.chat_template)
    path = write({"messages": [USER, HELLO]})
    if marks:
        assert trained(tokenizer, read_examples(path, tokenizer, max_length=500)[0]) == said(HELLO)
        return
    with pytest.raises(InputError) as error:
        read_examples(path, tokenizer, max_length=500)
    assert "train.jsonl:1: messages[1]" in str(error.value)
    assert "{% generation %}" in str(error.value)


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": [USER, HELLO]}, "messages"),
        ({"messages": [USER, {**HELLO, "content": [{"type": "text", "text": HELLO["content"]}]}]}, "messages"),
        (
            {
                "conversations": [
                    {"from": "human", "value": USER["content"]},
                    {"from": "gpt", "value": HELLO["content"]},
                ]
            },
            "sharegpt",
        ),
        ({"conversations": [USER, HELLO]}, "sharegpt"),
        ({"instruction": "What is", "input": "a list?", "output": HELLO["content"]}, "alpaca"),
        ({"query": USER["content"], "response": HELLO["content"]}, "query-response"),
        ({"prompt": [USER], "completion": [HELLO]}, "prompt-completion"),
        ({"prompt": USER["content"], "completion": HELLO["content"]}, "prompt-completion"),
    ],
)
def test_every_format_trains_the_answer(tokenizer, write, row, format):
    examples = read_examples(write(row), tokenizer, max_length=500)
    assert (examples.format, examples.rows) == (format, 1)
    assert trained(tokenizer, examples[0]) == said(HELLO)


def test_history_and_system(tokenizer, write):
    row = {"system": "Brief.", "history": [["1?", "one"]], "query": "2?", "response": "two"}
    (example,) = read_examples(write(row), tokenizer, max_length=500)
    assert tokenizer.decode(example.ids).startswith("<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n1?")
    assert trained(tokenizer, example) == ["one<|im_end|>", "two<|im_end|>"]


def test_plain_text_is_all_trained_and_closed(tokenizer, write):
    (example,) = read_examples(write({"text": "a list of items"}), tokenizer, max_length=500)
    assert example.ids + example.labels[-1:] == [*tokenizer.encode("a list of items"), tokenizer.eos_token_id]
    assert example.labels[:-1] == example.ids[1:]


def test_a_prompt_and_its_completion_meet_inside_a_token(tokenizer, write):
    (example,) = read_examples(write({"prompt": "the ", "completion": "list"}), tokenizer, max_length=500)
    assert trained(tokenizer, example)[0].lstrip() == "list<|im_end|>"


def test_rows_are_truncated_dropped_and_counted(tokenizer, write):
    silent = {"messages": [USER, {**HELLO, "loss": False}]}
    path = write({"messages": [USER, HELLO]}, {"messages": [{**USER, "content": "x" * 900}, HELLO]}, silent)
    examples = read_examples(path, tokenizer, max_length=40)
    assert [len(example.ids) for example in examples] == [40]
    assert (examples.rows, examples.truncated, examples.dropped) == (3, 3, 2)
    assert "3 truncated, 2 dropped" in examples.summary()
    with pytest.raises(InputError, match="no trained token in any of 3 rows"):
        read_examples(path, tokenizer, max_length=5)


def test_a_json_list_and_blank_lines(tokenizer, write):
    rows = [{"text": "one"}, {"text": "two"}]
    want = list(read_examples(write(*rows), tokenizer, max_length=9))
    assert list(read_examples(write(rows[0], "", rows[1]), tokenizer, max_length=9)) == want
    assert list(read_examples(write(json.dumps(rows, indent=1), name="train.json"), tokenizer, max_length=9)) == want


GOOD = {"messages": [USER, HELLO]}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"messages": [', ["train.jsonl:17", "not JSON"]),
        ("[1, 2]", ["train.jsonl:17", "a list", "a JSON object"]),
        ({"text": "a"}, ["train.jsonl:17: messages", "no such field, only text"]),
        ({"messages": "hi"}, ["train.jsonl:17: messages", "a string, 'hi'", "a list of messages"]),
        ({"messages": [USER]}, ["train.jsonl:17", "roles user", "at least one assistant message"]),
        ({"messages": []}, ["train.jsonl:17", "roles none"]),
        ({"messages": [{"role": "bard", "content": ""}]}, ["messages[0].role", "'bard'", "one of system"]),
        ({"messages": [USER, {"role": "assistant"}]}, ["train.jsonl:17: messages[1].content", "null", "a string"]),
        ({"messages": [USER, {**HELLO, "weight": 0.5}]}, ["messages[1].weight", "0.5", "true or false"]),
        ({"messages": [{**USER, "content": [{"type": "image"}]}, HELLO]}, ["content[0]", "'image'", "type text"]),
        ({"messages": [USER, HELLO], "tools": 3}, ["train.jsonl:17: tools", "a number, 3"]),
    ],
)
def test_a_bad_row_names_line_and_field(tokenizer, write, bad, says):
    with pytest.raises(InputError) as error:
        read_examples(write(*[GOOD] * 16, bad), tokenizer, max_length=500)
    assert all(part in str(error.value) for part in says), str(error.value)


def test_bad_files(tokenizer, write, tmp_path):
    cases = {"missing": "no such file", "empty": "an empty file", "unknown": "fields foo", "bytes": "not UTF-8"}
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "unknown").write_text('{"foo": 1}')
    (tmp_path / "bytes").write_bytes(b'{"text": "\xff"}')
    for name, found in cases.items():
        with pytest.raises(InputError, match=found):
            read_examples(tmp_path / name, tokenizer, max_length=9)


def test_a_template_that_rejects_the_conversation(tokenizer, write):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        read_examples(write(GOOD), tokenizer, max_length=9)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="without a chat template"):
        read_examples(write(GOOD), tokenizer, max_length=9)


def test_load_tokenizer(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").encode("a list") == tokenizer.encode("a list")
    (tmp_path / "bare").mkdir()
    for bad in ("bare", "none"):
        with pytest.raises(InputError, match=bad):
            load_tokenizer(tmp_path / bad)


@pytest.mark.slow
def test_without_transformers(tmp_path):
    code = f"""
import sys
sys.modules["transformers"] = None
import dayzero.runtime.data, dayzero.runtime.packing, dayzero.runtime.lora, pathlib
assert not {{"datasets", "triton", "langchain"}} & set(sys.modules)
dayzero.runtime.data.load_tokenizer(pathlib.Path({str(tmp_path)!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install dayzero[train]" in run.stderr
