"""What the ranks of test_expert_parallel.py do: a mixture whose experts are spread over ranks, beside a whole one."""

import copy
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import npu_exchange
import torch
import torch.distributed as dist
from exactness import relative_error, worst
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dayzero.runtime.nn import (
    Experts,
    GatedFeedForward,
    HashRouter,
    JointRouter,
    LayerNorm,
    MixtureOfAttention,
    MixtureOfExperts,
    Normalise,
    RMSNorm,
    Router,
    fused_dispatch,
)
from dayzero.runtime.nn.capacity import Capacity
from dayzero.runtime.nn.context import Context
from dayzero.runtime.nn.duplicates import Duplicates
from dayzero.runtime.nn.exchange import Flight
from dayzero.runtime.nn.expert_parallel import Exchange
from dayzero.runtime.nn.permutation import through_experts
from dayzero.runtime.parallel import split_experts
from dayzero.runtime.recompute import recompute

HIDDEN, WIDTH, EXPERTS, VOCABULARY = 12, 7, 8, 50
TOKENS = (9, 14, 0, 5)  # of each rank


def build(form: str) -> Any:
    router: Any = Router(HIDDEN, EXPERTS, 3, normalise=Normalise(), scale=1.5)
    experts = Experts(EXPERTS, HIDDEN, WIDTH, "silu", bias=form == "biases")
    more: dict[str, Any] = {}
    if form == "hash":
        router = HashRouter(HIDDEN, EXPERTS, 3, VOCABULARY)
    elif form == "shared":
        more = {"shared": GatedFeedForward(HIDDEN, 5, "silu"), "shared_gate": True, "average": True}
    elif form == "weighed-shared":
        router = JointRouter(HIDDEN, EXPERTS, 2, 3)
        more = {"shared": GatedFeedForward(HIDDEN, 10, "silu", parts=2)}
    elif form == "latent":
        experts = Experts(EXPERTS, 6, WIDTH, "silu")
        more = {"hidden": HIDDEN, "latent_norm": RMSNorm(6, 1e-6), "routed_norm": RMSNorm(6, 1e-6)}
    elif form == "input":
        more = {"weigh": "input", "expert_norm": LayerNorm(HIDDEN, 1e-6)}
    elif form in ("identity", "zero"):
        router = Router(HIDDEN, EXPERTS + 4, 5)
        more = {"spare": form, "expert_norm": RMSNorm(HIDDEN, 1e-6)}
    elif form == "all":
        router = Router(HIDDEN, EXPERTS, EXPERTS)
    elif form == "attention":
        return MixtureOfAttention(router, Experts(EXPERTS, HIDDEN, 6, None, is_gated=False), 2, 0.4, None, bias=True)
    elif form == "one":
        router = Router(HIDDEN, EXPERTS, 1)
    return MixtureOfExperts(router, experts, **more)


def compare(cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Worst relative error of output, input gradient and every parameter's gradient, by name of the case."""
    return {name: _compare(form, **how) for name, (form, how) in cases.items()}


def _compare(
    form: str, *, push: dict[int, float] | None = None, hosts=(), merge=0, capacity: Capacity | None = None,
    recomputed=False, dtype=torch.float64, **exchange,
) -> dict[str, Any]:  # fmt: skip
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    whole = build(form).to(dtype)
    for name, parameter in (*whole.named_parameters(), *whole.named_buffers()):
        if name.endswith("table"):
            whole.router.reset_parameters(0.3)
        else:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.4)
    inputs = [torch.randn(tokens, HIDDEN, dtype=dtype) for tokens in TOKENS[:world]]
    ids = [torch.randint(0, VOCABULARY, (tokens,)) for tokens in TOKENS[:world]]
    weigh = [torch.randn(tokens, HIDDEN, dtype=dtype) for tokens in TOKENS[:world]]
    if push:
        with torch.no_grad():
            for x in inputs:
                x[:, 0] = 1.0
            for expert, size in push.items():
                whole.router.weight[expert, 0] = size
    part = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    split_experts(part.experts, mesh)
    part.exchange = Exchange(mesh.get_group(), **exchange)
    if hosts:
        part.exchange.duplicates = Duplicates(hosts, EXPERTS, world)
    part.experts.merge_below = merge
    whole.capacity = part.capacity = capacity
    if recomputed:
        recompute(part)

    outputs = []
    for x, y, numbers in zip(inputs, weigh, ids, strict=True):
        context = Context(torch.tensor([0, len(x)]), (len(x),), torch.arange(len(x)), ids=numbers)
        outputs.append(whole(x.requires_grad_(), context))
        (outputs[-1] * y).sum().backward()
    x = inputs[rank].detach().clone().requires_grad_()
    context = Context(torch.tensor([0, len(x)]), (len(x),), torch.arange(len(x)), ids=ids[rank])
    out = part(x, context)
    (out * weigh[rank]).sum().backward()

    errors = {"output": relative_error(out, outputs[rank]), "input": relative_error(x.grad, inputs[rank].grad)}
    for (name, parameter), other in zip(part.named_parameters(), whole.parameters(), strict=True):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad)
        errors[name] = relative_error(grad, torch.zeros_like(other) if other.grad is None else other.grad)
    where = worst(errors)
    counts = [None] * world
    assert part.expert_counts is not None
    dist.all_gather_object(counts, part.expert_counts.tolist())
    return {"worst": errors[where], "where": where, "counts": counts}


