"""Single semantic mutations of a passing package, and the ladder climbed with each.

    found = climbed(specified("mixtral"), MUTANTS[0])
    found.verdict, found.accused            # "FAIL", what the failing rungs name

A mutant changes one thing: an argument of a block, the wiring of a layer, a weight rule, or a line of a block's code.
Of the specification both the real model and the shrunk one are changed, as a wrong claim of the search would change
them. The comparison on the real weights takes no part: a checkpoint of a trillion parameters would not have it.
"""

import contextlib
import functools
import importlib
import inspect
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from zoo.conformance import write_checkpoint

from dayzero.onboard import agent, specify
from dayzero.onboard.agent import climb, real_shapes
from dayzero.onboard.checkpoint import Checkpoint, read_checkpoint
from dayzero.onboard.inspect.classify import classify, settle
from dayzero.onboard.rules.unmapped import fates
from dayzero.onboard.specify import Specification
from dayzero.runtime.errors import InputError
from dayzero.runtime.spec import BlockSpec, LayerKind, LayerRun, ModelSpec, PartSpec, SourceSpec

Change = Callable[[ModelSpec], ModelSpec]


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong. family: of the package. change: of its specification. code: (module of runtime, line, line
    in its place). accused: a pattern that what the ladder names must match. rung: by which it must be named, "" for
    any."""

    name: str
    family: str
    accused: str
    change: Change | None = None
    code: tuple[str, str, str] | None = None
    rung: str = ""


@dataclass(frozen=True)
class Climbed:
    """verdict: of the ladder, or REFUSED where rules and tensors do not settle. accused: what the rungs that fail
    name. by: that, by rung. warned: what the rungs that warn name."""

    verdict: str
    accused: str
    by: Mapping[str, str] = field(default_factory=dict)
    warned: str = ""


@functools.cache
def specified(family: str) -> tuple[Checkpoint, Specification]:
    """A small checkpoint of the family and its specification, made once a process; config fields are not varied."""
    held = tempfile.TemporaryDirectory()
    _FOLDERS.append(held)
    checkpoint = read_checkpoint(write_checkpoint(family, Path(held.name) / family))
    with mock.patch.object(specify, "intervene", return_value=[]):
        found = specify.specify(checkpoint.config, checkpoint.identity(), family, headers=checkpoint.headers)
    return checkpoint, found


_FOLDERS: list[Any] = []


def climbed(family: str, mutant: Mutant | None = None) -> Climbed:
    """The ladder as `onboard align` climbs it, over the package with the mutation."""
    checkpoint, found = specified(family)
    if mutant is not None and mutant.change is not None:
        changed = {"spec": mutant.change(found.spec), "shrunk": mutant.change(found.shrunk)}
        assert changed["spec"] != found.spec
        assert changed["shrunk"] != found.shrunk
        found = found.model_copy(update=changed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(agent, "real_weights_error", return_value=None))
        if mutant is not None and mutant.code is not None:
            stack.enter_context(other_code(*mutant.code))
        try:
            shapes, others = real_shapes(found.spec), fates(found.idle, found.tables)
            ledger = settle(classify(checkpoint), checkpoint, found.spec, shapes, found.towers, others)
        except InputError as error:
            return Climbed("REFUSED", str(error))
        except (ValueError, RuntimeError, KeyError) as error:
            return Climbed("REFUSED", f"model and rules do not belong together: {error}")
        alignment = climb(checkpoint, found, ledger, lambda line: None)
    failed = {name: rung.where for name, rung in alignment.rungs.items() if rung.verdict == "FAIL"}
    warned = "; ".join(rung.where for rung in alignment.rungs.values() if rung.verdict == "WARN")
    return Climbed(alignment.verdict, "; ".join(failed.values()), failed, warned)


@contextlib.contextmanager
def other_code(name: str, old: str, new: str) -> Iterator[None]:
    """The module `dayzero.runtime.<name>` with one piece of its source replaced, in every function that has it."""
    module = importlib.import_module(f"dayzero.runtime.{name}")
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{name} has {source.count(old)} of {old!r}"
    scratch = types.ModuleType(module.__name__)
    scratch.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), scratch.__dict__)
    changed = []
    for here, there in ((module, scratch), *_classes(module, scratch)):
        for key, function in vars(here).items():
            other = vars(there).get(key)
            if not isinstance(function, types.FunctionType) or not isinstance(other, types.FunctionType):
                continue
            if function.__module__ == module.__name__ and function.__code__ != other.__code__:
                changed.append((function, function.__code__))
                function.__code__ = other.__code__
    assert changed
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _classes(module: Any, scratch: Any) -> list[tuple[type, type]]:
    own = [key for key, held in vars(module).items() if isinstance(held, type) and held.__module__ == module.__name__]
    return [(vars(module)[key], vars(scratch)[key]) for key in own]


# --- changes --------------------------------------------------------------------------------------------------------


def argument(path: str, value: Any) -> Change:
    """The argument at `path`, such as "ffn.router.scale", in every kind of layer whose block has it; of the blocks
    outside the layers "norm.eps", of the n-th rotary "rotaries.0.theta", of what layers are handed of the pass before
    "loop.message.scale". value: or a function of the present one."""
    part, *names = path.split(".")

    def change(spec: ModelSpec) -> ModelSpec:
        if part in {"norm", "query_scale", "layer_inputs"}:
            return spec.model_copy(update={part: _with(getattr(spec, part), names, value)})
        if part == "rotaries":
            index, *inner = names
            rotaries = list(spec.rotaries)
            rotaries[int(index)] = _with(rotaries[int(index)], inner, value)
            return spec.model_copy(update={"rotaries": rotaries})
        if part == "loop":
            assert spec.loop is not None
            assert spec.loop.message is not None
            message = _with(spec.loop.message, names[1:], value)
            return spec.model_copy(update={"loop": spec.loop.model_copy(update={"message": message})})
        return spec.model_copy(
            update={"layer_kinds": [_with_part(kind, part, names, value) for kind in spec.layer_kinds]}
        )

    return change


def _with_part(kind: LayerKind, part: str, names: list[str], value: Any) -> LayerKind:
    """The kind with one argument of the block of a part changed, be it one that runs in later passes only."""

    def changed(parts: list[PartSpec]) -> list[PartSpec]:
        return [
            held.model_copy(update={"block": _with(held.block, names, value)}) if held.name == part else held
            for held in parts
        ]

    again = kind.again and kind.again.model_copy(update={"parts": changed(kind.again.parts)})
    return kind.model_copy(update={"parts": changed(kind.parts), "again": again})


def _with(block: BlockSpec, names: list[str], value: Any) -> BlockSpec:
    """The block with one argument changed; as it is where it has none at that place."""
    name, *inner = names
    if name not in block.arguments:
        return block
    held = block.arguments[name]
    if inner:
        made = _with(held, inner, value) if isinstance(held, BlockSpec) else held
    else:
        made = value(held) if callable(value) else value
    return block.model_copy(update={"arguments": {**block.arguments, name: made}})


def wired(part: str, reads: str | None = None, gives: str | None = None) -> Change:
    """What a part reads, or what a layer that has the part gives, written otherwise."""

    def change(spec: ModelSpec) -> ModelSpec:
        kinds: list[LayerKind] = []
        for kind in spec.layer_kinds:
            there = any(held.name == part for held in kind.parts)
            parts = [
                held.model_copy(update={"reads": reads}) if held.name == part and reads is not None else held
                for held in kind.parts
            ]
            kinds.append(kind.model_copy(update={"parts": parts, "gives": gives if there and gives else kind.gives}))
        return spec.model_copy(update={"layer_kinds": kinds})

    return change


def wired_again(value: str, reads: str) -> Change:
    """What the part reads that makes a value of a later pass, written otherwise, in every layer that has the value."""

    def change(spec: ModelSpec) -> ModelSpec:
        kinds = []
        for kind in spec.layer_kinds:
            again = kind.again
            if again is not None and any(step.part == "mixer_input_2" for step in again.steps if step.name == value):
                steps = [
                    step.model_copy(update={"reads": reads}) if step.name == value else step for step in again.steps
                ]
                again = again.model_copy(update={"steps": steps})
            kinds.append(kind.model_copy(update={"again": again}))
        return spec.model_copy(update={"layer_kinds": kinds})

    return change


def passes(count: int) -> Change:
    """How often layers run."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.loop is not None
        return spec.model_copy(update={"loop": spec.loop.model_copy(update={"passes": count})})

    return change


