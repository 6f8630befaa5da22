"""REPORT.md and report.html: what a person reads before they trust a package."""

from collections import Counter
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import jinja2
from pydantic import Field

import dayzero.templates
from dayzero.onboard.align import Alignment
from dayzero.onboard.align.ladder import TITLES
from dayzero.onboard.by_rules import NOTICE
from dayzero.onboard.claims import Claim
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.prove.interventions import Intervention
from dayzero.onboard.readable import readable_bytes, readable_count
from dayzero.onboard.report import layers as report_layers
from dayzero.onboard.report.layers import shown
from dayzero.runtime.plan import Plan
from dayzero.runtime.plan_table import HOST, LINES
from dayzero.runtime.spec import BlockSpec, ModelSpec, Record

_EFFECTS = {
    "none": "same logits",
    "follows": "our model follows, by the same evidence",
    "other block": "another block is selected, and proven",
    "unexplained": "**not explained**: only the present value is proven",
    "refused": "the reference refuses the value",
}
_COLOURS = ("blue", "teal", "amber", "violet", "green", "red", "soft")


class Findings(Record):
    """What onboarding learnt beside the specification. claims: what the config states and no code reads.
    ignored_config: field -> reason, from decisions.yaml. replaced: what of the reference's code was replaced. custom:
    hand-written operators that may stand for lifted classes -> sha256 of the one that was aligned, "" for none."""

    interventions: list[Intervention] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)
    ignored_config: dict[str, str] = Field(default_factory=dict)
    replaced: list[str] = Field(default_factory=list)
    custom: dict[str, str] = Field(default_factory=dict, exclude_if=lambda custom: not custom)


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    """Checkpoint text inside a Markdown table: no pipes, no line breaks, no markup."""
    return escape(" ".join(str(value).split()), quote=False).replace("|", "\\|").replace("`", "'")


@cache
def _environment(html: bool) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(dayzero.templates.__path__[0]) / "report")
    environment = jinja2.Environment(
        loader=loader, autoescape=html, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": readable_bytes,
        "big": readable_count,
        "error": _error,
        "text": _text,
        "short": _short,
    }
    return environment


def render_markdown(spec: ModelSpec, ledger: Ledger, plan: Plan, findings: Findings, alignment: Alignment) -> str:
    """REPORT.md."""
    template = _environment(html=False).get_template("REPORT.md.j2")
    return template.render(_content(spec, ledger, plan, findings, alignment)).rstrip() + "\n"


def render_html(spec: ModelSpec, ledger: Ledger, plan: Plan, findings: Findings, alignment: Alignment) -> str:
    """report.html, one file without references to others."""
    content = _content(spec, ledger, plan, findings, alignment)
    content["effects"] = {name: text.replace("**", "") for name, text in _EFFECTS.items()}
    return _environment(html=True).get_template("report.html.j2").render(content).rstrip() + "\n"


def _content(spec: ModelSpec, ledger: Ledger, plan: Plan, findings: Findings, alignment: Alignment) -> dict[str, Any]:
    from dayzero.onboard.generate import VERSION, call

    blocks = [
        {
            "module": report_layers.module_of(block),
            "block": report_layers.title(block),
            "where": where,
            "call": call(block),
            "status": block.proof.status if block.proof else "unverified",
            "error": block.proof.error if block.proof and block.proof.error is not None else float("inf"),
            "evidence": [*(block.proof.evidence if block.proof else []), *_of_block(alignment, block)],
        }
        for block, where in report_layers.uses(spec)
    ]
    budget = _budget(ledger)
    total = sum(part["parameters"] for part in budget)
    routed = sum(part["parameters"] for part in budget if part["role"] == "expert")
    return {
        "spec": spec,
        "notice": NOTICE,
        "assumed": report_layers.assumed(spec),
        "version": VERSION,
        "ledger": ledger,
        "plan": plan,
        "plan_line": _plan_line(plan),
        "findings": findings,
        "alignment": alignment.bounded(),
        "titles": TITLES,
        "narrow": [entry for entry in alignment.float32 if entry.narrow],
        "custom": [name for name, there in findings.custom.items() if there],
        "effects": _EFFECTS,
        "claims": [(claim, _accepted(claim, findings.ignored_config)) for claim in findings.claims],
        "parameters": total,
        "experts": ledger.experts,
        "expert_share": f"{100 * routed / total:.1f} %" if total else "0 %",
        "kinds": report_layers.kinds(spec),
        "around": report_layers.around(spec),
        "lifted": report_layers.lifted(spec),
        "memory_rows": [(LINES.get(name, name), size) for name, size in plan.per_rank_bytes.items()]
        + [(f"{HOST.get(name, name)}, in host memory", size) for name, size in plan.host_bytes.items()],
        "blocks": blocks,
        "budget": budget,
        **_strip(spec),
    }


