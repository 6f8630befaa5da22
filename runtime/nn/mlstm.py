"""The matrix LSTM of xLSTM (Beck et al. 2024, arXiv:2405.04517), chunk by chunk (the same 2025, arXiv:2503.14376)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chunks import chunks_of
from .context import Context
from .cut import Cut, carried
from .delta_rule import sum_after
from .linear import reset_linear


class MLSTM(nn.Module):
    """x: [T, H] -> [T, H].  output(sigmoid(gate x) * norm(cell(q, k, v, i, f))), with i and f from the input.

    C_t = sigmoid(f_t) C_{t-1} + exp(i_t) k_t v_t^T, n_t the same with k_t; h_t = C_t^T q_t / max(|n_t q_t|, 1), up to
    eps. soft_cap c: i and f become c tanh(i / c). The norm is a LayerNorm of each head without shared means.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("query", "key", "value", "gate", "output")
    parallel_counts: ClassVar = ("heads",)
    parallel_roles: ClassVar = {
        "query": "column",
        "key": "column",
        "value": "column",
        "gate": "column",
        "input_gate": "column",
        "forget_gate": "column",
        "norm_weight": "column",
        "norm_bias": "column",
        "output": "row",
    }

    def __init__(
        self,
        hidden: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        eps: float,
        norm_eps: float,
        soft_cap: float | None = None,
        bias: bool = False,
        gate_bias: bool = True,
        output_bias: bool = False,
        norm_bias: bool = False,
    ):
        super().__init__()
        self.heads, self.eps, self.norm_eps, self.soft_cap = heads, eps, norm_eps, soft_cap
        self.query = nn.Linear(hidden, heads * key_dim, bias=bias)
        self.key = nn.Linear(hidden, heads * key_dim, bias=bias)
        self.value = nn.Linear(hidden, heads * value_dim, bias=bias)
        self.gate = nn.Linear(hidden, heads * value_dim, bias=bias)
        self.input_gate = nn.Linear(hidden, heads, bias=gate_bias)
        self.forget_gate = nn.Linear(hidden, heads, bias=gate_bias)
        self.norm_weight = nn.Parameter(torch.empty(heads * value_dim))
        self.norm_bias = nn.Parameter(torch.empty(heads * value_dim)) if norm_bias else None
        self.output = nn.Linear(heads * value_dim, hidden, bias=output_bias)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.value, self.gate, self.input_gate, self.forget_gate, self.output):
            reset_linear(linear, std)
        with torch.no_grad():
            self.norm_weight.fill_(1.0)
            if self.norm_bias is not None:
                self.norm_bias.zero_()
            if self.forget_gate.bias is not None:
                self.input_gate.bias.fill_(-10.0)
                self.forget_gate.bias.copy_(torch.linspace(3.0, 6.0, self.heads))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        projections = (self.query, self.key, self.value)
        query, key, value = (part(x).unflatten(-1, (self.heads, -1)).to(wide) for part in projections)
        write, keep = (self._capped(part(x).to(wide)) for part in (self.input_gate, self.forget_gate))
        h = mlstm(query * query.shape[-1] ** -0.5, key, value, write, keep, self.eps, context.lengths)
        h = h - h.mean(-1, keepdim=True)
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.norm_eps)).flatten(-2)
        h = h * self.norm_weight if self.norm_bias is None else h * self.norm_weight + self.norm_bias
        return self.output(torch.sigmoid(self.gate(x)) * h.to(x.dtype))

    def _capped(self, gate: Tensor) -> Tensor:
        return gate if self.soft_cap is None else self.soft_cap * torch.tanh(gate / self.soft_cap)


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    write: Tensor,
    keep: Tensor,
    eps: float,
    lengths: tuple[int, ...],
    chunk: int = 64,
) -> Tensor:
    """The cell of `MLSTM`.  query (scaled), key: [T, N, K], value: [T, N, V], write, keep: [T, N] -> [T, N, V].

    All of one float dtype, float32 or wider. C_t and n_t are held divided by exp(m_t), where m_t is the largest
    logarithm of a weight in them, at least that of an empty start at 0; the result is C_t^T q_t over
    max(|n_t q_t|, exp(-m_t)) + eps, which is why m_t is part of the function and has gradients.
    """
    if not value.shape[0]:
        return value
    chunks = chunks_of(lengths, chunk, value.device)
    q, k, v, i, f = (chunks.cut(x).transpose(1, 2) for x in (query, key, value, write, keep))  # [M, N, C, ...]
    log_keep = F.logsigmoid(f)[..., None]
    size = k.shape[2]
    between = log_keep.expand(*log_keep.shape[:-1], size).tril(-1).cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    weights = (between + i[..., None, :]).masked_fill(later, -torch.inf)  # [M, N, C, C]
    since_start = log_keep.cumsum(-2)[..., 0]
    at_end = sum_after(log_keep)[..., 0] + i
    scores = q @ k.transpose(-1, -2)

    heads = k.shape[1]
    matrix = k.new_zeros(chunks.steps[0], heads, k.shape[-1], v.shape[-1])
    total, log_size = k.new_zeros(chunks.steps[0], heads, k.shape[-1]), k.new_zeros(chunks.steps[0], heads)
    if isinstance(lengths, Cut):
        rows = slice(len(key) - lengths[-1], None)
        earlier = _state_from_other_ranks(key[rows], value[rows], write[rows], F.logsigmoid(keep[rows]), lengths)
        held = (matrix, total, log_size)
        matrix, total, log_size = (chunks.started(part, one) for part, one in zip(held, earlier, strict=True))
    results = []
    pieces = (x.split(chunks.steps) for x in (q, k, v, weights, since_start, at_end, scores))
    for q_n, k_n, v_n, weights_n, since_n, at_end_n, scores_n in zip(*pieces, strict=True):
        n = len(q_n)
        matrix, total, log_size = matrix[:n], total[:n], log_size[:n]
        old = since_n + log_size[..., None]
        most = torch.maximum(old, weights_n.amax(-1))
        inside = scores_n * (weights_n - most[..., None]).exp()
        read = q_n * (old - most).exp()[..., None]
        above = read @ matrix + inside @ v_n
        below = (read @ total[..., None])[..., 0] + inside.sum(-1)
        results.append(above / (torch.maximum(below.abs(), (-most).exp()) + eps)[..., None])

        kept = since_n[..., -1] + log_size
        log_size = torch.maximum(kept, at_end_n.amax(-1))
        kept = (kept - log_size).exp()[..., None]
        written = k_n * (at_end_n - log_size[..., None]).exp()[..., None]
        matrix = kept[..., None] * matrix + written.transpose(-1, -2) @ v_n
        total = kept * total + written.sum(-2)
    return chunks.join(torch.cat(results).transpose(1, 2))


def _state_from_other_ranks(key: Tensor, value: Tensor, write: Tensor, log_keep: Tensor, lengths: Cut) -> list[Tensor]:
    """Of this rank's last document: key [T, N, K], value [T, N, V], write, log_keep [T, N] -> (matrix [N, K, V], total
    [N, K], log_size [N]) before the rank's first token."""
    kept = log_keep.sum(0)
    weights = write + sum_after(log_keep)
    size = weights.amax(0)
    written = key * (weights - size).exp()[..., None]
    matrix = written.permute(1, 2, 0) @ value.transpose(0, 1)
    start = torch.zeros_like(matrix), torch.zeros_like(key[0]), torch.zeros_like(size)

    def follow(does: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        log_kept, log_added, above, below = does
        old = state[2] + log_kept
        most = torch.maximum(old, log_added)
        old, new = (old - most).exp()[:, None], (log_added - most).exp()[:, None]
        return old[..., None] * state[0] + new[..., None] * above, old * state[1] + new * below, most

    return carried((kept, size, matrix, written.sum(0)), start, follow, lengths)
