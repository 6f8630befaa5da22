"""Candidates for a routed mixture of experts, found by what flows: the router makes the index that experts receive.

The block is solved part by part: experts for the index and the weights that they received, the router for the index and
the weights that it gave, then what stands around them. What is left is enumerated, and the prover decides.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present, size
from dayzero.onboard.candidates.expert_banks import Bank, banks
from dayzero.onboard.candidates.experts import propose_experts, run_experts
from dayzero.onboard.candidates.feed_forward import propose_feed_forward
from dayzero.onboard.candidates.gates import gate_arguments
from dayzero.onboard.candidates.nesting import Inner, below, site_below
from dayzero.onboard.candidates.norm import propose_norm
from dayzero.onboard.candidates.odd_routers import propose_odd_routers
from dayzero.onboard.candidates.router import dense, propose_router
from dayzero.onboard.discover import Call, same, tensors
from dayzero.onboard.reference import state_of
from dayzero.runtime.block_spec import BlockSpec
from dayzero.runtime.nn.gated_activation import gated
from dayzero.runtime.weights import Concat, Flatten, Source, Stored, Transpose

TOLERANCE = 1e-9
MOST = 64  # candidates handed to the prover


def propose_moe(site: Site) -> list[Candidate]:
    """Mixtures that agree, part by part, with what was captured inside the module."""
    found: list[Candidate] = []
    called = sorted(banks(site), key=lambda bank: bank.owner not in site.inner)
    for bank in called[:1]:
        parts = _Parts(site, bank)
        for combined in itertools.islice(_combined(parts), MOST - len(found)):
            found.append(combined)
    return found


@dataclass
class _Parts:
    """The module taken apart around its routed experts."""

    site: Site
    bank: Bank
    around: dict[str, "Evidence | Candidate"] = field(default_factory=dict)
    parameters: dict[str, Source] = field(default_factory=dict)

    @property
    def stream(self) -> Tensor:
        """[T, H]"""
        hidden = self.site.call.hidden
        return hidden.reshape(-1, hidden.shape[-1])

    @cached_property
    def container(self) -> Call | None:
        return self.site.inner.get(self.bank.owner)

    @cached_property
    def index(self) -> Tensor | None:
        """[T, K] int64: the experts that the container was told."""
        call = self.container
        if call is None:
            return None
        found = [t for t in tensors((call.args, call.kwargs)) if t.dtype == torch.int64 and t.ndim >= 2]
        fits = [t for t in found if t.numel() % self.stream.shape[0] == 0]
        whole = [t.reshape(self.stream.shape[0], -1) for t in fits]
        # A mask over experts is no list of them.
        return whole[0] if len(whole) == 1 and not (whole[0].shape[1] > 1 and int(whole[0].sum(1).max()) <= 1) else None

    @cached_property
    def weights(self) -> Tensor | None:
        """[T, K]: the weights that the container was told."""
        if self.index is None or self.container is None:
            return None
        held = [t for t in tensors((self.container.args, self.container.kwargs)) if t.is_floating_point()]
        found = [t for t in held[1:] if t.numel() == self.index.numel()]
        return found[0].reshape(self.index.shape) if len(found) == 1 else None

    @cached_property
    def expert_input(self) -> Tensor | None:
        """[T, width] that the container read, None where that is not one row a token."""
        if self.container is None:
            return None
        hidden = self.container.hidden.reshape(-1, self.container.hidden.shape[-1])
        return hidden if hidden.shape[0] == self.stream.shape[0] else None

    @cached_property
    def router_path(self) -> str:
        """The module whose output holds the index; the module itself where it routes in a method of its own."""
        if self.index is not None:
            for path, call in self.site.inner.items():
                inside = f"{path}.".startswith(f"{self.bank.owner}.") or f"{self.bank.owner}.".startswith(f"{path}.")
                if not inside and any(_equal(tensor, self.index) for tensor in tensors(call.output)):
                    return path
        return ""

    @cached_property
    def shared(self) -> dict[str, Candidate]:
        """Feed-forward layers on the stream, by path, outermost ones."""
        found: dict[str, Candidate] = {}
        for path, call in reversed(self.site.inner.items()):
            if self._is_of_bank_or_router(path) or any(path.startswith(f"{other}.") for other in found):
                continue
            if (
                call.has_stream
                and call.hidden.shape[-1] == self.stream.shape[1]
                and _flat_same(call.hidden, self.stream)
            ):
                inner = site_below(self.site, path)
                fitting = (c for c in propose_feed_forward(inner) if _reproduces(c, inner))
                if (best := next(fitting, None)) is not None:
                    found[path] = below(path, best)
        return found

    def _is_of_bank_or_router(self, path: str) -> bool:
        owners = [self.bank.owner, *([self.router_path] if self.router_path else [])]
        return any(f"{path}.".startswith(f"{owner}.") for owner in owners)

    @cached_property
    def norms(self) -> dict[str, Candidate]:
        """Norms by path that are not the router's, the first candidate that gives the captured values."""
        found: dict[str, Candidate] = {}
        for path, call in self.site.inner.items():
            of_router = self.router_path and f"{path}.".startswith(f"{self.router_path}.")
            vectors = all(p.ndim == 1 for p in call.module.parameters()) and any(True for _ in call.module.parameters())
            if of_router or not vectors or not call.has_stream or isinstance(call.module, nn.Linear):
                continue
            inner = site_below(self.site, path)
            fitting = (c for c in propose_norm(inner) if _reproduces(c, inner))
            if (best := next(fitting, None)) is not None:
                found[path] = below(path, best)
        return found

    @cached_property
    def free(self) -> dict[str, Tensor]:
        """Tensors that are not the experts', a shared layer's, a norm's or a projection's: those that may be the
        router's."""
        taken = set(self.bank.parameters)
        for candidate in [*self.shared.values(), *self.norms.values()]:
            taken |= {name for source in candidate.parameters.values() for name in source.names({})}
        return {
            name: tensor
            for name, tensor in state_of(self.site.module).items()
            if name not in taken and name.partition(".")[0] not in self.idle
        }

    @cached_property
    def idle(self) -> set[str]:
        """Children that did not run and whose parameters do not reach the output: other experts for other tokens."""
        quiet = {name for name, _ in self.site.module.named_children() if name not in self.site.inner}
        parameters = {
            n: p for n, p in self.site.module.named_parameters() if p.requires_grad and n.split(".")[0] in quiet
        }
        output = self.site.call.replay(self.site.call.hidden)
        if not parameters or not output.requires_grad:
            return quiet
        grads = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
        return quiet - {name.split(".")[0] for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def _equal(tensor: Tensor, index: Tensor) -> bool:
    return (
        tensor.dtype == index.dtype
        and tensor.numel() == index.numel()
        and torch.equal(tensor.reshape(index.shape), index)
    )


def _flat_same(value: Tensor, stream: Tensor) -> bool:
    return value.numel() == stream.numel() and torch.equal(value.reshape(stream.shape), stream)


def _loaded(candidate: Candidate, site: Site) -> nn.Module | None:
    """The candidate as a block with the module's values, None where it cannot be built."""
    try:
        block = candidate.spec(site.module, site.config).build().to(torch.float64)
        values = candidate.values(state_of(site.module))
        block.load_state_dict(values, strict=True)
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError):
        return None
    return block


