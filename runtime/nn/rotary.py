"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways in which it is stretched.

A table is a pair cos, sin of [T, pairs]: each frequency stands once. Which two channels form a pair is the business of
whoever rotates (`rotate`), so one table serves every style.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

RotaryStyle = Literal["half", "interleaved"]
RotaryScaling = Literal["none", "linear", "proportional", "llama3", "yarn", "dynamic", "longrope"]


class Rotary(nn.Module):
    """The tables cos, sin: [T, ceil(dim / 2)] for positions [T], times `attention_factor`.

    Frequency i is theta^(-2i/dim), changed by `scaling`:
    linear: divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    proportional: only the first `rotated` pairs turn, the others have frequency 0; divided by `factor`.
    llama3: divided by `factor` where the wavelength exceeds original_length / low_freq_factor, kept where it is below
    original_length / high_freq_factor, blended between (Llama 3, arXiv:2407.21783).
    yarn: kept where a frequency turns more than `beta_fast` times in original_length, divided by `factor` where it
    turns less than `beta_slow` times, a linear ramp between; truncate: the ramp ends at whole channels
    (Peng et al. 2023, arXiv:2309.00071).
    dynamic: theta grows with the length of the document beyond original_length.
    longrope: divided by short_factors, or by long_factors in documents longer than original_length
    (Ding et al. 2024, arXiv:2402.13753).
    trained: frequency i is moreover multiplied by exp(log_stretch_i), trained with the model.

    Computed in float32, or float64 for float64 models. What depends on a length depends on the length of the token's
    own document, so that packing changes nothing. Raises ValueError for a scaling without what it needs.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        scaling: RotaryScaling = "none",
        factor: float = 1.0,
        attention_factor: float = 1.0,
        original_length: int | None = None,
        rotated: int | None = None,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        short_factors: list[float] | None = None,
        long_factors: list[float] | None = None,
        trained: bool = False,
    ):
        super().__init__()
        if scaling in {"llama3", "yarn", "dynamic", "longrope"} and original_length is None:
            raise ValueError(f"{scaling} needs original_length")
        if scaling == "llama3" and (low_freq_factor is None or high_freq_factor is None):
            raise ValueError("llama3 needs low_freq_factor and high_freq_factor")
        pairs = -(-dim // 2)
        if scaling == "longrope" and not (short_factors and long_factors and len(short_factors) == len(long_factors)):
            raise ValueError("longrope needs short_factors and long_factors of equal length")
        if scaling == "longrope" and len(short_factors or ()) != pairs:
            raise ValueError(f"longrope has {len(short_factors or ())} factors for {pairs} frequencies")
        if scaling == "proportional" and not 0 <= (rotated if rotated is not None else -1) <= pairs:
            raise ValueError(f"proportional needs rotated, at most {pairs}")
        self.dim, self.theta, self.scaling, self.factor = dim, theta, scaling, factor
        self.attention_factor, self.original_length, self.rotated = attention_factor, original_length, rotated
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor
        self.beta_fast, self.beta_slow, self.truncate = beta_fast, beta_slow, truncate
        self.short_factors, self.long_factors = short_factors, long_factors
        self.log_stretch = nn.Parameter(torch.empty(pairs)) if trained else None

    def reset_parameters(self, std: float) -> None:
        if self.log_stretch is not None:
            nn.init.zeros_(self.log_stretch)

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        where = position.to(compute)[:, None]
        if self.scaling == "dynamic":
            angle = where * self._dynamic(document_length(position).to(compute))
        elif self.scaling == "longrope":
            assert self.original_length is not None
            frequency = self._plain(position.device, compute)
            short, long = (torch.tensor(f).to(frequency) for f in (self.short_factors, self.long_factors))
            beyond = document_length(position)[:, None] > self.original_length
            angle = where * torch.where(beyond, frequency / long, frequency / short)
        else:
            angle = where * self.frequencies(position.device, compute)
        if self.log_stretch is not None:
            angle = angle * self.log_stretch.to(compute).exp()
        return (angle.cos() * self.attention_factor).to(dtype), (angle.sin() * self.attention_factor).to(dtype)

    def frequencies(self, device: torch.device, compute: torch.dtype) -> Tensor:
        """[pairs], for the scalings that do not depend on a document's length."""
        frequency = self._plain(device, compute)
        if self.scaling == "linear":
            return frequency / self.factor
        if self.scaling == "proportional":
            assert self.rotated is not None
            turns = torch.arange(frequency.shape[0], device=device) < self.rotated
            return torch.where(turns, frequency / self.factor, torch.zeros_like(frequency))
        if self.scaling == "llama3":
            return self._llama3(frequency)
        if self.scaling == "yarn":
            return self._yarn(frequency)
        return frequency

    def _plain(self, device: torch.device, compute: torch.dtype) -> Tensor:
        return 1.0 / self.theta ** (torch.arange(0, self.dim, 2, device=device, dtype=compute) / self.dim)

    def _llama3(self, frequency: Tensor) -> Tensor:
        assert self.original_length is not None
        assert self.low_freq_factor is not None
        assert self.high_freq_factor is not None
        turns = self.original_length * frequency / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequency / self.factor, frequency, kept.clamp(0.0, 1.0))

    def _yarn(self, frequency: Tensor) -> Tensor:
        low, high = self._channel_that_turns(self.beta_fast), self._channel_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low if high != low else 0.001
        ramp = (torch.arange(frequency.shape[0], device=frequency.device, dtype=frequency.dtype) - low) / width
        return torch.lerp(frequency, frequency / self.factor, ramp.clamp(0.0, 1.0))

    def _channel_that_turns(self, times: float) -> float:
        """The (fractional) pair whose frequency turns so many times in the original length."""
        assert self.original_length is not None
        return self.dim * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(self.theta))

    def _dynamic(self, length: Tensor) -> Tensor:
        """[T, pairs] for document lengths [T]."""
        assert self.original_length is not None
        stretch = self.factor * length.clamp(min=self.original_length) / self.original_length - (self.factor - 1)
        theta = self.theta * stretch ** (self.dim / (self.dim - 2))
        exponent = torch.arange(0, self.dim, 2, device=length.device, dtype=length.dtype) / self.dim
        return 1.0 / theta[:, None] ** exponent


