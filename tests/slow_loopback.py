"""One layer's forward and backward pass on two processes whose loopback is slow, with and without overlap.

    unshare -n python tests/slow_loopback.py

The loopback is slowed until the exchange takes about as long as the computation. Prints one line of JSON: seconds that
the step takes which waits for each exchange at once, of these the seconds spent waiting, and the seconds of the step
that does not. A network of its own and `tc` are needed, which take rights that a container may not have: exit code 77.
"""

import json
import os
import subprocess
import sys
import time

import harness
import torch
import torch.distributed as dist

from dayzero.runtime.nn import Experts, GatedFeedForward, MixtureOfExperts, Router
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.nn.exchange import Flight
from dayzero.runtime.nn.expert_parallel import Exchange

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K, PARTS = 1024, 384, 1536, 8, 2, 4
LATENCY, BURST, PACKET = "500ms", "32kb", "8000"  # how long packets may queue; what passes at once, in such packets


def layer(exchange: Exchange) -> MixtureOfExperts:
    experts = Experts(EXPERTS // 2, HIDDEN, WIDTH, "silu")
    moe = MixtureOfExperts(Router(HIDDEN, EXPERTS, TOP_K), experts, GatedFeedForward(HIDDEN, WIDTH, "silu"))
    initialise(moe, 0.02, seed=0)
    experts.experts = EXPERTS  # of which this rank has half
    moe.exchange = exchange
    return moe


def step(parts: int) -> tuple[float, float]:
    """Seconds, and those spent waiting, of a pass that both ranks begin together."""
    assert dist.group.WORLD is not None
    exchange = Exchange(dist.group.WORLD, parts=parts)
    moe = layer(exchange)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    dist.barrier()
    started = time.perf_counter()
    moe(x).sum().backward()
    dist.barrier()
    return time.perf_counter() - started, exchange.waiting.take()


def at_once(self: Flight, x, back: bool = False):
    """Flight.start, and the wait that would come later."""
    out = overlapping(self, x, back)
    self.waiting.until(self.work, out.device)
    self.work = None
    return out


overlapping = Flight.start


def measure(repeats: int) -> tuple[float, float, float]:
    """The fastest of each kind, in turns, so that other load on the machine hits both."""
    serial, waited, overlapped = [], [], []
    for _ in range(repeats):
        Flight.start = at_once
        seconds, waiting = step(1)
        serial.append(seconds)
        waited.append(waiting)
        Flight.start = overlapping
        overlapped.append(step(PARTS)[0])
    return min(serial), waited[serial.index(min(serial))], min(overlapped)


def slow(bits_per_second: float) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL, check=False)
    rate = ["tbf", "rate", str(int(bits_per_second)), "burst", BURST, "latency", LATENCY]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *rate], check=True)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rate = 2e8
    try:
        subprocess.run(["ip", "link", "set", "lo", "up", "mtu", PACKET], check=True)
        slow(rate)
    except (OSError, subprocess.CalledProcessError) as error:
        print(error)
        sys.exit(77)
    for repeats in (1, 1, 4):
        serial, waited, overlapped = (max(of_rank) for of_rank in zip(*harness.run(measure, 2, repeats), strict=True))
        rate *= waited / (serial - waited)
        if repeats == 1:
            slow(rate)
    print(json.dumps({"serial": serial, "waited": waited, "overlapped": overlapped}))
