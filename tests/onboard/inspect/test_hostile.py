"""Files that are damaged or made to deceive: one message, in bounded time and memory, nothing written, nothing run."""

import json
import os
import resource
import sys
import time

import hostile
import pytest
import skeleton
from rich.console import Console

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.inspect.diff import diff_checkpoints
from dayzero.onboard.inspect.html import render_inspection
from dayzero.onboard.inspect.lookup import look_up
from dayzero.onboard.inspect.table import print_diff, print_ledger, print_tensor
from dayzero.runtime.errors import InputError

LONGEST = 1.5  # seconds for one input, on a busy machine
_RUNS_OR_WRITES = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
_seen: list[str] | None = None


def _audit(event, arguments):
    if _seen is None:
        return
    if event in _RUNS_OR_WRITES or event in {"os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.chmod"}:
        _seen.append(f"{event} {arguments}")
    elif event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _seen.append(f"open {arguments}")


sys.addaudithook(_audit)  # there is no way to take it back; it looks only while _seen is a list


def attempt(folder):
    """The refusal, or None where the checkpoint is read, described and printed. Any other exception is a failure."""
    try:
        checkpoint = read_checkpoint(folder)
        ledger = classify(checkpoint)
    except InputError as error:
        return error
    json.dumps(ledger.summary(), allow_nan=False)
    ledger.model_dump_json()
    return None


def show(folder, console):
    """Everything else that `inspect` does with a checkpoint."""
    try:
        checkpoint = read_checkpoint(folder)
        ledger = classify(checkpoint)
    except InputError:
        return
    name = next(iter(checkpoint.headers))
    print_ledger(console, checkpoint, ledger)
    print_tensor(console, look_up(ledger, checkpoint, name))
    print_diff(console, diff_checkpoints(checkpoint, checkpoint, (ledger, ledger)))
    render_inspection(checkpoint.architecture, ledger)


def check_message(error):
    text = str(error)
    assert text.count("\n") <= 3, text
    assert len(text) < 2000, text
    assert all(line.isprintable() for line in text.splitlines()), repr(text)
    assert "Traceback" not in text


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_files(tmp_path, monkeypatch, count):
    global _seen
    folder = tmp_path / "checkpoint"
    sound = hostile.write(folder)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert attempt(folder) is None
    text = (tmp_path / "out").open("w", encoding="utf-8")
    console = Console(file=text, width=80)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, slowest = 0, 0.0
    for number, (name, content) in enumerate(hostile.mutations(sound, seed=count, count=count)):
        (folder / name).write_bytes(content)
        _seen, start = [], time.perf_counter()
        try:
            error = attempt(folder)
        finally:
            seen, _seen = _seen, None
        slowest = max(slowest, time.perf_counter() - start)
        assert not seen, (number, name, seen)
        if error is not None:
            refused += 1
            check_message(error)
        elif number % 40 == 0:
            show(folder, console)
        (folder / name).write_bytes(sound[name])
    text.close()
    assert slowest < LONGEST
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert 0.5 < refused / count < 0.98  # both sides are exercised
    assert sorted(file.name for file in folder.iterdir()) == sorted(sound)
    assert list((tmp_path / "cwd").iterdir()) == []
    assert not {"\x1b", "\x07", "\r", "\b"} & set((tmp_path / "out").read_text())


