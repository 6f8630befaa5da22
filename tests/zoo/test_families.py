"""The field itself: every config builds, and those with something peculiar run."""

import json

import pytest
import torch
from zoo import families

from dayzero.onboard.oracle.reference import Promote, load_config

RUN = ["mixtral", "deepseek_v3", "qwen3_next", "gpt_oss", "nemotron_h", "mamba2", "step3p7", "switch_transformers"]


def build(family, device):
    config = load_config(families.config(family))
    with torch.device(device):
        return families.model_class(family)(config)


def test_the_field_is_complete():
    assert len(families.FAMILIES) == 91


@pytest.mark.parametrize("family", families.FAMILIES)
def test_each_family_builds(family):
    model = build(family, "meta")
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    assert (vocabulary, hidden) == (199, 80)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_config_is_plain_json_and_made_anew_each_time(family):
    config = families.config(family)
    assert json.loads(json.dumps(config)) == config
    assert {"architectures", "model_type"} <= config.keys()
    config["model_type"] = "changed"
    assert families.config(family)["model_type"] != "changed"


@pytest.mark.parametrize("family", RUN)
def test_a_handful_runs(family):
    model = build(family, "cpu").eval()
    ids = torch.randint(3, 190, (2, families.SEQUENCE), generator=torch.Generator().manual_seed(0))
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad(), Promote():
        logits = model.double()(input_ids=ids, use_cache=False, **extra).logits
    assert logits.shape == (2, families.SEQUENCE, 199)
    assert torch.isfinite(logits).all()
