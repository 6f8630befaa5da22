"""Finds the parts of a reference model by what flows between them, not by what they are called.

The embedding is the module that is fed the token ids; layers are the list whose members feed one another; the head is
what the logits are made of. What is inside a layer is solved by `layer_wiring`.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.calls import Call, Undiscovered, floats, record_calls, same, tensors
from dayzero.onboard.oracle.reference import encoder_path
from dayzero.onboard.structure.encoder import EncoderParts, added_positions, encoder_parts, outside
from dayzero.onboard.structure.kept_inputs import kept_before
from dayzero.onboard.structure.loops import LoopParts, loop_of, passes_on, visits
from dayzero.onboard.structure.several import SeveralCall, several, top_level
from dayzero.onboard.structure.sums import solve


@dataclass(frozen=True)
class Logits:
    """softcap * tanh(scale * head / softcap), or scale * head; of the head's rows the first `rows`, None for all. A
    factor between the last norm and the head counts as the logits'."""

    scale: float = 1.0
    softcap: float | None = None
    rows: int | None = None


@dataclass
class ModelParts:
    """Paths of the parts. layers: path of the list, of `count` members. embed_scale: what multiplies the rows of the
    embedding table. embed_affine: names of the two vectors of the module at `embed_norm` by which it shifts and scales
    them, where that is no module of its own. logits: how they follow from the head. streams: how many
    copies of the embeddings the layers pass on; merge: what makes one of them again, or one value of all that layers
    kept where they look back (`history`). calls: of the whole forward pass by path. positions: what is added to the
    embeddings, from the ids. loop: what of the layers runs several times."""

    embed: str
    embed_scale: float
    embed_norm: str | None
    layers: str
    count: int
    norm: str
    head: str
    logits: "Logits"
    streams: int = 1
    merge: str | None = None
    history: bool = False
    embed_affine: dict[str, str] = field(default_factory=dict)
    merge_call: Call | None = field(default=None, repr=False)
    calls: dict[str, Call] = field(repr=False, default_factory=dict)
    positions: str | None = None
    encoder: EncoderParts | None = None
    loop: LoopParts | None = None


def discover(model: nn.Module, ids: Tensor) -> ModelParts:
    """The parts of a decoder, and of the encoder that it looks at. Raises Undiscovered."""
    every, logits = record_calls(model, ids)
    encoder = encoder_path(model)
    calls = outside(every, encoder)
    embed = _embedding(model, calls, ids)
    layers = _layer_list(model, calls)
    count = len(model.get_submodule(layers))  # type: ignore[arg-type]
    loop = loop_of(calls, layers, count)
    first = _stream(calls[f"{layers}.0"], calls.get(f"{layers}.1"))
    last = visits(calls[f"{layers}.{count - 1}"])[-1].result
    streams, merge = 1, None
    if first.ndim == 4 and all(torch.equal(first[:, :, 0], first[:, :, i]) for i in range(first.shape[2])):
        streams, first = first.shape[2], first[:, :, 0]
        merge = _only("merge of the streams", [p for p, c in calls.items() if c.has_stream and _reads(c, last)])
        last = calls[merge].result
    elif (count_of := _side_by_side(first, calls[embed].result)) > 1:
        streams, first = count_of, first[..., : calls[embed].result.shape[-1]]
    history = kept_before(calls, f"{layers}.0") is not None
    merge_call = None
    if history:
        merge_call = _after_history(calls, layers, last)
        merge, last = merge_call.path, merge_call.result
    affine = {}
    rows = nn.functional.embedding(ids, calls[embed].module.weight).detach()  # type: ignore[arg-type]
    positions = added_positions(calls, rows, first, ids)
    if positions is not None:
        first = first - calls[positions].result
    try:
        scale, embed_norm = _before_layers(calls, embed, layers, first, ids)
    except Undiscovered:
        scale, embed_norm = 1.0, None
        for owner in _parents(embed):
            if affine := _affine(model.get_submodule(owner), calls[embed].result, first):
                embed_norm = owner
                break
        else:
            raise
    head, relation = _head(model, calls, logits)
    norm = _only(
        "final norm",
        [p for p, c in calls.items() if c.has_stream and same(c.hidden, last) and _feeds(c, calls[head])]
        if not same(last, calls[head].hidden)
        else [],
        deepest=True,
    )
    after_norm = solve(calls[head].hidden, {"norm": calls[norm].result})["norm"]
    relation = replace(relation, scale=relation.scale * after_norm)
    return ModelParts(
        embed,
        scale,
        embed_norm,
        layers,
        count,
        norm,
        head,
        relation,
        streams,
        merge,
        history,
        affine,
        merge_call,
        every,
        positions,
        None if encoder is None else _encoder(model, every, encoder, ids),
        loop,
    )


