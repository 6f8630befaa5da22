"""What `onboard inspect` prints on a terminal of 80 columns."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.inspect.diff import Change, Diff, Renamed
from dayzero.onboard.inspect.ledger import Ledger, TensorGroup
from dayzero.onboard.inspect.tensor_names import counted, stepped
from dayzero.onboard.readable import plain, readable_bytes, readable_count, share
from dayzero.runtime.strict_json import shown

_SHOWN = 20  # config fields and names of a list
_NAME, _SHAPE, _DTYPE = 36, 13, 12  # columns of the tensor table


def print_ledger(console: Console, checkpoint: Checkpoint, ledger: Ledger) -> None:
    """Head line, layers, budget, patterns, findings, config."""
    dtypes = sorted({group.dtype for group in ledger.groups})
    _line(console, checkpoint.architecture, bold=True)
    routed = ledger.budget().get("routed experts", {"parameters": 0})["parameters"]
    in_experts = f", {share(routed, ledger.parameters)} of them in routed experts" if routed else ""
    _line(console, f"{readable_count(ledger.parameters)} parameters{in_experts}")
    _line(console, f"{ledger.tensors:,} tensors, {readable_bytes(ledger.bytes)} of {', '.join(dtypes)}")
    if ledger.experts.count:
        shared = f", {ledger.experts.shared} shared" if ledger.experts.shared else ""
        _line(console, f"experts: {ledger.experts.count}, {ledger.experts.top_k} a token{shared}")
    further = f"; {ledger.mtp} further-token layers" if ledger.mtp else ""
    _line(console, f"head: {'tied to the embedding' if ledger.tied else 'its own matrix'}{further}")
    for name, count in ledger.formats().items():
        _line(console, f"quantised: {name}, {readable_count(count)} weights")
    console.print()
    console.print(layer_table(ledger))
    console.print()
    console.print(budget_table(ledger))
    for prefix, groups in by_parent(ledger.groups):
        _print_groups(console, prefix, groups)
    _print_findings(console, ledger)
    _print_config(console, ledger)


def _line(console: Console, text: str, bold: bool = False) -> None:
    console.print(Text(plain(text) if not text.startswith("\n") else f"\n{plain(text[1:])}", "bold" if bold else ""))


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    return table


def layer_table(ledger: Ledger) -> Table:
    """One row a kind of layer."""
    table = _table(("layers", ""), ("mixer", ""), ("feed-forward", ""), ("residual", ""))
    together: dict[tuple[str, str, str], list[int]] = {}
    for run in ledger.layers:
        residual = "" if run.residual == "plain" else run.residual
        together.setdefault((run.mixer, run.ffn, residual), []).extend(counted(run.layers))
    for (mixer, ffn, residual), layers in together.items():
        table.add_row(stepped(sorted(layers)), mixer, ffn, residual)
    return table


def budget_table(ledger: Ledger) -> Table:
    """Parameters and bytes by what they are for."""
    table = _table(("for", ""), ("parameters", "right"), ("", "right"), ("bytes", "right"), ("", "right"))
    for name, line in ledger.budget().items():
        parameters, size = line["parameters"], line["bytes"]
        table.add_row(
            name,
            readable_count(parameters),
            share(parameters, ledger.parameters),
            readable_bytes(size),
            share(size, ledger.bytes),
        )
    return table


_LEAVES = ("weight", "bias", "scale")


def parent(pattern: str) -> str:
    """The module that holds a tensor's module: `layers.{layer}.self_attn.` of `...q_proj.weight` and of `...A_log`."""
    pieces = pattern.split(".")
    kept = len(pieces) - (2 if pieces[-1].startswith(_LEAVES) else 1)
    return "".join(f"{piece}." for piece in pieces[: max(kept, 0)])


def by_parent(groups: list[TensorGroup]) -> list[tuple[str, list[TensorGroup]]]:
    """Groups by module. Scales are left out: they stand with the weight that they belong to."""
    held: dict[str, list[TensorGroup]] = {}
    for group in groups:
        if group.part_of is None:
            held.setdefault(parent(group.pattern), []).append(group)
    return list(held.items())


def _print_groups(console: Console, prefix: str, groups: list[TensorGroup]) -> None:
    """A module's tensors, those of the same layers together."""
    _line(console, f"\n{prefix or '(top)'}", bold=True)
    together: dict[str, list[TensorGroup]] = {}
    for group in groups:
        where = [f"layers {stepped(counted(group.layers))}"] if group.layers else []
        where += [f"experts {group.experts}"] if group.experts else []
        where += [f"numbers {numbers}" for numbers in group.others]
        fate = [group.fate] if group.fate != "open" else []
        together.setdefault(", ".join([*where, *fate]), []).append(group)
    for where, those in together.items():
        if where:
            _line(console, f"  {where}")
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
        for width in (_NAME, _SHAPE, _DTYPE, None):
            table.add_column(width=width, overflow="fold")
        for group in those:
            shape = "x".join(map(str, group.logical_shape or group.shape)) or "scalar"
            role = f"{group.role}: {group.note}" if group.note else group.role
            name = f"  {plain(group.pattern.removeprefix(prefix))}"
            table.add_row(Text(name), shape, group.format or group.dtype, role)
        console.print(table)


