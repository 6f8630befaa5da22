"""Numbers of a model's settings, and whose they are."""

import copy

from torch import nn
from transformers import LlamaConfig, MistralConfig

from dayzero.onboard.candidates.settings import number, setting

THETA = ("rope_parameters", "rope_theta")


def test_a_module_that_was_given_a_copy_of_the_config_reads_that():
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    own = copy.deepcopy(config)
    own.rope_parameters = {"rope_type": "yarn", "rope_theta": 25000.0, "factor": 4.0}
    module = nn.Module()
    assert number(THETA, float).resolve(module, config) == 10000.0
    assert setting(THETA, "factor", float, 1.0).resolve(module, config) == 1.0
    module.config = own
    assert number(THETA, float).resolve(module, config) == 25000.0
    assert setting(THETA, "factor", float, 1.0).resolve(module, config) == 4.0
    module.config = MistralConfig()  # of another kind, such as that of a composite: its fields mean other things
    assert number(THETA, float).resolve(module, config) == 10000.0
