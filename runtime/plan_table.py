"""The tables of a plan as a person reads them, at most 80 columns wide."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from dayzero.runtime.planned_model import GIB

WIDTH = 80
SHOWN = 8
LINES = {
    "parameters_dense": "dense parameters, this rank's shard",
    "parameters_experts": "expert parameters, this rank's shard",
    "parameters_adapters": "adapters, this rank's shard",
    "gradients": "gradients of what is trained",
    "buffers": "values that no optimizer moves",
    "optimizer": "the optimizer's moments",
    "gathered": "units gathered at a time",
    "reduced": "gradients of a unit on their way",
    "activations": "activations of the two passes",
    "shared_rows": "rows, keys and values of other ranks",
    "expert_copies": "tokens on their way to experts",
    "logits": "logits of a chunk of the loss",
    "headroom": "headroom: context, fragmentation",
}
HOST = {
    "host_moments": "the optimizer's moments",
    "host_copy": "copy of the state while it is saved",
}
KINDS = {
    "all_gather": "all-gather of parameters",
    "reduce_scatter": "reduce-scatter of gradients",
    "all_reduce": "all-reduce over replicas",
    "all_to_all": "all-to-all of token copies",
    "shared_rows": "rows, keys and values over tp and cp",
}


def size(bytes: int) -> str:
    """In GiB, or MiB where that would be 0.0."""
    return f"{bytes / GIB:.2f} GiB" if bytes >= GIB / 10 else f"{1024 * bytes / GIB:.2f} MiB"


def show(console: Console, head: Sequence[str], tables: Sequence[Table], tail: Sequence[str]) -> None:
    """Prints lines, tables and lines."""
    width = min(WIDTH, console.width)
    for line in head:
        console.print(line, width=width, highlight=False)
    for table in tables:
        console.print()
        console.print(table, width=width)
    for line in tail:
        console.print(line, width=width, highlight=False)


def memory(lines: Mapping[str, int], total: int, hbm: int | None) -> Table:
    """hbm: what a device has, None if that is not known."""
    if hbm is None:
        verdict = "total; the device's memory is not known"
    else:
        verdict = f"total, {'fits' if total <= hbm else 'does NOT fit'} {hbm / GIB:.1f} GiB"
    table = Table(
        title="Memory of a rank", title_justify="left", box=None, pad_edge=False, show_header=False, show_footer=True
    )
    table.add_column("", verdict, overflow="fold")
    table.add_column("", size(total), justify="right", no_wrap=True)
    for name, needed in lines.items():
        table.add_row(LINES.get(name, name), size(needed))
    return table


def host(lines: Mapping[str, int]) -> Table:
    """lines: bytes in host memory."""
    return _plain("Host memory of a rank", [(HOST.get(name, name), size(needed)) for name, needed in lines.items()])


def communication(received: Mapping[str, int]) -> Table:
    """received: bytes by kind of collective."""
    rows = [(KINDS.get(name, name), size(moved)) for name, moved in received.items()]
    return _plain("Received by a rank in a step", rows)


def _plain(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column("", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def alternatives(rows: Sequence[tuple[str, int, str]]) -> Table:
    """rows: (mesh, bytes of a rank, why it was not taken)."""
    table = Table(title="Not taken", title_justify="left", box=None, pad_edge=False)
    table.add_column("mesh", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for mesh, total, reason in rows[:SHOWN]:
        table.add_row(mesh, size(total), reason)
    return table
