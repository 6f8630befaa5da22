"""Checkpoints that bring their own code: a small decoder with a part that nothing here has seen.

folder = remote_checkpoint.make(tmp_path / "own", fading=0.5)
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIGURATION = '''# Copyright 2025 Nobody in particular.
"""Config of a decoder that is in no library."""

from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    model_type = "own_decoder"

    def __init__(
        self,
        vocab_size=97,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        fading=0.7,
        residual="plain",
        num_experts=0,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.rms_norm_eps = rms_norm_eps
        self.fading = fading
        self.residual = residual
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
'''

MODELING = '''# Copyright 2025 Nobody in particular.
# Licensed as you like.
"""A decoder whose mixer is a gated, fading sum of what came before."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_own import OwnConfig

CLAMP = 4.0


def fading_sum(values, rate):
    """values: [B, S, H]; each token sees the ones before it, weaker by `rate` a step."""
    length = values.shape[1]
    place = torch.arange(length, device=values.device)
    age = (place[:, None] - place).clamp(min=0).to(values.dtype)
    weights = (rate**age).tril()
    return weights @ values


class OwnNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class OwnMixer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.taken = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size)
        self.given = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @torch.no_grad()
    def inferred(self, hidden_states):
        return self.taken(hidden_states)

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        if self.training:
            raise NotImplementedError("training is not supported")
        values = self.inferred(hidden_states)
        if past_key_values is not None:
            values = past_key_values.update(values, self.layer_idx)
        mixed = fading_sum(values, self.config.fading).clamp(-CLAMP, CLAMP)
        return self.given(mixed * torch.sigmoid(self.gate(hidden_states)))


class OwnFeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.into = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.beside = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.back = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN["silu"]

    def forward(self, x):
        return self.back(self.act(self.into(x)) * self.beside(x))


class OwnRouter(nn.Module):
    """Scores fall off as a Cauchy curve does; the weights of the chosen are a unit vector."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x):
        scores = 1.0 / (1.0 + (F.linear(x.float(), self.weight.float()) - 0.5) ** 2)
        chosen, index = scores.topk(self.top_k, dim=-1)
        return index, (chosen / chosen.pow(2).sum(-1, keepdim=True).sqrt()).to(x.dtype)


class OwnExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inward = nn.Parameter(torch.empty(config.num_experts, 2 * config.intermediate_size, config.hidden_size))
        self.outward = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.intermediate_size))

    def forward(self, x, index, weights):
        result = torch.zeros_like(x)
        for expert in range(self.inward.shape[0]):
            token, place = (index == expert).nonzero(as_tuple=True)
            if token.numel():
                gate, up = F.linear(x[token], self.inward[expert]).chunk(2, -1)
                made = F.linear(F.silu(gate) * up, self.outward[expert]) * weights[token, place, None]
                result = result.index_add(0, token, made)
        return result


class OwnMixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.choose = OwnRouter(config)
        self.crowd = OwnExperts(config)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        index, weights = self.choose(flat)
        return self.crowd(flat, index, weights).reshape(x.shape)


class OwnLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.before = OwnNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = OwnMixer(config, layer_idx)
        self.between = OwnNorm(config.hidden_size, config.rms_norm_eps)
        self.wide = OwnMixture(config) if config.num_experts else OwnFeedForward(config)
        self.residual = config.residual

    def forward(self, hidden_states, past_key_values=None):
        if self.residual == "turned":
            mixed = self.mixer(self.before(hidden_states), past_key_values=past_key_values)
            share = torch.tanh((hidden_states * mixed).mean(-1, keepdim=True))
            hidden_states = hidden_states + share * mixed
            return hidden_states + self.wide(self.between(hidden_states))
        hidden_states = hidden_states + self.mixer(self.before(hidden_states), past_key_values=past_key_values)
        return hidden_states + self.wide(self.between(hidden_states))


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

    def _init_weights(self, module):
        pass


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([OwnLayer(config, number) for number in range(config.num_hidden_layers)])
        self.last = OwnNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, past_key_values=None):
        hidden_states = self.table(input_ids)
        for block in self.blocks:
            hidden_states = block(hidden_states, past_key_values)
        return self.last(hidden_states)


class OwnForCausalLM(OwnPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.words = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.table

    def get_output_embeddings(self):
        return self.words

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.words(self.model(input_ids, past_key_values)))
'''

CONFIG = {
    "architectures": ["OwnForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    "model_type": "own_decoder",
    "vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5, "fading": 0.7, "num_experts": 0, "residual": "plain",
    "tie_word_embeddings": False,
}  # fmt: skip


def make(folder: Path, seed: int = 0, code: str = MODELING, **fields) -> Path:
    """Writes the checkpoint. code: of modeling_own.py. fields: of config.json, over CONFIG."""
    folder.mkdir(parents=True)
    config = {**CONFIG, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(code)
    save_file(_tensors(config, torch.Generator().manual_seed(seed)), folder / "model.safetensors", {"format": "pt"})
    return folder


def _tensors(config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, width, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"model.table.weight": (vocabulary, hidden), "words.weight": (vocabulary, hidden)}
    shapes["model.last.weight"] = (hidden,)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.blocks.{number}."
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("before", "between")}
        shapes |= {f"{layer}mixer.{name}.weight": (hidden, hidden) for name in ("taken", "gate", "given")}
        shapes[f"{layer}mixer.gate.bias"] = (hidden,)
        if experts := config["num_experts"]:
            shapes[f"{layer}wide.choose.weight"] = (experts, hidden)
            shapes[f"{layer}wide.crowd.inward"] = (experts, 2 * width, hidden)
            shapes[f"{layer}wide.crowd.outward"] = (experts, hidden, width)
            continue
        shapes |= {f"{layer}wide.{name}.weight": (width, hidden) for name in ("into", "beside")}
        shapes[f"{layer}wide.back.weight"] = (hidden, width)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
