"""Whether two tensors are the same thing, up to what a candidate may still have to say."""

import torch
from torch import Tensor

CLOSE = 1e-9  # relative: two ways to the same values


def distinct_heads(part: Tensor) -> int:
    """How many groups of equal neighbours there are. part: [B, N, U, D]."""
    heads = part.shape[1]
    for groups in range(1, heads + 1):
        if heads % groups == 0:
            grouped = part.unflatten(1, (groups, -1))
            if bool((grouped == grouped[:, :, :1]).all()):
                return groups
    return heads


def close(ours: Tensor, wanted: Tensor) -> bool:
    return ours.shape == wanted.shape and bool(
        torch.linalg.vector_norm(ours - wanted) <= CLOSE * torch.linalg.vector_norm(wanted)
    )


def multiple(ours: Tensor, wanted: Tensor, by_position: bool) -> Tensor | None:
    """The factor that makes `ours` [B, S, heads, D] the wanted: [B, S] by position, else [1, 1]; None if none does."""
    dims = (2, 3) if by_position else (0, 1, 2, 3)
    size = ours.square().sum(dims, keepdim=True)
    factor = (ours * wanted).sum(dims, keepdim=True) / size.clamp(min=1e-300)
    return factor[:, :, 0, 0] if close(ours * factor, wanted) else None


def shifted_ratio(products: Tensor, scores: Tensor, keep: Tensor) -> float | None:
    """The factor between two [B, N, S, S], both measured from their diagonal, where `keep`; None if none fits."""
    ours, theirs = (
        torch.where(keep, part - torch.diagonal(part, dim1=-2, dim2=-1)[..., None], 0.0) for part in (products, scores)
    )
    size = float(ours.square().sum())
    if not size:
        return None
    ratio = float((ours * theirs).sum()) / size
    return ratio if close(ours * ratio, theirs) else None