@pytest.fixture
def folder(tmp_path):
    hostile.write(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def refused(folder, *says):
    before = sorted((file.name, file.lstat().st_size) for file in folder.iterdir())
    start = time.perf_counter()
    error = attempt(folder)
    assert error is not None
    check_message(error)
    assert time.perf_counter() - start < LONGEST
    for text in says:
        assert text in str(error), str(error)
    assert sorted((file.name, file.lstat().st_size) for file in folder.iterdir()) == before


def with_header(folder, change):
    """The first shard with another header: a function of the old one, or its bytes."""
    file = folder / hostile.SHARDS[0]
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = change if isinstance(change, bytes) else json.dumps(change(json.loads(content[8 : 8 + length]))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def entry(name, **changes):
    def change(header):
        return {**header, name: {**header[name], **changes}}

    return change


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (entry(NORM, data_offsets=[0, 32]), "shared with another tensor"),
        (entry(NORM, data_offsets=[2**63, 2**63 + 32]), "bytes"),
        (entry(NORM, data_offsets=[-32, 0]), "at"),
        (entry(NORM, data_offsets=[True, 33]), "data_offsets"),
        (entry(NORM, shape=[2**63, 2**63]), "shape"),
        (entry(NORM, shape=[0] * 33), "at most 32"),
        (entry(NORM, shape=[2**62, 4, 0]), "bytes"),
        (entry(NORM, dtype="F33"), "dtype 'F33'"),
        (entry(NORM, dtype="x" * 10_000), "dtype"),
        (entry(NORM, more=1), "dtype, shape and data_offsets"),
        (lambda header: {name: value for name, value in header.items() if name != NORM}, "a gap before them"),
        (lambda header: {"dtype": header[NORM], "shape": header[NORM], "data_offsets": header[NORM]}, "header"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"\xff": 1}', "cannot be read"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}', "stands twice"),
        (b'{"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}', "not whole"),
        (b'{"a": {"dtype": "U8", "shape": [1e999], "data_offsets": [0, 1]}}', "not whole"),
        (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', "NaN"),
    ],
    ids=range(20),
)
def test_headers(folder, change, says):
    with_header(folder, change)
    refused(folder, hostile.SHARDS[0], says)


@pytest.mark.parametrize("length", [0, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file(folder, length):
    file = folder / hostile.SHARDS[0]
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refused(folder, hostile.SHARDS[0])


NO_NAMES = [payload for payload in hostile.PAYLOADS if set(payload) & set("'\"{}$<>()\n\x1b\\\ud800")]
TEXTS = [payload for payload in hostile.PAYLOADS if payload != "\ud800"]


@pytest.mark.parametrize("name", NO_NAMES, ids=range(len(NO_NAMES)))
def test_tensor_names_are_names(folder, name):
    with_header(folder, lambda header: {name if key == NORM else key: value for key, value in header.items()})
    refused(folder, "a tensor named" if name.isprintable() else hostile.SHARDS[0])


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("../elsewhere", "inside the checkpoint folder"),
        ("/etc/passwd", "inside the checkpoint folder"),
        ("a/b.safetensors", "inside the checkpoint folder"),
        ("x\n.safetensors", "inside the checkpoint folder"),
        ("y" * 300, "inside the checkpoint folder"),
        ("..", "inside the checkpoint folder"),
        ("", "inside the checkpoint folder"),
        (None, "inside the checkpoint folder"),
        ({"a": [1]}, "inside the checkpoint folder"),
        ("gone.safetensors", "no such file"),
        ("config.json", "safetensors"),
    ],
    ids=range(11),
)
def test_places_in_the_index(folder, place, says):
    index = json.loads((folder / hostile.INDEX).read_text())
    index["weight_map"][NORM] = place
    (folder / hostile.INDEX).write_text(json.dumps(index))
    refused(folder, says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"weight_map": {"a": "b", "a": "c"}}', "stands twice"),
        (b'{"weight_map": {"a": "b"}, "weight_map": {}}', "stands twice"),
        (b'{"weight_map": [' + b"[" * 100_000, "nested too deeply"),
        (b'{"weight_map": {"\xff": "a"}}', "not JSON"),
        (b'{"metadata": {"total_size": 1e999}, "weight_map": {"a": "b"}}', "too large"),
        (b'{"metadata": {"total_size": 1' + b"0" * 400 + b'}, "weight_map": {"a": "b"}}', "beyond 64 bits"),
        (b"null", "a JSON NoneType"),
    ],
    ids=range(7),
)
def test_indexes(folder, content, says):
    (folder / hostile.INDEX).write_bytes(content)
    refused(folder, hostile.INDEX, says)