def _reproduces(candidate: Candidate, site: Site) -> bool:
    block = _loaded(candidate, site)
    if block is None:
        return False
    with torch.no_grad():
        ours = block(site.call.hidden.reshape(-1, site.call.hidden.shape[-1]))
    # Not the captured result: the module above may have added to it in place.
    return _close(ours, site.usual)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.numel() != theirs.numel():
        return False
    miss = torch.linalg.vector_norm(ours - theirs.reshape(ours.shape))
    return bool(miss <= TOLERANCE * torch.linalg.vector_norm(theirs))


def _combined(parts: _Parts) -> Iterator[Candidate]:
    """Routers x experts x surroundings, those that hold on the captured values."""
    width = parts.expert_input.shape[1] if parts.expert_input is not None else parts.stream.shape[1]
    experts = list(_experts(parts, width))
    if not experts:
        return
    routers = list(_routers(parts))
    for router, container, around in itertools.product(routers, experts, list(_surroundings(parts, width))):
        arguments, parameters = around
        held = {"router": _with_block_scale(parts, router), "experts": container, **arguments}
        if router.block == "JointRouter":
            if (weighed := _weighed_shared(parts)) is None:
                continue
            held["shared"] = weighed
        for extra in _readings(parts, router, container):
            yield Candidate("MixtureOfExperts", {**held, **extra}, dict(parameters))


