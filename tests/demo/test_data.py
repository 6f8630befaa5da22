import json
import subprocess
import sys

import pytest
import tiny

data = tiny.load("demo/data.py")


@pytest.fixture(scope="module")
def docstrings():
    return data.docstrings()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return data.write(tmp_path_factory.mktemp("chats"))


def read(path):
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_thousand_chats_one_in_twenty_held_out(files):
    train, held_out = map(read, files)
    assert (len(train), len(held_out)) == (1900, 100)
    for question, answer in train + held_out:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"].count("`") == 2
        assert data.SHORTEST <= len(answer["content"]) <= data.LONGEST


def test_nothing_held_out_is_trained_on(files):
    train, held_out = map(read, files)
    subject = [{chat[0]["content"].split("`")[1] for chat in part} for part in (train, held_out)]
    answers = [chat[1]["content"] for chat in train + held_out]
    assert [len(names) for names in subject] == [1900, 100]
    assert not subject[0] & subject[1]
    assert len(set(answers)) == len(answers)


def test_the_same_seed_gives_the_same_files(files, tmp_path):
    again = data.write(tmp_path / "again")
    other = data.write(tmp_path / "other", seed=1)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]
    assert other[0].read_bytes() != files[0].read_bytes()
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["heldout.jsonl", "train.jsonl"]


def test_names_are_the_ones_people_use(docstrings):
    known = {name: (kind, text) for name, kind, text in docstrings}
    assert {"os.path.join", "os.getcwd", "str.isdigit", "collections.OrderedDict.move_to_end"} <= known.keys()
    assert (known["os.path.join"][0], known["csv.Dialect"][0]) == ("callable", "class")
    assert not {name.split(".")[0] for name in known} & data.SKIPPED


def test_answers_are_tidy_and_the_same_everywhere(docstrings):
    for name, _, text in docstrings:
        assert text == text.strip(), name
        assert "\n\n\n" not in text, name
        assert " at 0x" not in text, name


def test_more_rows_than_docstrings_is_an_error(tmp_path):
    script = tiny.ROOT / "demo" / "data.py"
    done = subprocess.run([sys.executable, script, tmp_path, "--rows", "999999"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: rows=999999, but this Python has ")
    assert not list(tmp_path.iterdir())