def whole(**fields: Any) -> Change:
    """Fields of the model itself."""
    return lambda spec: spec.model_copy(update=fields)


def exchanged_layers(spec: ModelSpec) -> ModelSpec:
    """The last kind of layer one layer early: layers n-1 and n have each other's kind."""
    order = [run.kind for run in spec.layers for _ in range(run.count)]
    place = next(i for i in range(len(order) - 1, 0, -1) if order[i] != order[i - 1])
    order[place - 1], order[place] = order[place], order[place - 1]
    return spec.model_copy(update={"layers": [LayerRun(first=i, count=1, kind=kind) for i, kind in enumerate(order)]})


def rule(ending: str, change: Callable[[SourceSpec], SourceSpec]) -> Change:
    """The expression of the parameters whose names end so."""

    def changed(spec: ModelSpec) -> ModelSpec:
        rules = [
            held.model_copy(update={"source": change(held.source)}) if held.parameter.endswith(ending) else held
            for held in spec.rules
        ]
        return spec.model_copy(update={"rules": rules})

    return changed


def exchanged_rules(one: str, two: str) -> Change:
    """Two parameters of every layer filled from each other's tensors."""

    def changed(spec: ModelSpec) -> ModelSpec:
        sources = {held.parameter: held.source for held in spec.rules}
        rules = []
        for held in spec.rules:
            name = held.parameter
            other = (
                name.replace(one, two) if name.endswith(one) else name.replace(two, one) if name.endswith(two) else ""
            )
            rules.append(held.model_copy(update={"source": sources[other]}) if other in sources else held)
        return spec.model_copy(update={"rules": rules})

    return changed