def _experts(parts: _Parts, width: int) -> Iterator[Candidate]:
    inner = Inner(parts.site, parts.bank.owner if parts.container is not None else "")
    norm = _expert_norm(parts)
    for candidate in propose_experts(inner, parts.bank, width):
        if parts.index is None or parts.weights is None or parts.expert_input is None or norm is not None:
            yield candidate
            continue
        block = _loaded(candidate, parts.site)
        assert parts.container is not None
        if block is None:
            continue
        got = run_experts(block, parts.expert_input, parts.index, parts.weights)  # type: ignore[arg-type]
        spare = parts.index >= parts.bank.experts
        beyond = parts.expert_input * (parts.weights * spare).sum(-1, keepdim=True)
        if _close(got, parts.container.result) or _close(got + beyond, parts.container.result):
            yield candidate


def _routers(parts: _Parts) -> Iterator[Candidate]:
    hidden = parts.stream.shape[1]
    inner = Inner(parts.site, parts.router_path)
    prefix = f"{parts.router_path}." if parts.router_path else ""
    linears = {f"{path}.weight" for path, call in parts.site.inner.items() if isinstance(call.module, nn.Linear)}
    own = {name: tensor for name, tensor in parts.free.items() if name.startswith(prefix)}
    loose = {name: tensor for name, tensor in parts.free.items() if name.rpartition(".")[0] not in linears}
    matrices = [
        name
        for name, tensor in own.items()
        if tensor.ndim == 2 and tensor.is_floating_point() and tensor.shape[1] == hidden and tensor.shape[0] > 1
    ]
    vectors = {
        name: tensor.numel()
        for name, tensor in {**own, **loose}.items()
        if tensor.is_floating_point() and tensor.numel() == max(tensor.shape, default=0)
    }
    top_k = None if parts.index is None else parts.index.shape[1]
    made = [candidate for matrix in matrices for candidate in propose_router(inner, matrix, vectors, hidden)]
    made += propose_odd_routers(inner, matrices, vectors, parts.bank.experts, top_k)
    for candidate in made:
        block = _loaded(candidate, parts.site)
        if block is None:
            continue
        if parts.index is None or parts.weights is None or _routes_alike(block, parts):
            yield candidate


def _routes_alike(block: nn.Module, parts: _Parts) -> bool:
    assert parts.index is not None
    assert parts.weights is not None
    with torch.no_grad():
        try:
            weights, index = block(parts.stream, parts.site.context)
        except (RuntimeError, ValueError):
            return False
    classes = max(int(block.experts), int(parts.index.max()) + 1)  # type: ignore[arg-type]
    if index.shape != parts.index.shape:
        return False
    got = dense(index, weights[:, : index.shape[1]], classes)
    want = dense(parts.index, parts.weights, classes)
    spare = got[:, parts.bank.experts :]
    if _close(got, want):
        return True
    # The weights of classes without an expert may have been set to zero on their way.
    got[:, parts.bank.experts :] = torch.where(want[:, parts.bank.experts :] == 0, 0.0, spare)
    return _close(got, want)


