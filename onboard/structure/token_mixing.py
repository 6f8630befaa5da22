"""Whether a module mixes tokens: what it gives for one depends on the others."""

import torch

from dayzero.onboard.oracle.calls import Call, floats
from dayzero.onboard.structure.left import left_with_first_token_moved
from dayzero.onboard.structure.several import SeveralCall


def mixes_tokens(call: Call) -> bool:
    """Whether the output for a token depends on the other tokens: one token is changed and the rest watched.

    Also where the others' keys and values are what earlier layers left, and the input makes queries alone.
    """
    return _mixes_its_input(call) or _mixes_what_was_left(call)


def _mixes_what_was_left(call: Call) -> bool:
    moved = left_with_first_token_moved(call)
    if moved is None:
        return False
    with torch.no_grad():
        outputs = [floats(call.replay_exactly(*arguments))[0] for arguments in ((call.args, call.kwargs), moved)]
    before, after = (made[:, 1:] for made in outputs)
    return bool((before - after).abs().max() > 1e-9 * before.abs().max())


def _mixes_its_input(call: Call) -> bool:
    hidden = call.hidden
    changed = hidden.clone()
    tokens = changed[None] if hidden.ndim == 2 else changed  # of a flattened batch, one token of one row
    tokens[:, 0] += 1.0
    with torch.no_grad():
        before, after = call.replay(hidden), call.replay(changed)
    by_token = hidden.ndim == 3 and before.shape[:-1] == hidden.shape[:-1]
    if before.numel() != hidden.numel() and not isinstance(call, SeveralCall) and not by_token:
        return False
    shape = tokens.shape if before.numel() == hidden.numel() else (*tokens.shape[:2], -1)
    before, after = before.reshape(shape)[:, 1:], after.reshape(shape)[:, 1:]
    # Not bitwise: an expert's matrix product rounds differently when it has other rows beside these.
    return bool((before - after).abs().max() > 1e-9 * before.abs().max())
