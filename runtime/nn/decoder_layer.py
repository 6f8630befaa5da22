"""Pre-norm decoder layer: a mixer over tokens, then a feed-forward layer over channels, each added to the stream."""

from torch import Tensor, nn

from .context import Context


class DecoderLayer(nn.Module):
    """x + mixer(mixer_norm(x)), then the same with ffn.  x: [T, H] -> [T, H]."""

    def __init__(self, mixer_norm: nn.Module, mixer: nn.Module, ffn_norm: nn.Module, ffn: nn.Module):
        super().__init__()
        self.mixer_norm, self.mixer, self.ffn_norm, self.ffn = mixer_norm, mixer, ffn_norm, ffn

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), context)
        return x + self.ffn(self.ffn_norm(x))