def _with_block_scale(parts: _Parts, router: Candidate) -> Candidate:
    """A factor on the routed sum, which is the same as one on every weight."""
    if "scale" in router.arguments or parts.container is None or router.block not in {"Router", "HashRouter"}:
        return router
    result = parts.container.result
    whole = Inner(parts.site, "")
    sequence = whole.operations.sequence
    inside = Inner(parts.site, parts.bank.owner).operations.sequence
    own = {step.numbers for step in inside if step.name == "mul" and step.shape[-1:] == result.shape[-1:]}
    for step in sequence:
        outside = step.name == "mul" and step.numbers and step.shape[-1:] == result.shape[-1:]
        if outside and step.numbers not in own:
            value = step.numbers[-1]
            found = whole.cause(value)
            if value != 1.0 or found.label.startswith("attribute"):
                return Candidate(router.block, {**router.arguments, "scale": found}, router.parameters, router.when)
    return router


def _expert_norm(parts: _Parts) -> Candidate | None:
    inside = [c for path, c in parts.norms.items() if path.startswith(f"{parts.bank.owner}.") and parts.bank.owner]
    return inside[0] if len(inside) == 1 else None


_Around = tuple[dict[str, Evidence | Candidate], dict[str, Source]]


def _surroundings(parts: _Parts, width: int) -> Iterator[_Around]:
    """What stands around the experts, by whose values are whose."""
    arguments: dict[str, Evidence | Candidate] = {}
    parameters: dict[str, Source] = {}
    given = parts.container.result if parts.container is not None else None
    if (norm := _expert_norm(parts)) is not None:
        arguments["expert_norm"] = norm
    for path, norm in parts.norms.items():
        call = parts.site.inner[path]
        if same(call.result, parts.site.call.result):
            arguments["output_norm"] = norm
        elif parts.expert_input is not None and _flat_same(call.result, parts.expert_input):
            arguments["latent_norm"] = norm
        elif given is not None and call.hidden.numel() == given.numel() and same(call.hidden, given):
            arguments["routed_norm"] = norm
    linears = {p: c for p, c in parts.site.inner.items() if isinstance(c.module, nn.Linear) and c.has_stream}
    outside = {p: c for p, c in linears.items() if not parts._is_of_bank_or_router(p) and not _within(p, parts.shared)}
    if not (parts.expert_input is None or _flat_same(parts.expert_input, parts.stream)):
        latent = _latent(parts, outside, width)
        if latent is None:
            return
        arguments |= latent[0]
        parameters |= latent[1]
    gates = [
        p
        for p, c in outside.items()
        if c.module.get_parameter("weight").shape[0] == 1 and _flat_same(c.hidden, parts.stream)
    ]
    if len(gates) == 1:
        arguments["shared_gate"] = literal(True, f"{gates[0]} has one output")
        parameters["gate.weight"] = Stored(f"{gates[0]}.weight")
    shared = list(parts.shared.values()) or list(_inline_shared(parts, outside))
    if len(shared) > 1:
        return
    if shared:
        arguments["shared"] = shared[0]
    biases = [n for n, t in parts.free.items() if t.ndim == 1 and "." not in n and t.numel() == parts.stream.shape[1]]
    if len(biases) == 1:
        arguments["bias"] = literal(True, f"the parameter {biases[0]}")
        parameters["bias"] = Stored(biases[0])
    halved = [s for s in parts.site.operations.sequence if s.name == "div" and s.numbers[-1:] == (2.0,)]
    if halved:
        arguments["average"] = literal(True, "the trace halves the sum")
    yield arguments, parameters


