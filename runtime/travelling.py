"""Bytes of the tokens that travel between the ranks of an exchange, by dispatcher (`nn.expert_parallel`).

T: tokens of a rank; K: choices of each; n: ranks of ep; c: bytes of an element. Of a mixture of attention heads each
choice is a row by itself, and travels twice.
"""

from dayzero.runtime.nn import Routed, fused_dispatch
from dayzero.runtime.nn.expert_parallel import Dispatcher

UNEVEN = 1.5  # what a busy expert-parallel rank receives, as a multiple of its share
_ASSIST = 128 * 4  # bytes that the fused operators note of each row that a rank has room for


def travelling_bytes(moe: Routed, compute: int, tokens: int, ep: int, dispatcher: Dispatcher = "alltoall") -> int:
    """What a rank holds of a layer while its tokens travel; 0 without an exchange: c H for each row that it sends, and
    twice that for each that it gets, which it makes a sum of. The weights and places in a row are left out.

    alltoall: it gets UNEVEN times as many as it sends. allgather: it sends T, and gets those of all n ranks. fused: it
    sends T, in calls of 512, and gets UNEVEN T K copies; and it has the room of one call, which is c times a row's
    width for the copies of all tokens of all ranks.
    """
    if ep == 1:
        return 0
    rows = tokens * moe.rows_of_a_token(ep, dispatcher)
    sent, received = {
        "alltoall": (rows, UNEVEN * rows),
        "allgather": (rows / ep, rows),
        "fused": (_calls(tokens) * fused_dispatch.TOKENS, UNEVEN * rows),
    }[dispatcher]
    held = compute * moe.experts.hidden * (sent + 2 * received)
    if dispatcher == "fused":
        width = fused_dispatch.width_of(moe.experts.hidden, moe.router.top_k)
        held += compute * width * fused_dispatch.room(ep, *_sizes(moe))
    return int(held)


def route_bytes(moe: Routed, tokens: int, ep: int, dispatcher: Dispatcher = "alltoall") -> int:
    """What is kept from a layer's forward to its backward pass to find the way again: of the fused operators, 512 bytes
    for each row that each of their calls had room for."""
    if ep == 1 or dispatcher != "fused":
        return 0
    return _calls(tokens) * fused_dispatch.room(ep, *_sizes(moe)) * _ASSIST


def _sizes(moe: Routed) -> tuple[int, int]:
    return moe.experts.experts, moe.router.top_k


def _calls(tokens: int) -> int:
    return -(-tokens // fused_dispatch.TOKENS)
