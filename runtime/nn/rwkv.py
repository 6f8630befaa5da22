"""The two halves of an RWKV-4 layer (Peng et al. 2023, arXiv:2305.13048)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from .chunks import chunks_of
from .context import Context
from .cut import Cut, carried, rows_before
from .linear import reset_linear

NOTHING = -1e38  # the logarithm of the weight of a state that holds nothing; finite, so that differences are numbers


def token_before(x: Tensor, context: Context) -> Tensor:
    """Row t-1 of x at row t, zeros at the first token of a document.  x: [T, H] -> [T, H]."""
    first = torch.zeros_like(x[:1])
    if isinstance(context.lengths, Cut):
        first = torch.cat([first, rows_before(x, context.lengths, 1)])[-1:]
    shifted = torch.cat([first, x[:-1]])
    return torch.where((context.position == 0)[:, None], 0.0, shifted)


class TimeMix(nn.Module):
    """x: [T, H] -> [T, H].  output(sigmoid(R xr) * wkv(K xk, V xv)), where x_i = mix_i * x_t + (1 - mix_i) * x_{t-1}.

    wkv_t is the mean of v_j, j <= t, with weights exp(k_j - (t - 1 - j) exp(decay)) for j < t and exp(k_t + bonus).
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("key", "value", "receptance", "output")
    parallel_roles: ClassVar = {
        "key": "column",
        "value": "column",
        "receptance": "column",
        "key_mix": "replicate",
        "value_mix": "replicate",
        "receptance_mix": "replicate",
        "decay": "column",
        "bonus": "column",
        "output": "row",
    }

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.key_mix, self.value_mix, self.receptance_mix = (nn.Parameter(torch.empty(hidden)) for _ in range(3))
        self.decay, self.bonus = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.key, self.value, self.receptance = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, hidden, bias=False)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.key, self.value, self.receptance, self.output):
            reset_linear(linear, std)
        with torch.no_grad():
            for mix in (self.key_mix, self.value_mix, self.receptance_mix):
                mix.copy_(torch.linspace(0.0, 1.0, len(mix)))
            self.decay.copy_(torch.linspace(-5.0, 3.0, len(self.decay)))
            self.bonus.fill_(-1.2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before = token_before(x, context)
        mixes = (self.key_mix, self.value_mix, self.receptance_mix)
        xk, xv, xr = (x * mix + before * (1 - mix) for mix in mixes)
        mixed = wkv(self.key(xk), self.value(xv), self.decay, self.bonus, context.lengths)
        return self.output(torch.sigmoid(self.receptance(xr)) * mixed)


class ChannelMix(nn.Module):
    """x: [T, H] -> [T, H].  sigmoid(R xr) * V relu(K xk)^2, where x_i = mix_i * x_t + (1 - mix_i) * x_{t-1}."""

    uses_context = True
    context_parallel = True
    lora_targets = ("key", "value", "receptance")
    parallel_roles: ClassVar = {
        "key": "column",
        "value": "row",
        "receptance": "replicate",
        "key_mix": "replicate",
        "receptance_mix": "replicate",
    }

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.key_mix, self.receptance_mix = (nn.Parameter(torch.empty(hidden)) for _ in range(2))
        self.key = nn.Linear(hidden, width, bias=False)
        self.value = nn.Linear(width, hidden, bias=False)
        self.receptance = nn.Linear(hidden, hidden, bias=False)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.key, self.value, self.receptance):
            reset_linear(linear, std)
        with torch.no_grad():
            for mix in (self.key_mix, self.receptance_mix):
                mix.copy_(torch.linspace(0.0, 1.0, len(mix)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before = token_before(x, context)
        xk, xr = (x * mix + before * (1 - mix) for mix in (self.key_mix, self.receptance_mix))
        return torch.sigmoid(self.receptance(xr)) * self.value(torch.square(torch.relu(self.key(xk))))


def wkv(key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor, lengths: tuple[int, ...], chunk: int = 16) -> Tensor:
    """The weighted means of `TimeMix`.  key, value: [T, C], decay, bonus: [C] -> [T, C], in value's dtype.

    Computed in float32, or float64 for float64 inputs. Weights are compared by their logarithms, the largest being 1:
    a mean does not depend on which, so that no gradient goes there and nothing overflows.
    """
    if not value.shape[0]:
        return value
    wide = torch.promote_types(value.dtype, torch.float32)
    chunks = chunks_of(lengths, chunk, value.device)
    k, v = (chunks.cut(x.to(wide)) for x in (key, value))  # [M, C, channels]
    rate, size = decay.to(wide).exp(), k.shape[1]
    place = torch.arange(size, device=k.device)
    steps = (place[:, None] - 1 - place).to(wide)[..., None] * rate  # [t, j, channels], right below the diagonal
    here = torch.eye(size, dtype=torch.bool, device=k.device)[..., None]
    later = (place[:, None] < place)[..., None]
    left = (size - 1 - place).to(wide)[:, None] * rate

    log_state = k.new_full((chunks.steps[0], k.shape[-1]), NOTHING)
    top, bottom = torch.zeros_like(log_state), torch.zeros_like(log_state)
    if isinstance(lengths, Cut):
        rows = slice(len(key) - lengths[-1], None)
        earlier = _state_from_other_ranks(key[rows].to(wide), value[rows].to(wide), rate, lengths)
        held = (log_state, top, bottom)
        log_state, top, bottom = (chunks.started(part, one) for part, one in zip(held, earlier, strict=True))
    results = []
    for k_n, v_n in zip(k.split(chunks.steps), v.split(chunks.steps), strict=True):
        n = len(k_n)
        log_state, top, bottom = log_state[:n], top[:n], bottom[:n]
        weights = torch.where(here, (k_n + bonus.to(wide))[:, None], k_n[:, None] - steps)
        weights = weights.masked_fill(later, -torch.inf)
        old = log_state[:, None] - place.to(wide)[:, None] * rate
        most = torch.maximum(old, weights.amax(2)).detach()
        old, weights = (old - most).exp(), (weights - most[:, :, None]).exp()
        above = old * top[:, None] + torch.einsum("ntjc,njc->ntc", weights, v_n)
        results.append(above / (old * bottom[:, None] + weights.sum(2)))

        kept, added = log_state - left[0] - rate, k_n - left
        log_state = torch.maximum(kept, added.amax(1)).detach()
        kept, added = (kept - log_state).exp(), (added - log_state[:, None]).exp()
        top, bottom = kept * top + (added * v_n).sum(1), kept * bottom + added.sum(1)
    return chunks.join(torch.cat(results)).to(value.dtype)


def _state_from_other_ranks(key: Tensor, value: Tensor, rate: Tensor, lengths: Cut) -> list[Tensor]:
    """key, value: [T, channels], of this rank's last document -> (logarithm of the size, top, bottom) before the rank's
    first token."""
    left = torch.arange(len(key) - 1, -1, -1, device=key.device).to(key.dtype)[:, None]
    weights = key - left * rate
    size = weights.amax(0).detach()
    weights = (weights - size).exp()
    start = torch.full_like(size, NOTHING), torch.zeros_like(size), torch.zeros_like(size)
    own = (len(key) * rate, size, (weights * value).sum(0), weights.sum(0))

    def follow(does: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        decay, added, above, below = does
        kept = state[0] - decay
        most = torch.maximum(kept, added).detach()
        old, new = (kept - most).exp(), (added - most).exp()
        return most, old * state[1] + new * above, old * state[2] + new * below

    return carried(own, start, follow, lengths)