def _inline_shared(parts: _Parts, linears: dict[str, Call]) -> Iterator[Candidate]:
    """A gated layer whose three projections are the module's own: one whose input is made of what two others give."""
    stream = parts.stream
    readers = {p: c for p, c in linears.items() if _flat_same(c.hidden, stream)}
    for down, last in linears.items():
        width = last.module.get_parameter("weight").shape[1]
        fitting = [p for p, c in readers.items() if p != down and c.module.get_parameter("weight").shape[0] == width]
        for (gate, up), act in itertools.product(
            itertools.permutations(fitting, 2), gate_arguments(Inner(parts.site, ""))
        ):
            form = act.resolve(parts.site.module, parts.site.config)
            made = gated(
                form.build() if isinstance(form, BlockSpec) else form, linears[gate].result, linears[up].result
            )
            if _close(made, last.hidden):
                arguments: dict[str, Evidence | Candidate] = {
                    "hidden": size(f"{gate}.weight", 1),
                    "width": size(f"{gate}.weight", 0),
                    "act": act,
                    "bias": present(f"{gate}.bias"),
                }
                kinds = ("weight", "bias") if last.module.bias is not None else ("weight",)
                names = {"gate": gate, "up": up, "down": down}
                yield Candidate(
                    "GatedFeedForward",
                    arguments,
                    {f"{ours}.{kind}": Stored(f"{theirs}.{kind}") for ours, theirs in names.items() for kind in kinds},
                )
                return


def _within(path: str, owners: dict[str, Candidate]) -> bool:
    return any(f"{path}.".startswith(f"{owner}.") for owner in owners)


def _latent(parts: _Parts, linears: dict[str, Call], width: int) -> _Around | None:
    """The projections to the experts' width and back."""
    hidden = parts.stream.shape[1]
    into = [p for p, c in linears.items() if tuple(c.module.get_parameter("weight").shape) == (width, hidden)]
    out_of = [p for p, c in linears.items() if tuple(c.module.get_parameter("weight").shape) == (hidden, width)]
    if len(into) != 1 or len(out_of) != 1:
        return None
    parameters: dict[str, Source] = {}
    for name, path in (("into", into[0]), ("out_of", out_of[0])):
        parameters[f"{name}.weight"] = Stored(f"{path}.weight")
        if linears[path].module.bias is not None:
            parameters[f"{name}.bias"] = Stored(f"{path}.bias")
    return {
        "hidden": size(f"{into[0]}.weight", 1),
        "latent_bias": present(f"{into[0]}.bias"),
    }, parameters


def _weighed_shared(parts: _Parts) -> Candidate | None:
    """Shared experts [S, F, H] that the router weighs, as one feed-forward layer of width S * F."""
    for bank in banks(parts.site)[1:]:
        if len(bank.matrices) != 3:
            continue
        inner = Inner(parts.site, bank.owner)
        for container in propose_experts(inner, bank, parts.stream.shape[1]):
            gate_up = container.parameters["gate_up"]
            if not isinstance(gate_up, Concat):
                continue
            gate, up = (Flatten(0, part) for part in gate_up.parts)
            down = Transpose(Flatten(0, Transpose(container.parameters["down"])))
            arguments: dict[str, Evidence | Candidate] = {
                "hidden": container.arguments["hidden"],
                "width": _product(container.arguments["experts"], container.arguments["width"]),
                "act": container.arguments["act"],
                "parts": container.arguments["experts"],
            }
            weights: dict[str, Source] = {"gate.weight": gate, "up.weight": up, "down.weight": down}
            return Candidate("GatedFeedForward", arguments, weights)
    return None


def _product(a: Any, b: Any) -> Evidence:
    return Evidence(
        f"{a.label} * {b.label}", lambda module, config: a.resolve(module, config) * b.resolve(module, config)
    )


def _readings(parts: _Parts, router: Candidate, container: Candidate) -> Iterator[dict[str, Evidence | Candidate]]:
    """Where the weights enter, and what classes without an expert give."""
    classes = router.arguments["experts"].resolve(parts.site.module, parts.site.config)
    weighed: list[dict[str, Evidence | Candidate]] = [{}]
    if parts.weights is None:
        weighed.append({"weigh": literal("input", "enumerated")})
    spare: list[dict[str, Evidence | Candidate]] = [{}]
    if isinstance(classes, int) and classes > parts.bank.experts:
        spare.append({"spare": literal("identity", "enumerated")})
    for a, b in itertools.product(weighed, spare):
        yield {**a, **b}
