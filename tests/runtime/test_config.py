import pytest
import yaml

from dayzero.runtime.config import TrainConfig, known_keys, load_config, render_yaml
from dayzero.runtime.errors import InputError


def test_the_rendered_file_reads_back_and_explains_every_setting(tmp_path):
    config = load_config(None, ["train.steps=7", "lora.targets=[query, value]", "memory.loss_chunk=null"])
    text = render_yaml(config)
    (tmp_path / "train.yaml").write_text(text)
    assert load_config(tmp_path / "train.yaml") == config
    settings = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(settings) == len(known_keys()) == sum(len(section) for section in yaml.safe_load(text).values())
    assert all("  # " in line for line in settings)
    assert "  targets: [query, value]" in text


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("train: {steps: 5, seed: 3}\noptimizer: {lr: 1e-3}\n")
    config = load_config(file, ["train.steps=400", "parallel.ep=2", "optimizer.betas=[0.8, 0.9]"])
    assert (config.train.steps, config.train.seed, config.optimizer.lr) == (400, 3, 1e-3)
    assert (config.parallel.ep, config.optimizer.betas) == (2, (0.8, 0.9))
    assert config.data == TrainConfig().data


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.step=3", "Did you mean train.steps"),
        ("steps=3", "Did you mean train.steps"),
        ("learning_rate=3", "There are|Did you mean"),
        ("train.steps=0", "greater than or equal to 1"),
        ("train.steps=many", "many"),
        ("train.precision=fp8", "'bf16' or 'fp32'"),
        ("parallel.tp=two", "expected  a valid integer.*, or 'auto'"),
        ("train.steps", "section.key=value"),
        ("data.max_length=99999", "does not fit into tokens_per_rank"),
        ("lora.rank=[", "YAML value"),
    ],
)
def test_a_bad_override_is_named(override, says):
    with pytest.raises(InputError, match=says) as error:
        load_config(None, [override])
    assert error.value.where.startswith("--set ")


@pytest.mark.parametrize("text", ["train: [", "- 1", "train: 3"])
def test_a_bad_file_is_named(text, tmp_path):
    (tmp_path / "train.yaml").write_text(text)
    with pytest.raises(InputError, match=r"train\.yaml"):
        load_config(tmp_path / "train.yaml")


def test_an_unknown_key_of_the_file_is_named(tmp_path):
    (tmp_path / "train.yaml").write_text("train:\n  stepz: 3\n")
    with pytest.raises(InputError, match=r"(?s)train\.yaml: train\.stepz.*Did you mean train\.steps"):
        load_config(tmp_path / "train.yaml")