def _print_findings(console: Console, ledger: Ledger) -> None:
    if ledger.findings:
        _line(console, "\nworth knowing", bold=True)
    colours = {"contradiction": "yellow", "damage": "red", "layout": "cyan", "note": "dim"}
    for finding in ledger.findings:
        console.print(Text.assemble((f"{finding.kind}: ", colours[finding.kind]), plain(finding.what)))
        for line in finding.evidence:
            console.print(Text(f"  {plain(line)}", "dim"))


def _print_config(console: Console, ledger: Ledger) -> None:
    by_what: dict[str, list[str]] = {}
    for field, what in ledger.maths_config.items():
        by_what.setdefault(what, []).append(plain(field.removeprefix("text_config.")))
    if by_what:
        _line(console, "\nin the config alone; no tensor shows them, a proof reads them", bold=True)
    for what, fields in by_what.items():
        _line(console, f"  {what}: {', '.join(fields)}")
    for name in ledger.unaccounted[:_SHOWN]:
        _line(console, f"role unknown: {name}")
    for field in ledger.unread_config[:_SHOWN]:
        _line(console, f"config field unknown by name: {plain(field)} (a run asks the reference)")
    for names in (ledger.unaccounted, ledger.unread_config):
        if len(names) > _SHOWN:
            _line(console, f"and {len(names) - _SHOWN} more")


def print_tensor(console: Console, found: dict[str, Any]) -> None:
    """What `--tensor` says."""
    console.print(Text(found["name"], "bold"))
    group = found["group"]
    rows = {
        "role": f"{found['role']}, of the {found['part']} part" + (f" ({found['note']})" if found["note"] else ""),
        "fate": f"{found['fate']}" + (f": {found['reason']}" if found["reason"] else ""),
        "stored": f"{found['dtype']} {found['shape']}, {found['bytes']} bytes",
        "where": f"{found['file']}, bytes {found['start']} to {found['end']}",
        "weight": f"{found['format']}, {found['logical_shape']}" if found["format"] else "",
        **{role: name for role, name in found["stored_as"].items() if name != found["name"]},
        "part of": found["part_of"] or "",
        "group": f"{group['pattern']}, {group['count']} tensors",
        "layers": stepped(counted(group["layers"])),
        "experts": group["experts"],
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            table.add_row(name, Text(plain(text)))
    console.print(table)


def print_diff(console: Console, diff: Diff) -> None:
    """What `--diff` says: `-` the first checkpoint, `+` the second."""
    if diff.same:
        _line(console, "the same tensors, config and files")
    for name, (before, after) in diff.totals.items():
        _line(console, f"{name}: {_amount(name, before)} -> {_amount(name, after)}")
    for renamed in diff.renamed:
        _print_renamed(console, renamed)
    for title, sign, changes in (("added", "+", diff.added), ("removed", "-", diff.removed), ("", "~", diff.changed)):
        for change in changes:
            _print_change(console, sign, title, change)
    if diff.moved:
        _line(console, f"in another file, otherwise the same: {diff.moved:,} tensors")
    for field, (before, after) in diff.config.items():
        _line(console, f"config {field}: {shown(before)} -> {shown(after)}")
    for file, what in diff.files.items():
        _line(console, f"{file}: {what}")


def _print_renamed(console: Console, renamed: Renamed) -> None:
    one, two = (plain(name) or "(no prefix)" for name in (renamed.before, renamed.after))
    what = f"{renamed.count:,} tensors of {len(renamed.patterns)} patterns"
    console.print(Text.assemble(("> ", "cyan"), f"renamed {one} -> {two}"))
    console.print(Text(f"    {what}, otherwise the same", "dim"))


def _print_change(console: Console, sign: str, title: str, change: Change) -> None:
    colour = {"+": "green", "-": "red", "~": "yellow"}[sign]
    where = f", layers {stepped(counted(change.layers))}" if change.layers else ""
    where += f", experts {change.experts}" if change.experts else ""
    what = f"{title} {change.after or change.before}" if title else f"{change.before} -> {change.after}"
    console.print(Text.assemble((f"{sign} ", colour), plain(change.pattern)))
    console.print(Text(f"    {change.count:,} tensors{where}: {what}", "dim"))


def _amount(name: str, value: Any) -> str:
    if name == "bytes":
        return readable_bytes(value)
    return readable_count(value) if name == "parameters" else plain(str(value))
