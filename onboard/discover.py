"""Finds the parts of a reference model by what flows between them, not by what they are called.

The embedding is the module that is fed the token ids; layers are the list whose members feed one another; the head's
output is the logits. Inside a layer, every child's input is solved as a sum of earlier values, and the mixer is the
child whose output for one token changes when another token does.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.reference import Promote


class Undiscovered(Exception):
    """The reference has a shape that no rule here explains. The message says which part and what was seen."""


@dataclass
class Call:
    """One call of a module: its arguments and its output, as they were."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def has_stream(self) -> bool:
        """Whether floating-point tensors go in and come out."""
        return bool(_floats((self.args, self.kwargs)) and _floats(self.output))

    @property
    def hidden(self) -> Tensor:
        """The first floating-point tensor among the arguments."""
        return _floats((self.args, self.kwargs))[0]

    @property
    def result(self) -> Tensor:
        """The first floating-point tensor of the output."""
        return _floats(self.output)[0]

    def replay(self, hidden: Tensor) -> Tensor:
        """The module as a pure function of its hidden input; every other argument as captured."""
        replaced = False

        def swap(value: Any) -> Any:
            nonlocal replaced
            if not replaced and isinstance(value, Tensor) and value.is_floating_point():
                replaced = True
                return hidden
            return value

        args = tuple(swap(value) for value in self.args)
        kwargs = {name: swap(value) for name, value in self.kwargs.items()}
        with Promote():
            return _floats(self.module(*args, **kwargs))[0]

    def replay_exactly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module called again with other arguments, float32 islands promoted."""
        with Promote():
            return self.module(*args, **kwargs)


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _floats(item)]
    return []


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


@dataclass
class LayerParts:
    """Paths relative to the layer, and what the layer does with their outputs."""

    mixer_norm: str
    mixer: str
    ffn_norm: str
    ffn: str


@dataclass
class ModelParts:
    """Paths of the parts. layers: path of the list. calls: the calls of the whole forward pass by path."""

    embed: str
    layers: str
    norm: str
    head: str
    rotary: str | None
    layer_parts: list[LayerParts]
    calls: dict[str, Call] = field(repr=False, default_factory=dict)


def record_calls(model: nn.Module, ids: Tensor) -> tuple[dict[str, Call], Tensor]:
    """Runs the model once; the first call of every module by path, in order of completion, and the logits.

    Raises Undiscovered for a model that cannot run.
    """
    calls: dict[str, Call] = {}
    handles = []
    for path, module in model.named_modules():

        def hook(module, args, kwargs, output, path=path):
            if path not in calls:
                calls[path] = Call(path, module, args, kwargs, output)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), Promote():
            logits = model(input_ids=ids, use_cache=False).logits
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        found = " ".join(str(error).split())[:200]
        raise Undiscovered(f"the reference does not run at small sizes ({type(error).__name__}: {found})") from None
    finally:
        for handle in handles:
            handle.remove()
    return calls, logits


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, whatever the leading dimensions."""
    if a is b:
        return True
    return a.numel() == b.numel() and a.shape[-1:] == b.shape[-1:] and torch.equal(a.reshape(b.shape), b)


def discover(model: nn.Module, ids: Tensor) -> ModelParts:
    """The parts of a decoder-only reference. Raises Undiscovered."""
    calls, logits = record_calls(model, ids)
    streams = {path: call for path, call in calls.items() if call.has_stream}
    embed = _only("embedding", [p for p, c in calls.items() if isinstance(c.module, nn.Embedding) and _is_fed(c, ids)])
    layers = _layer_list(model, calls, calls[embed].result)
    count = len(model.get_submodule(layers))  # type: ignore[arg-type]
    last = calls[f"{layers}.{count - 1}"].result
    head = _only(
        "head", [p for p, c in streams.items() if _owns_parameters(c.module) and same(c.result, logits)], deepest=True
    )
    norm = _only(
        "final norm",
        [p for p, c in streams.items() if same(c.hidden, last) and same(c.result, calls[head].hidden)]
        if not same(last, calls[head].hidden)
        else [],
        deepest=True,
    )
    if not same(nn.functional.embedding(ids, calls[embed].module.weight), calls[embed].result):  # type: ignore[arg-type]
        raise Undiscovered(f"embedding: what {embed} gives is not the rows of its table")
    if not same(nn.functional.linear(calls[head].hidden, calls[head].module.weight), logits):  # type: ignore[arg-type]
        raise Undiscovered(f"head: what {head} gives is not the product with its matrix")
    tables = tensors((calls[f"{layers}.0"].args, calls[f"{layers}.0"].kwargs))
    rotary = [
        path
        for path, call in calls.items()
        if isinstance(call.output, tuple) and len(call.output) == 2 and all(_has(tables, out) for out in call.output)
    ]
    parts = [_layer_parts(calls, f"{layers}.{index}") for index in range(count)]
    return ModelParts(embed, layers, norm, head, rotary[0] if rotary else None, parts, calls)


def _has(tables: list[Tensor], value: Any) -> bool:
    return isinstance(value, Tensor) and any(value is table for table in tables)