@pytest.mark.parametrize("name", [hostile.CONFIG, hostile.INDEX, hostile.SHARDS[1]])
@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "self"])
def test_links_out_of_the_folder(folder, name, target):
    (folder.parent / "outside").write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(name if target == "self" else target)
    refused(folder, name)


@pytest.mark.parametrize("name", [hostile.CONFIG, hostile.INDEX, hostile.SHARDS[1]])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file(folder, name, kind):
    """A pipe that nobody writes to would wait for ever."""
    (folder / name).unlink()
    (folder / name).mkdir() if kind == "folder" else os.mkfifo(folder / name)
    refused(folder, name)


@pytest.mark.parametrize("value", TEXTS, ids=range(len(TEXTS)))
def test_config_text_is_text(folder, value, tmp_path):
    """It is accepted, and never more than text: on the terminal, in the picture, in JSON."""
    config = json.loads((folder / hostile.CONFIG).read_text())
    config |= {"note": value, "model_type": value, "quantization_config": {"quant_method": value, "ignore": [value]}}
    config["text_config"] |= {"hidden_act": value, value[:200]: value, "layer_types": [value, value]}
    (folder / hostile.CONFIG).write_text(json.dumps(config))
    assert attempt(folder) is None
    with (tmp_path / "out").open("w") as file:
        show(folder, Console(file=file, width=80))
    assert not {"\x1b", "\x07", "\r", "\b", "\x00"} & set((tmp_path / "out").read_text())
    checkpoint = read_checkpoint(folder)
    page = render_inspection(value, classify(checkpoint))
    assert "<script" not in page
    assert not list(tmp_path.rglob(hostile.SENTINEL))


# --- as large as a file may be ----------------------------------------------------------------------------------------


def quickly(folder, seconds):
    start = time.process_time()
    error = attempt(folder)
    assert time.process_time() - start < seconds
    return error


def empty_tensors(folder, names):
    """A checkpoint of tensors without bytes."""
    skeleton.write(
        [(name, [0], "U8") for name in names], folder, {"num_hidden_layers": 10**9, "layer_types": ["x"] * 9}
    )


def test_names_that_never_repeat(folder):
    empty_tensors(folder, [f"a{number:x}.w" for number in range(20_000)])
    error = quickly(folder, 5)
    assert "20000 patterns" in str(error)


def test_numbers_far_apart(folder):
    """Nothing counts up to a number that a file names."""
    numbers = [7**k % 10**9 for k in range(2000)]
    names = [f"layers.{a}.experts.{b}.w1.weight" for a, b in zip(numbers, reversed(numbers), strict=True)]
    empty_tensors(folder, {*names, "layers.0.experts.0.w1.weight", "layers.999999999.x.5.y.6.z.7.weight"})
    assert quickly(folder, 5) is None
    ledger = classify(read_checkpoint(folder))
    assert len(render_inspection("x", ledger)) < 2_000_000


@pytest.mark.parametrize(
    "listed",
    [
        ["re:.*a.*a.*a.*a.*a.*b"] * 1000,
        ["re:(a|a)*(a|a)*b", "re:a.*b"] * 1000,
        ["*a*a*a*a*b", "a*b"] * 1000,
        [f"model.layers.{n}.x" for n in range(50_000)],
    ],
    ids=["stars", "choices", "globs", "names"],
)
def test_exceptions_that_would_take_for_ever(folder, listed):
    hostile.write(folder)
    config = json.loads((folder / hostile.CONFIG).read_text())
    config["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": listed}
    (folder / hostile.CONFIG).write_text(json.dumps(config))
    with_header(folder, lambda header: {"a" * 500 if key == NORM else key: value for key, value in header.items()})
    index = json.loads((folder / hostile.INDEX).read_text())
    index["weight_map"]["a" * 500] = index["weight_map"].pop(NORM)
    (folder / hostile.INDEX).write_text(json.dumps(index))
    assert quickly(folder, 3) is None