def _encoder(model: nn.Module, calls: Mapping[str, Call], encoder: str, ids: Tensor) -> EncoderParts:
    """The encoder at this path, its parts found as the decoder's are."""
    own = {path: call for path, call in calls.items() if path.startswith(f"{encoder}.")}
    layers = _layer_list(model, own)
    last = own[f"{layers}.{len(model.get_submodule(layers)) - 1}"].result  # type: ignore[arg-type]
    norms = [path for path, call in own.items() if call.has_stream and same(call.hidden, last)]
    norm = _only("last norm of the encoder", norms)
    if not same(own[norm].result, floats(calls[encoder].output)[0]):
        raise Undiscovered(f"what {encoder} gives is not what {norm} gives")
    return encoder_parts(calls, encoder, _embedding(model, own, ids), layers, norm, ids)


def _side_by_side(first: Tensor, rows: Tensor) -> int:
    """How often the first layer is handed one value [B, S, H] beside itself, [B, S, n H]."""
    count, rest = divmod(first.shape[-1], rows.shape[-1])
    if rest or count < 2 or first.shape[:-1] != rows.shape[:-1]:
        return 1
    copies = first.unflatten(-1, (count, -1))
    return count if torch.equal(copies, copies[..., :1, :].expand_as(copies)) else 1


def _parents(path: str) -> list[str]:
    """Paths of the modules around the one at `path`, the innermost first."""
    names = path.split(".")[:-1]
    return [".".join(names[:count]) for count in range(len(names), -1, -1)]


def _affine(owner: nn.Module, rows: Tensor, first: Tensor) -> dict[str, str]:
    """{"weight": name, "bias": name} of vectors of `owner` with first = (rows + bias) * weight; {} without them."""
    vectors = {
        name: vector.detach()
        for name, vector in owner.named_parameters(recurse=False)
        if vector.shape == rows.shape[-1:] and first.shape == rows.shape
    }
    for (weight, factor), (bias, shift) in itertools.permutations(vectors.items(), 2):
        if _relative(first, (rows + shift) * factor) <= 1e-12:
            return {"weight": weight, "bias": bias}
    return {}


def _relative(wanted: Tensor, made: Tensor) -> float:
    """||wanted - made|| / ||wanted||."""
    return float((wanted - made).norm() / wanted.norm())


def _after_history(calls: Mapping[str, Call], layers: str, last: Tensor) -> SeveralCall:
    """The module that reads what the last layer gives and, as a stack, all that layers kept."""
    found = []
    for path, call in calls.items():
        if path.startswith(layers + ".") or path == layers:
            continue
        places = [
            place
            for place, held in top_level(call)
            if same(held, last) or (held.ndim == 4 and held.shape[::3] == last.shape[::2])
        ]
        if len(places) == 2 and len(top_level(call)) == 2:
            found.append(several(call, places))
    if len(found) != 1:
        raise Undiscovered(f"{len(found)} modules read what the last layer gives and what layers kept, expected one")
    return found[0]


def _feeds(call: Call, head: Call) -> bool:
    """Whether the head reads what the call gives, or a multiple of it."""
    return call.result.shape == head.hidden.shape and bool(solve(head.hidden, {"norm": call.result}))


def _reads(call: Call, value: Tensor) -> bool:
    return call.hidden.shape == value.shape and same(call.hidden, value)


def _embedding(model: nn.Module, calls: Mapping[str, Call], ids: Tensor) -> str:
    """The table whose rows start the stream. Where several tables are fed the ids, the model says which one it is."""
    fed = [path for path, call in calls.items() if isinstance(call.module, nn.Embedding) and _is_fed(call, ids)]
    if len(fed) > 1:
        own = model.get_input_embeddings()  # type: ignore[operator]
        fed = [path for path in fed if calls[path].module is own]
    return _only("embedding", fed)


def _is_fed(call: Call, ids: Tensor) -> bool:
    return any(tensor.shape == ids.shape and torch.equal(tensor, ids) for tensor in tensors((call.args, call.kwargs)))


def _before_layers(
    calls: Mapping[str, Call], embed: str, layers: str, first: Tensor, ids: Tensor
) -> tuple[float, str | None]:
    """The factor on the embedding's rows, and the path of a norm between them and the first layer."""
    rows = nn.functional.embedding(ids, calls[embed].module.weight).detach()  # type: ignore[arg-type]
    if scale := solve(first, {"rows": rows}):
        return scale["rows"], None
    for path, call in calls.items():
        outside = call.has_stream and not path.startswith(layers + ".") and not isinstance(call.module, nn.Embedding)
        if outside and same(call.result, first) and (scale := solve(call.hidden, {"rows": rows})):
            return scale["rows"], path
    raise Undiscovered(f"the first layer is not fed the rows of {embed}, nor a multiple or a norm of them")


