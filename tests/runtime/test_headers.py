import json

import pytest
import torch
from safetensors.torch import save_file

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import headers_sha256, read_headers


@pytest.fixture
def checkpoint(tmp_path):
    save_file(
        {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "one.safetensors"
    )
    save_file({"c": torch.tensor(7, dtype=torch.int64)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_headers_say_where_the_bytes_are(checkpoint):
    headers = read_headers(checkpoint)
    assert list(headers) == ["a", "b", "c"]
    assert headers["a"][:3] == ("BF16", (4,), "one.safetensors")
    assert headers["c"].shape == ()
    b = headers["b"]
    raw = (checkpoint / b.file).read_bytes()[b.start : b.end]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), torch.arange(6.0))


def test_the_hash_sees_name_dtype_shape_and_file_but_not_offsets(checkpoint):
    headers = read_headers(checkpoint)
    before = headers_sha256(headers)
    moved = {name: header._replace(start=header.start + 8, end=header.end + 8) for name, header in headers.items()}
    assert headers_sha256(moved) == before
    changes = ({"dtype": "F16"}, {"shape": (2, 2)}, {"file": "x"})
    hashes = {headers_sha256({**headers, "a": headers["a"]._replace(**change)}) for change in changes}
    renamed = headers_sha256({"d" if name == "a" else name: header for name, header in headers.items()})
    assert len({before, renamed, *hashes}) == 5


def test_a_truncated_shard_names_file_found_and_expected_bytes(checkpoint):
    file = checkpoint / "one.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(InputError) as error:
        read_headers(checkpoint)
    assert str(file) in str(error.value)
    assert error.value.found == f"{len(whole) - 5} bytes"
    assert error.value.expected.startswith(f"{len(whole)} bytes")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"\x00\x00\x00\x00\x00\x00\x00\x10{}", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "cannot be read"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}x", "longer"),
    ],
    ids=["empty", "short", "lfs", "not-a-map", "overlong"],
)
def test_a_file_that_is_not_safetensors(checkpoint, content, says):
    (checkpoint / "two.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_headers(checkpoint)


@pytest.mark.parametrize(("dtype", "shape"), [("I64", [3]), ("X9", []), ("I64", [-1])])
def test_a_dtype_or_shape_that_does_not_fit_its_bytes(checkpoint, dtype, shape):
    header = json.dumps({"c": {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}).encode()
    (checkpoint / "two.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InputError, match=r"two.safetensors: c"):
        read_headers(checkpoint)


def test_an_index_that_names_a_tensor_its_shard_lacks(checkpoint):
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"c"', '"gone"'))
    with pytest.raises(InputError, match="no such tensor"):
        read_headers(checkpoint)
