"""Quantised weights of random bytes, by format."""

import numpy as np
import torch


def rng(seed=0):
    return np.random.default_rng(seed)


def codes(shape, seed=0):
    """Random bytes; the first 256 are every byte once where there are so many."""
    flat = rng(seed).integers(0, 256, int(np.prod(shape)), dtype=np.uint8)
    flat[: min(256, flat.size)] = np.arange(256, dtype=np.uint8)[: flat.size]
    return torch.from_numpy(flat.reshape(shape))


def grid_of(shape, block):
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))


def specimen(name, shape, seed=0):
    """Random parts of a weight [..., R, C]; C a multiple of 32."""
    *lead, rows, columns = shape
    scales = {"bytes": codes((*lead, rows, columns // 32), seed=seed + 1).clamp(100, 140)}
    if name == "fp8_block":
        grid = (*lead, *grid_of((rows, columns), (128, 128)))
        scale = torch.from_numpy(rng(seed).uniform(0.5, 2, grid).astype(np.float32))
        return {"weight": codes(shape, seed=seed).view(torch.float8_e4m3fn), "scale": scale}
    if name == "fp8_ue8m0":
        scale = codes((*lead, *grid_of((rows, columns), (32, 32))), seed=seed).clamp(100, 140)
        return {"weight": codes(shape, seed=seed).view(torch.float8_e4m3fn), "scale": scale.view(torch.float8_e8m0fnu)}
    if name == "mxfp8":
        return {"weight": codes(shape, seed=seed).view(torch.float8_e4m3fn), "scale": scales["bytes"]}
    packed = codes((*lead, rows, columns // 2), seed=seed)
    if name == "mxfp4_packed":
        return {"packed": packed, "scale": scales["bytes"]}
    if name == "mxfp4_blocks":
        return {"blocks": packed.unflatten(-1, (-1, 16)), "scales": scales["bytes"]}
    if name == "int4_packed":
        scale = torch.from_numpy(rng(seed).uniform(0.5, 2, (*lead, rows, columns // 32)).astype(np.float32))
        return {"packed": packed.view(torch.int32), "scale": scale.to(torch.bfloat16), "shape": torch.tensor(shape)}
    scale = codes((*lead, rows, columns // 16), seed=seed).clamp(max=120).view(torch.float8_e4m3fn)
    return {"packed": packed, "scale": scale, "scale_2": torch.tensor(0.03)}