def reversed_parts(source: SourceSpec) -> SourceSpec:
    """Side by side in the other order: up before gate."""
    if source.op == "concat":
        return source.model_copy(update={"parts": list(reversed(source.parts))})
    return source.model_copy(update={"parts": [reversed_parts(part) for part in source.parts]})


def untransposed(source: SourceSpec) -> SourceSpec:
    return source.parts[0] if source.op == "transpose" else source


def in_order(source: SourceSpec) -> SourceSpec:
    """Rows as they lie, where they should be taken apart."""
    return source.parts[0] if source.op == "deinterleave" else source


def experts_exchanged(source: SourceSpec) -> SourceSpec:
    """Experts 0 and 1 in each other's place."""
    if source.op != "stack":
        return source.model_copy(update={"parts": [experts_exchanged(part) for part in source.parts]})
    singles = [_expert(source.parts[0], number) for number in range(source.count or 0)]
    singles[0], singles[1] = singles[1], singles[0]
    rows = [SourceSpec(op="unsqueeze", dims=(0,), parts=[single]) for single in singles]
    return SourceSpec(op="concat", dim=0, parts=rows)


def _expert(source: SourceSpec, number: int) -> SourceSpec:
    name = source.name.replace("{expert}", str(number)) if source.name else None
    return source.model_copy(update={"name": name, "parts": [_expert(part, number) for part in source.parts]})


# --- mutants --------------------------------------------------------------------------------------------------------

