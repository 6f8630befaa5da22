"""Checkpoints with their own code, of which one layer is nowhere else: a mixer, a router, or a residual never seen.

    folder = unseen.make(tmp_path / "own", "router")

Everything else of the decoder is usual: root mean square norms, grouped-query attention, experts behind a router.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIGURATION = """# Copyright 2026 Somebody.
from transformers import PreTrainedConfig


class UnseenConfig(PreTrainedConfig):
    model_type = "unseen"

    def __init__(
        self, vocab_size=97, hidden_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        head_dim=12, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=26, rms_norm_eps=1e-5, odd="router",
        tie_word_embeddings=False, **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.rms_norm_eps, self.odd = head_dim, rms_norm_eps, odd
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
"""

MODELING = '''# Copyright 2026 Somebody.
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_unseen import UnseenConfig


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.share = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        self.asks = nn.Linear(config.hidden_size, width, bias=False)
        self.keys = nn.Linear(config.hidden_size, width // self.share, bias=False)
        self.says = nn.Linear(config.hidden_size, width // self.share, bias=False)
        self.back = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x):
        parts = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.asks, self.keys, self.says))
        query, key, value = (part.transpose(1, 2) for part in parts)
        key, value = (part.repeat_interleave(self.share, 1) for part in (key, value))
        length = x.shape[1]
        hidden = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        seen = (query @ key.transpose(2, 3) * self.head_dim**-0.5 + hidden).softmax(-1)
        return self.back((seen @ value).transpose(1, 2).flatten(2))


class RunningSum(nn.Module):
    """Each channel a sum over all that came before, bent by an arctangent and shared out by the token's own gate."""

    def __init__(self, config):
        super().__init__()
        self.into = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.back = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        total = torch.cumsum(self.into(x), dim=1)
        return self.back(torch.atan(total) * torch.cos(self.gate(x)))


class SealedSum(RunningSum):
    """The same, run by a function that is made when the module is, and that its class knows nothing of."""

    def __init__(self, config):
        super().__init__(config)
        run = self.forward
        self.forward = lambda x: run(torch.sinh(x))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.top_k = config.num_experts_per_tok

    def forward(self, x):
        shares = F.linear(x, self.weight).softmax(-1)
        weights, index = shares.topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), index


class NearestRouter(nn.Module):
    """Experts have places; those nearest to a token see it, weighed by one over one plus the squared distance."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.top_k = config.num_experts_per_tok

    def forward(self, x):
        distance = (x[:, None] - self.weight).pow(2).mean(-1)
        weights, index = (1.0 / (1.0 + distance)).topk(self.top_k, -1)
        return torch.atan(weights), index


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * width, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, width))

    def forward(self, x, index, weights):
        total = torch.zeros_like(x)
        for number in range(self.down.shape[0]):
            row, slot = (index == number).nonzero(as_tuple=True)
            gate, up = F.linear(x[row], self.gate_up[number]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, self.down[number]) * weights[row, slot, None]
            total.index_add_(0, row, out)
        return total


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = NearestRouter(config) if config.odd == "router" else Router(config)
        self.experts = Experts(config)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat)
        return self.experts(flat, index, weights).view_as(x)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.before = Norm(config.hidden_size, config.rms_norm_eps)
        self.mixer = {"mixer": RunningSum, "sealed": SealedSum}.get(config.odd, Attention)(config)
        self.between = Norm(config.hidden_size, config.rms_norm_eps)
        self.mixture = Mixture(config)
        self.turns = config.odd == "residual"

    def forward(self, x):
        if self.turns:
            mixed = self.mixer(self.before(x))
            angle = torch.atan((x * mixed).mean(-1, keepdim=True))
            x = x * torch.cos(angle) + mixed * torch.sin(angle)
        else:
            x = x + self.mixer(self.before(x))
        return x + self.mixture(self.between(x))


class Pretrained(PreTrainedModel):
    config_class = UnseenConfig
    base_model_prefix = "model"
    _input_embed_layer = "table"

    def _init_weights(self, module):
        pass


class Decoder(Pretrained):
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.tiers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.last = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids):
        x = self.table(input_ids)
        for tier in self.tiers:
            x = tier(x)
        return self.last(x)


class UnseenForCausalLM(Pretrained, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        self.words = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.words

    def forward(self, input_ids=None, use_cache=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.words(self.model(input_ids)))
'''

CONFIG = {
    "architectures": ["UnseenForCausalLM"], "model_type": "unseen",
    "auto_map": {"AutoConfig": "configuration_unseen.UnseenConfig",
                 "AutoModelForCausalLM": "modeling_unseen.UnseenForCausalLM"},
    "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 12, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 26, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


def make(folder: Path, odd: str, seed: int = 0, **fields) -> Path:
    """Writes the checkpoint. odd: "mixer", "router" or "residual", or "sealed" for a mixer whose code cannot be copied.
    fields: of config.json."""
    from dayzero.onboard.oracle import remote_code
    from dayzero.onboard.oracle.reference import build, redraw

    folder.mkdir(parents=True)
    config = {**CONFIG, "odd": odd, **fields}
    if odd in {"mixer", "sealed"}:  # nothing would read these
        config = {
            k: v for k, v in config.items() if k not in {"head_dim", "num_attention_heads", "num_key_value_heads"}
        }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_unseen.py").write_text(CONFIGURATION)
    (folder / "modeling_unseen.py").write_text(MODELING)
    with remote_code.using(remote_code.remote_code(folder, config)):
        model, _ = build(config)
    redraw(model, torch.Generator().manual_seed(seed))
    tensors = {name: tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