def document_length(position: Tensor) -> Tensor:
    """[T]: for each token the length of its document, which begins where the position is not the last one plus 1."""
    if not position.shape[0]:
        return position
    starts = torch.ones_like(position, dtype=torch.bool)
    starts[1:] = position[1:] != position[:-1] + 1
    document = starts.cumsum(0) - 1
    longest = torch.zeros_like(position).scatter_reduce(0, document, position, "amax", include_self=False)
    return longest[document] + 1


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: RotaryStyle, last: bool = False) -> Tensor:
    """Turns pairs of channels of every head by their position's angle and leaves the other channels.

    x: [T, heads, D]; cos, sin: [T, pairs], 2 * pairs <= D. style: channel i is paired with i + pairs ("half"), or 2i
    with 2i + 1 ("interleaved"). last: the last channels of a head turn, not the first.
    """
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"tables of {cos.shape[-1]} frequencies turn {dim} channels; a head has {x.shape[-1]}")
    still = x.shape[-1] - dim
    rest, turned = (x[..., :still], x[..., still:]) if last else (x[..., dim:], x[..., :dim])
    cos, sin = cos[:, None], sin[:, None]
    a, b = turned.chunk(2, -1) if style == "half" else (turned[..., 0::2], turned[..., 1::2])
    both = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.cat(both, -1) if style == "half" else torch.stack(both, -1).flatten(-2)
    if not still:
        return turned
    return torch.cat((rest, turned) if last else (turned, rest), -1)