def _is_fed(call: Call, ids: Tensor) -> bool:
    return any(tensor.shape == ids.shape and torch.equal(tensor, ids) for tensor in tensors((call.args, call.kwargs)))


def _owns_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _only(what: str, paths: list[str], deepest: bool = False) -> str:
    if deepest and paths:
        depth = max(path.count(".") for path in paths)
        paths = [path for path in paths if path.count(".") == depth]
    if len(paths) != 1:
        raise Undiscovered(f"{what}: {len(paths)} modules fit ({', '.join(paths[:4]) or 'none'}), expected one")
    return paths[0]


def _layer_list(model: nn.Module, calls: dict[str, Call], start: Tensor) -> str:
    """The longest module list whose members pass the stream on from one to the next, starting at the embedding."""
    chains = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        members = [calls.get(f"{path}.{index}") for index in range(len(module))]
        if not all(member is not None and member.has_stream for member in members):
            continue
        stream = start
        for member in members:
            if member is None or not same(member.hidden, stream):
                break
            stream = member.result
        else:
            chains.append(path)
    return _only("layers", chains)


def _layer_parts(calls: dict[str, Call], layer: str) -> LayerParts:
    children = [call for path, call in calls.items() if path.rpartition(".")[0] == layer and call.has_stream]
    norms = [call for call in children if _is_vector_only(call.module)]
    others = [call for call in children if not _is_vector_only(call.module)]
    mixers = [call for call in others if mixes_tokens(call)]
    ffns = [call for call in others if not mixes_tokens(call)]
    if len(mixers) != 1 or len(ffns) != 1 or len(norms) != 2:
        raise Undiscovered(
            f"{layer}: {len(mixers)} token mixers, {len(ffns)} feed-forward parts and {len(norms)} norms; "
            "a plain pre-norm layer has 1, 1 and 2"
        )
    values = {"x": calls[layer].hidden} | {call.path.removeprefix(layer + "."): call.result for call in children}
    mixer, ffn = (call.path.removeprefix(layer + ".") for call in (mixers[0], ffns[0]))
    mixer_norm = _maker(values, mixers[0].hidden, f"{layer}.{mixer}")
    ffn_norm = _maker(values, ffns[0].hidden, f"{layer}.{ffn}")
    norm_of = {call.path.removeprefix(layer + "."): call for call in norms}
    if mixer_norm not in norm_of or ffn_norm not in norm_of:
        raise Undiscovered(f"{layer}: {mixer} is fed by {mixer_norm} and {ffn} by {ffn_norm}; expected its two norms")
    equations = {
        f"input of {mixer_norm}": (norm_of[mixer_norm].hidden, ["x"]),
        f"input of {ffn_norm}": (norm_of[ffn_norm].hidden, ["x", mixer]),
        "output": (calls[layer].result, ["x", mixer, ffn]),
    }
    for name, (found, terms) in equations.items():
        solved = solve(found, values)
        if solved != dict.fromkeys(terms, 1.0):
            shown = " + ".join(f"{c:g} {term}" for term, c in solved.items()) if solved else "no sum of earlier values"
            raise Undiscovered(f"{layer}: {name} is {shown}; a plain pre-norm layer has {' + '.join(terms)}")
    return LayerParts(mixer_norm, mixer, ffn_norm, ffn)


def _is_vector_only(module: nn.Module) -> bool:
    return all(parameter.ndim <= 1 for parameter in module.parameters())


def _maker(values: dict[str, Tensor], wanted: Tensor, what: str) -> str:
    makers = [name for name, value in values.items() if same(value, wanted)]
    if len(makers) != 1:
        raise Undiscovered(f"input of {what} equals {makers or 'no earlier value'}; expected one")
    return makers[0]


def solve(wanted: Tensor, values: dict[str, Tensor]) -> dict[str, float]:
    """`wanted` as a linear combination of `values` (least squares): the terms with their coefficients, {} if none."""
    names = [name for name, value in values.items() if value.numel() == wanted.numel()]
    basis = torch.stack([values[name].reshape(-1) for name in names], 1)
    target = wanted.reshape(-1, 1)
    coefficients = torch.linalg.lstsq(basis, target).solution
    if torch.linalg.norm(basis @ coefficients - target) > 1e-9 * torch.linalg.norm(target):
        return {}
    rounded = {name: round(float(c), 9) for name, c in zip(names, coefficients[:, 0], strict=True)}
    return {name: c for name, c in rounded.items() if c}


def mixes_tokens(call: Call) -> bool:
    """Whether the output for a token depends on the other tokens: one token is changed and the rest watched."""
    hidden = call.hidden
    changed = hidden.clone()
    changed[:, 0] += 1.0
    with torch.no_grad():
        before, after = call.replay(hidden), call.replay(changed)
    before, after = before.reshape(hidden.shape)[:, 1:], after.reshape(hidden.shape)[:, 1:]
    # Not bitwise: an expert's matrix product rounds differently when it has other rows beside these.
    return bool((before - after).abs().max() > 1e-9 * before.abs().max())
