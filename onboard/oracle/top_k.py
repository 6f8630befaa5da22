"""What routers choose, seen and replaced: every `topk` that a model calls, whatever code calls it."""

from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _TopK(TorchFunctionMode):
    """Sees every `topk` and the innermost module that calls it (None outside of all)."""

    def __enter__(self) -> Self:
        self._running: list[nn.Module] = []
        hooks = nn.modules.module
        self._hooks = (
            hooks.register_module_forward_pre_hook(lambda module, args: self._running.append(module)),
            hooks.register_module_forward_hook(lambda module, args, output: self._left(), always_call=True),
        )
        return super().__enter__()

    def _left(self) -> None:
        self._running.pop()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            return self.chosen(self._running[-1] if self._running else None, args[0], output)
        return output

    def chosen(self, module: nn.Module | None, scores: Tensor, output: Any) -> Any:
        raise NotImplementedError


class NoteTopK(_TopK):
    """Notes every `topk`: how many it chose from, and how many it chose; and by which module, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.by: list[nn.Module | None] = []

    def chosen(self, module: nn.Module | None, scores: Tensor, output: Any) -> Any:
        self.seen.append((scores.shape[-1], output.indices.shape[-1]))
        self.by.append(module)
        return output


class ForceTopK(_TopK):
    """Replaces what routers choose: the indices of the n-th `topk` that is like one of a router (as many to choose
    from, as many chosen) by `choices[n]`, rows as in the call, values gathered to match. A call with fewer rows than
    `choices[n]`, such as one for each document, takes the next of them. Other calls, of groups of experts or of sparse
    attention, are left alone. like: (classes, top_k) of the routers. among: only what these modules choose, None for
    all. calls: how many of the choices were taken whole."""

    def __init__(
        self,
        choices: list[Tensor],
        like: Collection[tuple[int, int]],
        among: Collection[nn.Module | None] | None = None,
    ):
        super().__init__()
        self.choices, self.like, self.among, self.calls = choices, like, among, 0
        self._taken = 0  # rows of the choices that are being taken

    def chosen(self, module: nn.Module | None, scores: Tensor, output: Any) -> Any:
        pair = scores.shape[-1], output.indices.shape[-1]
        if pair not in self.like or (self.among is not None and module not in self.among):
            return output
        held = self.choices[self.calls].flatten(0, -2)
        rows = scores.shape[:-1].numel()
        index = held[self._taken : self._taken + rows].reshape(*scores.shape[:-1], -1)
        self._taken += rows
        if self._taken >= len(held):
            self.calls, self._taken = self.calls + 1, 0
        return torch.return_types.topk((scores.gather(-1, index), index))


def steady_choices(runs: list[Callable[[], Any]], like: Collection[tuple[int, int]]) -> NoteTopK:
    """The choices of the first run that are like a router's in all: how many a router chooses from and chooses does not
    depend on how many tokens there are, as it does for attention to the best of them. runs: the model on documents of
    different lengths."""
    noted = []
    for run in runs:
        with NoteTopK() as seen:
            run()
        noted.append(seen)
    everywhere = set.intersection(*({*zip(seen.by, seen.seen, strict=True)} for seen in noted))
    steady = NoteTopK()
    for module, pair in zip(noted[0].by, noted[0].seen, strict=True):
        if pair in like and (module, pair) in everywhere:
            steady.seen.append(pair)
            steady.by.append(module)
    return steady