def rows_sent(form: str) -> tuple[int, int, int]:
    """(rows that left this rank, copies of its tokens for experts, ranks that its tokens need, summed)."""
    sent = []
    start = Flight.start

    def recorded(self, x, back=False):
        sent.append(x.shape[0])
        return start(self, x, back)

    torch.manual_seed(1)
    moe = build(form).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    split_experts(moe.experts, mesh)
    moe.exchange = Exchange(mesh.get_group())
    x = torch.randn(20, HIDDEN, dtype=torch.float64)
    index = moe.router(x)[1] // (EXPERTS // world)
    Flight.start = recorded
    moe(x)
    Flight.start = start
    return sent[0], index.numel(), sum(len(set(token)) for token in index.tolist())


def events(parts: int) -> tuple[list[str], list[str]]:
    """What happens in the forward and in the backward pass, in order: exchanges that start and are waited for,
    computation of the shared experts and of each part."""
    import dayzero.runtime.nn.expert_parallel as module

    log: list[str] = []
    names: dict[int, str] = {}
    kept = []  # so that no two flights have one id
    start, wait, through = Flight.start, Flight.wait, through_experts
    part = iter(range(parts))

    def started(self, x, back=False):
        kept.append(self)
        sort, number = divmod(len(names), parts)
        name = names.setdefault(id(self), f"{('tokens', 'sums')[sort % 2]} {number}")
        log.append(f"{name} leave")
        return start(self, x, back)

    def waited(self):
        log.append(f"{names[id(self)]} needed")
        return wait(self)

    def computed(experts, x, weights, copies, **how):
        name = f"experts {next(part)}"
        log.append(name)
        x = x.view_as(x)
        x.register_hook(lambda grad: log.append(name))
        return through(experts, x, weights, copies, **how)

    moe = MixtureOfExperts(
        Router(HIDDEN, EXPERTS, 3), Experts(EXPERTS, HIDDEN, WIDTH, "silu"), GatedFeedForward(HIDDEN, 5, "silu")
    )
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    split_experts(moe.experts, mesh)
    moe.exchange = Exchange(mesh.get_group(), parts=parts)
    assert moe.shared is not None
    moe.shared.register_forward_pre_hook(lambda *_: log.append("shared experts"))
    moe.shared.register_full_backward_hook(lambda *_: log.append("shared experts"))
    Flight.start, Flight.wait, module.through_experts = started, waited, computed
    y = moe(torch.randn(16, HIDDEN, requires_grad=True))
    forward = log.copy()
    log.clear()
    y.sum().backward()
    Flight.start, Flight.wait, module.through_experts = start, wait, through
    return forward, log


def buffers(hidden: int, tokens: int) -> dict[str, tuple[int, int, int]]:
    """Of each dispatcher, of a layer's two passes with every expert as likely: most bytes alive of what
    travels, in one part and in three, which are no more; and, of the operators of an NPU, what is kept of the way."""
    group = fused_dispatch.own_group(dist.get_world_size())
    with _stand_ins(group):
        return {
            name: (_most_alive(name, 1, group, hidden, tokens)[0], *_most_alive(name, 3, group, hidden, tokens))
            for name in ("alltoall", "allgather", "fused")
        }


_LETS_GO = 0.03  # seconds in which the thread of a collective that is done lets go of what it sent