def _of_block(alignment: Alignment, block: BlockSpec) -> list[str]:
    """What the module and the block compute in float32 in a bfloat16 run, in one line; none where nothing is."""
    for entry in alignment.float32:
        if (entry.module.rstrip("."), entry.block) == (report_layers.module_of(block), block.block):
            casts = f" ({entry.casts} cast{'s' * (entry.casts > 1)} to it)" if entry.casts else ""
            ours = f"; the block runs {', '.join(entry.narrow)} in bfloat16" if entry.narrow else "; so does the block"
            return [f"in bfloat16 the reference runs {', '.join(entry.steps)} in float32{casts}{ours}"]
    return []


def _accepted(claim: Claim, reasons: dict[str, str]) -> str:
    """The reason for which a person lets a claim stand that is not true, "" where it is none."""
    if claim.verdict in ("confirmed", "beside the point"):
        return ""
    return str(reasons.get(claim.field) or reasons.get(claim.field.split(".")[0]) or "")


def _plan_line(plan: Plan) -> str:
    mesh, memory = plan.mesh, "" if plan.hbm_bytes is None else f" with {plan.hbm_bytes / 2**30:.0f} GiB each"
    fits = "fits" if plan.fits else "does NOT fit"
    adapters = f"LoRA rank {plan.lora_rank}" if plan.mode == "lora" else "all parameters"
    shared = f" (tp {mesh.tp}, cp {mesh.cp})" if mesh.tp * mesh.cp > 1 else ""
    tokens = f"{plan.tokens_per_device} tokens {f'for {mesh.tp * mesh.cp} devices' if shared else 'a device'}"
    return (
        f"For {plan.devices} devices{memory}: {adapters}, {plan.precision}, {tokens}; "
        f"dense {mesh.dp_replicate} x {mesh.dp_shard}{shared}, experts {mesh.efsdp} x {mesh.ep}; "
        f"recompute {'on' if plan.recompute else 'off'}; needs {readable_bytes(plan.total_bytes)} a device and {fits}."
    )


def _budget(ledger: Ledger) -> list[dict[str, Any]]:
    """Parameters by role, largest first; small roles together."""
    counts: Counter[str] = Counter()
    for group in ledger.groups:
        role = "attention" if group.role in {"query", "key", "value", "attention output"} else group.role
        role = "norms" if "norm" in role else role
        counts[role] += group.elements
    total = sum(counts.values()) or 1
    parts, x = [], 0.0
    for number, (role, count) in enumerate(counts.most_common()):
        width = 960 * count / total
        share = f"{100 * count / total:.1f} %" if count / total >= 0.0005 else "< 0.1 %"
        colour = _COLOURS[min(number, len(_COLOURS) - 1)]
        parts.append(
            {"role": role, "parameters": count, "share": share, "colour": colour, "x": f"{x:.1f}", "w": f"{width:.1f}"}
        )
        x += width
    return parts


def _strip(spec: ModelSpec) -> dict[str, Any]:
    """One cell a layer: mixer above, feed-forward below."""
    kinds = spec.kinds_in_order()
    names: list[str] = []
    for role in ("mixer", "ffn"):
        names += [name for name in dict.fromkeys(shown(kind, role) for kind in kinds) if name not in names]
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    step = 960 / len(kinds)
    cells = [
        {
            "x": f"{index * step:.2f}",
            "w": f"{max(step - min(2.0, step / 4), 0.5):.2f}",
            "mixer_colour": colours[shown(kind, "mixer")],
            "ffn_colour": colours[shown(kind, "ffn")],
            "title": f"layer {index}: {shown(kind, 'mixer')}, {shown(kind, 'ffn')}",
        }
        for index, kind in enumerate(kinds)
    ]
    return {"strip": cells, "legend": list(colours.items())}
