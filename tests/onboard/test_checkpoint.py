import json
import shutil
from pathlib import Path

import onboarded
import pytest
from safetensors.torch import load_file

from dayzero.onboard.checkpoint import Checkpoint, read_checkpoint
from dayzero.runtime.errors import InputError


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(onboarded.checkpoint("mixtral, bfloat16 in shards"), tmp_path / "checkpoint"))


def test_what_is_there(folder):
    found = read_checkpoint(folder)
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert list(found.headers) == sorted(tensors)
    for name, tensor in tensors.items():
        header = found.headers[name]
        assert (header.dtype, header.shape, header.bytes) == ("BF16", tuple(tensor.shape), tensor.nbytes)
    assert found.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert found.architecture == "MixtralForCausalLM"
    assert found.quantization == {}
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(found.tokenizer)


def test_remote_code_is_listed_and_never_run(folder):
    (folder / "modeling_novel.py").write_text(f"open({str(folder / 'sentinel')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_novel.C", "AutoModelForCausalLM": "modeling_novel.M"}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(folder).remote_code == ["modeling_novel.py"]
    from dayzero.onboard.oracle.reference import load_config

    load_config(config)
    assert not (folder / "sentinel").exists()


def test_the_identity_is_of_the_content_not_of_the_place(folder, tmp_path):
    one = read_checkpoint(folder).identity()
    moved = folder.rename(tmp_path / "elsewhere")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert read_checkpoint(moved).identity() == one
    (moved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    other = read_checkpoint(moved).identity()
    assert (other.headers_sha256, other.config_sha256 == one.config_sha256) == (one.headers_sha256, False)


def test_it_survives_json(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "limit": float("inf"), "deep": {"a": [1, None, True]}}))
    found = read_checkpoint(folder)
    assert Checkpoint.model_validate_json(found.model_dump_json()) == found


def test_reading_reads_no_tensor(folder):
    """Garbage in the place of the weights is not noticed."""
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:start] + b"\xff" * (len(content) - start))
    assert len(read_checkpoint(folder).headers) == 78


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors.index.json"])
def test_a_folder_without(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(InputError, match=missing.replace(".", r"\.")):
        read_checkpoint(folder)