def _most_alive(dispatcher: Any, parts: int, group, hidden: int, tokens: int) -> tuple[int, int]:
    alive: dict[int, int] = {}
    most, routes, start = 0, [], Flight.start

    def follow(tensor: torch.Tensor) -> None:
        nonlocal most
        time.sleep(_LETS_GO)
        storage = tensor.untyped_storage()
        if storage._cdata not in alive:
            alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, alive.pop, storage._cdata, None)
        most = max(most, sum(alive.values()))

    def followed(self, x, back=False):
        out = start(self, x, back)
        follow(self.sent)
        follow(out)
        if not back and isinstance(self.move, fused_dispatch.Dispatch):
            routes.extend(self.move.route)
        return out

    torch.manual_seed(5)
    moe = MixtureOfExperts(Router(hidden, EXPERTS, 3), Experts(EXPERTS, hidden, WIDTH, "silu"))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    torch.manual_seed(dist.get_rank())
    index = torch.rand(tokens, EXPERTS).topk(3).indices
    moe.router.forward = lambda x, context=None: (torch.ones(tokens, 3), index)  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    split_experts(moe.experts, mesh)
    moe.exchange = Exchange(mesh.get_group(), dispatcher=dispatcher, parts=parts, alone=group)
    Flight.start = followed
    moe(torch.randn(tokens, hidden, requires_grad=True)).sum().backward()
    Flight.start = start
    return most, sum(tensor.nbytes for tensor in routes)


@contextmanager
def _stand_ins(group, tokens: int = 5):
    """An NPU's operators, as `npu_exchange` computes them, of so many tokens a call."""
    before = fused_dispatch.supports, fused_dispatch.communicator, fused_dispatch.TOKENS
    library = npu_exchange.define(group)
    fused_dispatch.supports = lambda x, choices: (True, "")
    fused_dispatch.communicator = lambda group: npu_exchange.NAME
    fused_dispatch.TOKENS = tokens
    try:
        yield
    finally:
        fused_dispatch.supports, fused_dispatch.communicator, fused_dispatch.TOKENS = before
        library._destroy()


def fused(cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """`compare` by stand-ins of an NPU's operators that take 5 tokens, whose calls are there under "calls"."""
    group = fused_dispatch.own_group(dist.get_world_size())
    found = {}
    with _stand_ins(group):
        for name, (form, how) in cases.items():
            npu_exchange.CALLS.clear()
            found[name] = _compare(form, **how, dispatcher="fused", alone=group)
            found[name]["calls"] = list(npu_exchange.CALLS)
    return found


# Of both passes with three parts: what an exchange travels behind.
BEHIND = {
    "tokens 0": "shared experts", "tokens 1": "experts 0", "tokens 2": "experts 1", "sums 0": "experts 1",
    "sums 1": "experts 2", "sums 1 back": "experts 2 back", "sums 0 back": "experts 1 back",
    "tokens 2 back": "experts 1 back", "tokens 1 back": "experts 0 back", "tokens 0 back": "shared experts back",
}  # fmt: skip


def unfinished(at_once: bool = False) -> dict[str, bool]:
    """Whether each exchange of rank 0 was under way while that was computed: rank 1 takes part in it only then, so it
    cannot have ended before. at_once: wait for each as soon as it has begun, in which case both ranks wait for ever."""
    import dayzero.runtime.nn.expert_parallel as module

    rank, parts = dist.get_rank(), 3
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=2 if at_once else 30))
    names: dict[int, str] = {}
    kept, works, found = [], {}, {}
    start, through, part = Flight.start, through_experts, iter(range(parts))

    def started(self, x, back=False):
        kept.append(self)  # so that no two flights have one id
        sort, number = divmod(len(names), parts)
        name = names.setdefault(id(self), f"{('tokens', 'sums')[sort % 2]} {number}") + " back" * back
        if rank == 1 and name in BEHIND:
            store.wait([BEHIND[name]])
        out = start(self, x, back)
        works[name] = self.work
        if at_once:
            self.work.wait(timedelta(seconds=2))
        return out

    def computes(name):
        if rank == 0:
            for exchange in (one for one, behind in BEHIND.items() if behind == name):
                found[exchange] = exchange in works and not works[exchange].is_completed()
            store.set(name, "")

    def computed(experts, x, weights, copies, **how):
        name = f"experts {next(part)}"
        computes(name)
        x = x.view_as(x)
        x.register_hook(lambda grad: computes(f"{name} back"))
        return through(experts, x, weights, copies, **how)

    shared = GatedFeedForward(HIDDEN, 5, "silu")
    moe = MixtureOfExperts(Router(HIDDEN, EXPERTS, 3), Experts(EXPERTS, HIDDEN, WIDTH, "silu"), shared)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    split_experts(moe.experts, mesh)
    moe.exchange = Exchange(mesh.get_group(), parts=parts)
    shared.register_forward_hook(lambda *_: computes("shared experts"))
    shared.register_full_backward_hook(lambda *_: computes("shared experts back"))
    Flight.start, module.through_experts = started, computed
    moe(torch.randn(16, HIDDEN, requires_grad=True)).sum().backward()
    Flight.start, module.through_experts = start, through
    return found
