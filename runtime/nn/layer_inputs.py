"""An input of its own for every layer, made of the token itself, and what layers do with theirs (per-layer embeddings,
Gemma 3n: Google DeepMind 2025)."""

from torch import Tensor, nn

from .activation import Activation, activation
from .context import Context
from .linear import reset_linear

LAYER_INPUT = "layer_input"  # context.shared: [T, P], what the model hands to the layer that runs


class LayerInputs(nn.Module):
    """scale * (embed_scale * embed(ids) + norm(projection_scale * projection(x))).

    x: [T, H], the embeddings that the first layer reads; ids: [T] -> [T, layers, width], the norm over each width.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        layers: int,
        width: int,
        norm: nn.Module,
        embed_scale: float = 1.0,
        projection_scale: float = 1.0,
        scale: float = 1.0,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, layers * width)
        self.projection = nn.Linear(hidden, layers * width, bias=False)
        self.norm = norm
        self.width, self.embed_scale, self.projection_scale, self.scale = width, embed_scale, projection_scale, scale

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.embed.weight, std=std)
        reset_linear(self.projection, std)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows = self.embed(ids) * self.embed_scale
        made = self.norm((self.projection(x) * self.projection_scale).unflatten(-1, (-1, self.width)))
        return (made + rows.unflatten(-1, (-1, self.width))) * self.scale


class GatedLayerInput(nn.Module):
    """down(act(gate x) * input), `input` being what the model hands to this layer.  x: [T, H] -> [T, H]."""

    uses_context = True
    context_parallel = True
    parallel_rows = True  # looks at each token by itself
    lora_targets = ("gate", "down")

    def __init__(self, hidden: int, width: int, act: Activation, bias: bool = False):
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.act: Activation = act

    def reset_parameters(self, std: float) -> None:
        for linear in (self.gate, self.down):
            reset_linear(linear, std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if LAYER_INPUT not in context.shared:
            raise ValueError("this part reads the layer's own input, but the model has none for its layers")
        return self.down(activation(self.act)(self.gate(x)) * context.shared[LAYER_INPUT])