MUTANTS = [
    # norms
    Mutant("w for 1 + w", "recurrent_gemma", r"layers\.0\.mixer_norm, for", argument("mixer_norm.offset", 0.0)),
    Mutant("1 + w for w", "mixtral", r"layers\.0\.mixer_norm, for \S*input_layernorm",
           argument("mixer_norm.offset", 1.0)),
    Mutant("wrong eps", "mixtral", r"layers\.0\.ffn_norm, for \S*post_attention", argument("ffn_norm.eps", 1.1e-5)),
    Mutant("wrong eps of the last norm", "gpt_oss", r"\bnorm, for model\.norm", argument("norm.eps", 1e-6)),
    Mutant("eps of a latent's norm", "deepseek_v3", r"layers\.0\.mixer, for", argument("mixer.kv_norm_eps", 1e-5)),
    Mutant("eps of the query's latent", "deepseek_v3", r"\.mixer, for", argument("mixer.query_norm_eps", 1.5e-6)),
    Mutant("mean not taken away", "cohere2_moe", r"layers\.0\.norm, for", code=(
        "nn.layer_norm", "F.layer_norm(x.to(wide), (self.width,), weight, bias, self.eps)",
        "F.rms_norm(x.to(wide), (self.width,), weight, self.eps)")),
    # attention
    Mutant("rotary form", "mixtral", r"layers\.0\.mixer, for", argument("mixer.rotary", "interleaved")),
    Mutant("rotary form of a latent", "deepseek_v3", r"\.mixer, for", argument("mixer.rotary", "half")),
    Mutant("rotary where there is none", "cohere2_moe", r"layers\.3\.mixer|mixer, for \S*3\.self_attn",
           argument("mixer.rotary", lambda held: held or "interleaved")),
    Mutant("rope base", "gpt_oss", r"rotaries\.0, for model\.rotary_emb", argument("rotaries.0.theta", 10000.0)),
    Mutant("yarn's factor", "gpt_oss", r"rotaries\.0, for", argument("rotaries.0.factor", 16.0)),
    Mutant("yarn's attention factor", "gpt_oss", r"rotaries\.0, for", argument("rotaries.0.attention_factor", 1.0)),
    Mutant("yarn's bounds rounded", "gpt_oss", r"rotaries\.0, for", argument("rotaries.0.truncate", True)),
    Mutant("rope base of the other table", "deepseek_v4", r"layers\.1\.mixer\.block, for",
           argument("rotaries.1.theta", 10000.0)),
    Mutant("the other table", "deepseek_v4", r"layers\.0\.mixer\.block, for",
           argument("mixer.block.table", lambda table: 1 - table)),
    Mutant("window by one", "mixtral", r"layers\.0\.mixer, for", argument("mixer.window", lambda window: window + 1)),
    Mutant("no window", "gpt_oss", r"layers\.0\.mixer, for", argument("mixer.window", None)),
    Mutant("chunks by one", "llama4", r"\.mixer, for", argument("mixer.chunk", lambda chunk: chunk + 1)),
    Mutant("softmax scale", "granitemoe", r"\.mixer, for", argument("mixer.scale", 0.25)),
    Mutant("no norm of queries and keys", "lfm2_moe", r"mixer", argument("mixer.qk_norm", "none")),
    Mutant("norm over all heads at once", "minimax_m2", r"mixer", argument("mixer.qk_norm", "head")),
    Mutant("no growth of queries", "llama4", r"\.mixer, for", argument("mixer.query_scale_factor", 0.0)),
    Mutant("output gate doubled", "afmoe", r"\.mixer, for", code=(
        "nn.attention", "GATES[self.gate_act](gate.to(compute))", "(2 * GATES[self.gate_act](gate.to(compute)))")),
    Mutant("value factor dropped", "mimo_v2_flash", r"\.mixer, for", argument("mixer.value_factor", 1.0)),
    Mutant("sinks ignored", "gpt_oss", r"\.mixer, for",
           code=("nn.attention", "            self.sinks,\n            bias,",
           "            None,\n            bias,")),
    Mutant("key and value exchanged", "mixtral", r"layers\.0\.mixer, for",
           exchanged_rules("mixer.key.weight", "mixer.value.weight")),
    Mutant("key rows in turn", "mixtral", r"layers\.0\.mixer, for", rule(
        "mixer.key.weight", lambda source: SourceSpec(op="deinterleave", dim=0, ways=2, parts=[source]))),
    Mutant("fewer keys selected", "glm_moe_dsa", r"\.mixer, for", argument("mixer.indexer.top_k", lambda k: k - 1)),
    Mutant("indexer's rotary at the end", "glm_moe_dsa", r"\.mixer, for", argument("mixer.indexer.rotary_at", "last")),
    # routers
    Mutant("softmax before the selection", "gpt_oss", r"\.ffn, for", argument("ffn.router.scored", "all")),
    Mutant("softmax after the selection", "qwen2_moe", r"\.ffn, for", argument("ffn.router.scored", "selected")),
    Mutant("not renormalised", "mixtral", r"layers\.0\.ffn, for", argument("ffn.router.normalise", None)),
    Mutant("eps of the weights' sum", "lfm2_moe", r"\.ffn, for", argument("ffn.router.normalise.eps", 1e-9)),
    Mutant("vanishing eps of the weights' sum", "deepseek_v3", r"constant 1e-20",
           argument("ffn.router.normalise.eps", 0.0)),
    Mutant("scaling dropped", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.scale", 1.0)),
    Mutant("one group more", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.limit.kept", 3)),
    Mutant("groups by their best", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.limit.by", "max")),
    Mutant("no groups", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.limit", None)),
    Mutant("groups filled with zero", "deepseek_v3", r"layers\.1\.ffn, for",
           argument("ffn.router.limit.zero_fill", True)),
    Mutant("softmax for sigmoid", "minimax_m2", r"\.ffn, for", argument("ffn.router.score", "softmax")),
    Mutant("one expert fewer", "mixtral", r"layers\.0\.ffn, for", argument("ffn.router.top_k", lambda k: k - 1)),
    Mutant("bias used in the weight", "minimax_m2", r"\.ffn, for", code=(
        "nn.router", "weights = scored_by(self.score, logits)",
        "weights = scored_by(self.score, logits) + self.selection_bias[index]")),
    Mutant("bias used in the weight where nothing is trained", "minimax_m2", r"\.ffn, for \S+: output without", code=(
        "nn.router", "weights = scores.gather(-1, index)",
        "weights = (scores if self.selection_bias is None else scores + self.selection_bias).gather(-1, index)")),
    Mutant("correction bias taken as zero", "deepseek_v3", r"layers\.1\.ffn, for", code=(
        "nn.router", "scores = scores + self.selection_bias", "scores = scores + 0 * self.selection_bias")),
    Mutant("correction bias in bfloat16", "deepseek_v3", r"layers\.1\.ffn, for", code=(
        "nn.router", "scores = scores + self.selection_bias", "scores = scores + self.selection_bias.bfloat16()")),
    Mutant("correction bias from another tensor", "minimax_m2", r"selection_bias|ffn", rule(
        "router.selection_bias", lambda source: source.model_copy(update={"name": "model.norm.weight"}))),
    # experts
    Mutant("gate and up exchanged", "mixtral", r"layers\.0\.ffn, for", rule("experts.gate_up", reversed_parts)),
    Mutant("gate and up not taken apart", "gpt_oss", r"\.ffn, for", rule("experts.gate_up", in_order)),
    Mutant("experts transposed", "gpt_oss", r"experts\.down|ffn", rule("experts.down", untransposed)),
    Mutant("experts exchanged", "mixtral", r"layers\.0\.ffn, for|experts\.down",
           rule("experts.down", experts_exchanged)),
    Mutant("clamp after the activation", "deepseek_v4", r"layers\.0\.ffn\.block, for \S+mlp",
           argument("ffn.block.experts.act.after", True)),
    Mutant("limit of the clamp", "gpt_oss", r"\.ffn, for", argument("ffn.experts.act.limit", 6.0)),
    Mutant("slope of the gate", "gpt_oss", r"\.ffn, for", argument("ffn.experts.act.alpha", 1.7)),
    Mutant("gelu for silu", "mixtral", r"layers\.0\.ffn, for", argument("ffn.experts.act", "gelu")),
    Mutant("tanh form of gelu", "recurrent_gemma", r"\.ffn, for", argument("ffn.act", "gelu")),
    Mutant("weights on the output", "llama4", r"\.ffn, for", argument("ffn.weigh", "output")),
    Mutant("shared experts averaged, or not", "cohere2_moe", r"\.ffn, for", argument("ffn.average", False)),
    Mutant("gate of the shared expert open", "qwen2_moe", r"\.ffn, for", code=(
        "nn.moe", "torch.sigmoid(", "torch.ones_like(")),
    # recurrent mixers
    Mutant("decay grows", "kimi_linear", r"layers\.0\.mixer, for", code=(
        "nn.gated_delta_net", "return -rate * F.softplus(u)", "return rate * F.softplus(u) * 1e-3")),
    Mutant("A_log taken as A", "mamba2", r"layers\.0\.mixer, for", code=(
        "nn.mamba2", "decay = -self.A_log.to(wide).exp() * dt", "decay = -self.A_log.to(wide).abs() * dt")),
    Mutant("convolution turned round", "mamba2", r"layers\.0\.mixer, for", code=(
        "nn.causal_convolution", "weight[:, None], bias", "weight.flip(1)[:, None], bias")),
    Mutant("taps of the convolution turned round", "lfm2_moe", r"\.mixer, for", code=(
        "nn.causal_convolution", "weight[:, None], bias", "weight.flip(1)[:, None], bias")),
    Mutant("gate after the norm", "mamba2", r"layers\.0\.mixer, for", argument("mixer.norm", "norm_first")),
    Mutant("no groups in the norm", "mamba2", r"layers\.0\.mixer, for", argument("mixer.norm_groups", 1)),
    Mutant("time step clamped", "mamba2", r"layers\.0\.mixer, for", argument("mixer.time_step_min", 0.05)),
    Mutant("eps of unit length", "kimi_linear", r"layers\.0\.mixer, for", argument("mixer.l2_eps", 1e-5)),
    Mutant("beta doubled", "kimi_linear", r"layers\.0\.mixer, for", argument("mixer.beta_scale", 2.0)),
    Mutant("silu for the sigmoid gate", "kimi_linear", r"layers\.0\.mixer, for", argument("mixer.gate_act", "silu")),
    Mutant("rate of the recurrence", "recurrent_gemma", r"\.mixer, for", argument("mixer.rate", -4.0)),
    Mutant("query and key of the recurrence", "kimi_linear", r"layers\.0\.mixer, for",
           exchanged_rules("mixer.query.weight", "mixer.key.weight")),
    # the model
    Mutant("residual multiplier dropped", "granitemoe", r"what layers\.0\.ffn_norm reads",
           wired("ffn_norm", reads="x + mixer")),
    Mutant("residual multiplier of the sum", "granitemoe", r"what layers\.0 gives",
           wired("ffn", gives="x + 0.5 * mixer + ffn")),
    Mutant("parallel for serial", "mixtral", r"what layers\.0\.ffn_norm reads", wired("ffn_norm", reads="x")),
    Mutant("serial for parallel", "cohere2_moe", r"what layers\.0\.ffn reads", wired("ffn", reads="norm + mixer")),
    Mutant("residual dropped", "mixtral", r"what layers\.0 gives", wired("ffn", gives="mixer + ffn")),
    Mutant("embedding scale dropped", "granitemoe", r"what layers\.0 reads, the embeddings", whole(embed_scale=1.0)),
    Mutant("embedding scale in float32", "recurrent_gemma", r"what layers\.0 reads, the embeddings",
           whole(embed_scale=8.4852814)),
    Mutant("logit scale dropped", "cohere2_moe", r"the logits", whole(logit_scale=1.0)),
    Mutant("softcap dropped", "recurrent_gemma", r"the logits", whole(logit_softcap=None)),
    # what the model hands to its layers, and they to one another
    Mutant("growth of queries handed to layers", "beam", r"query_scale, for what model\.layers\.1\.self_attn",
           argument("query_scale.factor", 0.2), rung="L1"),
    Mutant("scale of the inputs of layers", "gemma4", r"layer_inputs, for model: output",
           argument("layer_inputs.scale", 0.5), rung="L1"),
    Mutant("eps of the inputs of layers", "gemma4", r"layer_inputs, for model",
           argument("layer_inputs.norm.eps", 1e-5), rung="L1"),
    Mutant("keys left under another name", "gemma4", r"layers\.2\.mixer, for \S*: 'keys\.full_attention' is not left",
           argument("mixer.leaves", "sliding_attention"), rung="L1"),
    Mutant("keys of another kind of layer", "gemma4", r"layers\.3\.mixer, for",
           argument("mixer.takes", "sliding_attention"), rung="L1"),
    Mutant("latents not left", "mistral_large4", r"layers\.1\.mixer, for \S*: 'latents\.rope' is not left",
           argument("mixer.leaves", None), rung="L1"),
    Mutant("scale of the messages", "inkling2_loop", r"loop\.message, for model\.message_input",
           argument("loop.message.scale", lambda scale: 1.01 * scale), rung="L1"),
    Mutant("eps of a message's gate", "inkling2_loop", r"layers\.2\.mixer_input_2, for \S*q_message_gate",
           argument("mixer_input_2.eps", 1e-4), rung="L1"),
    Mutant("one pass more", "inkling2_loop", r"loop, which runs layers 2-3 3 times", passes(3), rung="L1"),
    Mutant("message of another part", "inkling2_loop", r"what layers\.3\.mixer_input_2 in pass 2 reads",
           wired_again("mixer_input_2", "residual.1, message.2"), rung="L1"),
    Mutant("streams' iterations", "deepseek_v4", r"layers\.0\.mixer\.connection, for",
           argument("mixer.connection.iterations", 19)),
    Mutant("layers one off", "lfm2_moe", r"layers\.\d", exchanged_layers),
    Mutant("windows one layer off", "cohere2_moe", r"layers\.\d", exchanged_layers),
    Mutant("head and embedding exchanged", "mixtral", r"embeddings|embed\.weight|head",
           exchanged_rules("embed.weight", "head.weight")),
]  # fmt: skip