def _head(model: nn.Module, calls: Mapping[str, Call], logits: Tensor) -> tuple[str, Logits]:
    """The projection to the vocabulary and how the logits follow from it."""
    linears = {
        path: call.result[..., : logits.shape[-1]]
        for path, call in calls.items()
        if call.has_stream
        and _owns_parameters(call.module)
        and call.result.shape[:-1] == logits.shape[:-1]
        and call.result.shape[-1] >= logits.shape[-1]
    }
    found = {path: _relation(model, logits, raw) for path, raw in linears.items()}
    head = _only("head", [path for path, relation in found.items() if relation], deepest=True)
    scale, softcap = found[head] or (1.0, None)
    rows = logits.shape[-1] if logits.shape[-1] != calls[head].result.shape[-1] else None
    relation = Logits(scale, softcap, rows)
    module = calls[head].module
    bias = getattr(module, "bias", None)
    product = nn.functional.linear(calls[head].hidden, module.weight, bias)  # type: ignore[arg-type]
    if not same(product, calls[head].result):
        raise Undiscovered(f"head: what {head} gives is not the product with its matrix")
    return head, relation


def _relation(model: nn.Module, logits: Tensor, raw: Tensor) -> tuple[float, float | None] | None:
    """(scale, softcap) where logits = softcap * tanh(scale * raw / softcap); None where they are something else."""
    if found := solve(logits, {"head": raw}):
        return found["head"], None
    if (cap := _softcap(logits, raw)) is not None:
        return 1.0, cap
    for cap in _numbers(model):
        if cap > float(logits.abs().max()) and (found := solve(cap * torch.atanh(logits / cap), {"head": raw})):
            return found["head"], cap
    return None


def _numbers(model: nn.Module) -> list[float]:
    """Numbers that the config holds, nested ones too."""
    found: set[float] = set()

    def walk(held: object) -> None:
        if isinstance(held, dict):
            for value in held.values():
                walk(value)
        elif isinstance(held, (int, float)) and not isinstance(held, bool):
            found.add(float(held))

    walk(model.config.to_dict())  # type: ignore[union-attr, operator]
    return sorted(found)


def _softcap(logits: Tensor, raw: Tensor) -> float | None:
    """c where logits = c tanh(raw / c), solved by bisection on the largest logit; None where there is no such c."""
    position = int(raw.abs().argmax())
    want, value = float(logits.flatten()[position].abs()), float(raw.flatten()[position].abs())
    if not 0 < want < value:
        return None
    low, high = want, want * 1e12
    for _ in range(400):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if middle * math.tanh(value / middle) < want else (low, middle)
    cap = float(f"{low:.10g}")
    capped = cap * torch.tanh(raw / cap)
    return cap if float((capped - logits).norm()) <= 1e-9 * float(logits.norm()) else None


def _owns_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _only(what: str, paths: list[str], deepest: bool = False) -> str:
    if deepest and paths:
        depth = max(path.count(".") for path in paths)
        paths = [path for path in paths if path.count(".") == depth]
    if len(paths) != 1:
        raise Undiscovered(f"{what}: {len(paths)} modules fit ({', '.join(paths[:4]) or 'none'}), expected one")
    return paths[0]


def _stream(call: Call, following: Call | None) -> Tensor:
    """The layer's input: its first floating-point argument of the shape that it gives."""
    given = [tensor for tensor in floats((call.args, call.kwargs)) if tensor.shape == call.result.shape]
    return given[0] if given else call.hidden


def _layer_list(model: nn.Module, calls: Mapping[str, Call]) -> str:
    """The module list whose members pass the stream on from one to the next; the outermost and longest of them."""
    chains: dict[str, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        members = [calls.get(f"{path}.{index}") for index in range(len(module))]
        if not all(member is not None and member.has_stream for member in members):
            continue
        pairs = itertools.pairwise(members)
        if all(passes_on(one, two) for one, two in pairs if one is not None and two is not None):
            chains[path] = len(module)
    if not chains:
        raise Undiscovered("layers: no list of modules passes a stream on from one member to the next")
    outermost = [path for path in chains if not any(path.startswith(other + ".") for other in chains)]
    longest = max(chains[path] for path in outermost)
    return _only("layers", [path for path in outermost if chains[path] == longest])
