"""What the ranks of test_tensor_parallel.py and test_context_parallel.py do."""

import odd_specs
import split_cases
import torch
import torch.distributed as dist
from exactness import relative_error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dayzero.runtime.context_parallel import part_of
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.rows import all_rows, even_span
from dayzero.runtime.split import Split
from dayzero.runtime.tensor_parallel import inner_parts, split_part, split_tensors

LENGTHS = (5, 9, 1, 4)


def tensor_blocks(names: list[str], tokens: tuple[int, ...] = LENGTHS) -> dict[str, dict]:
    """Worst relative errors of every block, cut over all ranks, against the whole block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return {name: _tensor_block(name, mesh, tokens) for name in names}


def _tensor_block(name: str, mesh, lengths: tuple[int, ...]) -> dict:
    whole, block = split_cases.build(name), split_cases.build(name)
    split = Split(mesh.get_group(), None)
    split.begin(sum(lengths))
    context = split_cases.context_of(lengths)
    for path, part in inner_parts("block", block):
        split_part(part, mesh, split, path)
    cut = sum(parameter.to_local().numel() for parameter in block.parameters() if isinstance(parameter, DTensor))
    errors = _errors(whole, block, context, context, split.rows)
    return {**errors, "cut": cut, "whole": sum(parameter.numel() for parameter in whole.parameters())}


def whole_model(name: str, lengths: tuple[int, ...], over: str) -> dict[str, float]:
    """Relative errors of loss and gradients of a model of odd blocks, its tokens over all ranks of tp or cp."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(over,))
    whole, model = (odd_specs.read(name).build().double() for _ in range(2))
    initialise(whole, 0.2, seed=0)
    model.load_state_dict(whole.state_dict())
    split = Split(mesh.get_group() if over == "tp" else None, mesh.get_group() if over == "cp" else None)
    split.install(model)
    if over == "tp":
        split_tensors(model, mesh, split)
    tokens = sum(lengths)
    ids = torch.arange(tokens) * 7 % 101
    bounds, labels = torch.tensor([0, *lengths]).cumsum(0), ids.roll(-1)
    want = whole(ids, bounds, labels)
    want.backward()
    loss = model(ids, bounds, labels)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = {"loss": relative_error(total, want.detach())}
    for path, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad)
        expected = whole.get_parameter(path).grad
        errors[path] = relative_error(grad, torch.zeros_like(grad) if expected is None else expected)
    return errors


def _errors(whole, block, context, own_context, span) -> dict:
    """Of outputs, input gradients and parameter gradients."""
    generator = torch.Generator().manual_seed(1)
    tokens = len(context.position)
    x = torch.randn(tokens, split_cases.HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(tokens, split_cases.HIDDEN, generator=generator, dtype=torch.float64)
    want = split_cases.call(whole, x, context)
    (want * weight).sum().backward()
    own = x.detach()[span.own].clone().requires_grad_()
    got = split_cases.call(block, own, own_context)
    (got * weight[span.own]).sum().backward()
    errors: dict = {"output": relative_error(all_rows(got.detach(), span), want.detach())}
    assert own.grad is not None
    assert x.grad is not None
    errors["input"] = relative_error(all_rows(own.grad, span), x.grad)
    expected = dict(whole.named_parameters())
    assert expected.keys() == dict(block.named_parameters()).keys()
    errors["parameters"], errors["where"] = 0.0, ""
    for name, parameter in block.named_parameters():
        grad, other = parameter.grad, expected[name].grad
        assert (grad is None) == (other is None), f"{name} has a gradient on one side only"
        if grad is None or other is None:
            continue
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad)
        error = relative_error(grad, other)
        if not error <= errors["parameters"]:
            errors["parameters"], errors["where"] = error, name
    return errors


def context_blocks(names: list[str], documents: list[tuple[int, ...]]) -> dict[str, dict]:
    """Worst relative errors of every block whose tokens lie on all ranks, of each way to pack, against one process."""
    group = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)).get_group()
    return {f"{name} {lengths}": _context_block(name, group, lengths) for name in names for lengths in documents}


def _context_block(name: str, group, lengths: tuple[int, ...]) -> dict:
    whole, block = split_cases.build(name), split_cases.build(name)
    span, context = even_span(sum(lengths), group), split_cases.context_of(lengths)
    return _errors(whole, block, context, part_of(context, span), span)
