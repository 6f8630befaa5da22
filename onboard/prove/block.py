"""Proves that a block computes what its reference module computes, or says by how much it misses.

Both are run as functions of their hidden input, in float64: on the captured input, on fresh inputs of several sizes up
to saturation, on re-drawn weights. Outputs, input gradients and every parameter gradient must agree, and both must
execute the same operations with the same constants.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.onboard.candidates import Candidate, Site, propose
from dayzero.onboard.candidates.stops import Cut
from dayzero.onboard.oracle.calls import join
from dayzero.onboard.oracle.gradients import Gradients, as_trained, gradients
from dayzero.onboard.oracle.reference import redraw, state_of
from dayzero.onboard.prove.trace import trace
from dayzero.onboard.prove.trials import CAPTURED, NOTHING_FINITE, Compared, trials
from dayzero.onboard.structure.chains import ChainCall
from dayzero.onboard.structure.left import as_shared, left_behind
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.attend import shifted_scores
from dayzero.runtime.nn.attention import KEYS, VALUES
from dayzero.runtime.nn.latent_attention import LATENTS

TOLERANCE = 1e-9  # relative, float64
_ROUNDING = 1e-12  # what sums in another order leave; errors below are all written down as this
BOUND = 400  # candidates looked at for one module
_WEIGHT_GAINS = (1.0, 2.5)


@dataclass
class Attempt:
    """One candidate and how it fared. error: worst relative error so far; objection: why it was rejected, if it was.
    thorough: whether it held on the captured input, so that it was tried on others too. why: of the reference's own
    code, why no block stands there. operations: what both sides execute, where it is proven. bound: as of `Verdict`, of
    the search that it came out of. computes: of lifted classes, in lines, what they were seen to compute. apart:
    operations that only one side executes, which are then the objection. skipped: inputs on which nothing could be
    compared, of how many, in one line."""

    candidate: Candidate
    error: float
    where: str
    objection: str = ""
    thorough: bool = False
    why: str = ""
    operations: str = ""
    bound: str = ""
    computes: dict[str, list[str]] = field(default_factory=dict)
    apart: bool = False
    skipped: str = ""

    @property
    def proven(self) -> bool:
        return not self.objection


@dataclass
class Verdict:
    """All attempts on one module, in the order in which they were made; survivors best first. bound: where the search
    ended at one, what was left, in one line; "" where it tried everything."""

    attempts: list[Attempt] = field(default_factory=list)
    bound: str = ""

    @property
    def survivors(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.proven]


def relative_error(ours: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """||ours - reference|| / ||reference||; infinite for NaN or a wrong shape.

    floor: a size below which the reference counts as this large, for gradients that are zero in exact arithmetic.
    """
    if ours.shape != reference.shape:
        return float("inf")
    size = max(float(torch.linalg.vector_norm(reference.detach())), floor)
    miss = float(torch.linalg.vector_norm((ours - reference).detach()))
    if miss != miss or size != size:
        return float("inf")
    return miss / size if size else (0.0 if miss == 0 else float("inf"))


def block_function(
    site: Site, block: nn.Module, *, exact: bool = True, context: Context | None = None
) -> Callable[[Tensor], Tensor]:
    """The block as a function of the reference's hidden input: [B, S, H] in, [B, S, H] out. context: the site's, a
    fresh one each time, if there is none."""

    def call(hidden: Tensor) -> Tensor:
        seen = context or site.context
        like_the_reference = shifted_scores() if exact and "max" in site.operations.steps else contextlib.nullcontext()
        inputs = site.call.split(hidden)
        # The fused attention recomputes probabilities from a log-sum-exp, which loses digits once softmax saturates.
        with sdpa_kernel(SDPBackend.MATH) if exact else contextlib.nullcontext(), like_the_reference:
            out = block(*inputs, seen) if getattr(block, "uses_context", False) else block(*inputs)
        return (join(out, 1) if isinstance(out, tuple) else out).reshape(site.call.result.shape)

    return call


def prove(role: str, site: Site, generator: torch.Generator) -> Verdict:
    """Tries the candidates for `role` at this module, likeliest first, until one holds; the rest of those that the
    captured input alone cannot tell from it are tried too, so that what remains ambiguous is known."""
    site.cuts = []
    candidates = propose(role, site)
    distinct: dict[tuple, Candidate] = {}
    for candidate in candidates[:BOUND]:
        distinct.setdefault(candidate.key, candidate)
    if left := {candidate.key for candidate in candidates[BOUND:]} - distinct.keys():
        site.cuts.append(Cut(BOUND, len(left)))
    verdict = Verdict(bound="; ".join(cut.text for cut in site.cuts))
    verdict.attempts = [attempt(candidate, site, generator, thorough=False) for candidate in distinct.values()]
    rivals = [a for a in verdict.attempts if a.proven]
    for rival in rivals:
        final = attempt(rival.candidate, site, generator, thorough=True)
        rival.error, rival.where, rival.objection = max(rival.error, final.error), final.where, final.objection
        rival.thorough, rival.operations, rival.skipped = True, final.operations, final.skipped
    return verdict


def attempt(
    candidate: Candidate,
    site: Site,
    generator: torch.Generator,
    *,
    thorough: bool,
    gains: Sequence[float] = _WEIGHT_GAINS,
    leaves_all: bool = True,
) -> Attempt:
    """One candidate against the module. Not thorough: output on the captured input only, which costs little.

    gains: of the weights that are redrawn for fresh inputs; fewer of them for a claim that was proven on a model like
    this one. leaves_all: False for a block that need not leave for later layers what none of them takes.
    """
    try:
        block = candidate.build(site.module, site.config).to(torch.float64)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        return Attempt(candidate, float("inf"), "construction", f"cannot be built: {error}")
    if not thorough:
        with torch.no_grad():
            error = _load(block, candidate, site) or _forward_error(site, block)
        objection = "" if error <= TOLERANCE else f"output misses by {error:.1e} on the {CAPTURED}"
        return Attempt(candidate, error, CAPTURED, objection)
    saved = {name: tensor.clone() for name, tensor in state_of(site.module).items()}
    worst, where = 0.0, CAPTURED
    compared = Compared()
    try:
        for trial in trials(site, generator, gains):
            if trial.gain is not None:
                redraw(site.module, generator, trial.gain)
            if _load(block, candidate, site):
                return Attempt(candidate, float("inf"), trial.name, "its parameters are not those of the module")
            found = errors(site, candidate, block, trial.hidden, generator)
            if not found and trial.kind == CAPTURED:
                return Attempt(candidate, float("inf"), CAPTURED, NOTHING_FINITE)
            compared.add(trial, found)
            for what, error in found.items():
                if error > worst:
                    worst, where = error, f"{what}, {trial.name}"
            if not worst <= TOLERANCE:
                return Attempt(candidate, worst, where, f"{where} misses by {worst:.1e}")
    except (RuntimeError, ValueError, IndexError) as error:
        return Attempt(candidate, float("inf"), "a trial", f"does not run: {' '.join(str(error).split())[:120]}")
    finally:
        with torch.no_grad():
            for name, tensor in state_of(site.module).items():
                tensor.copy_(saved[name])
    if missing := compared.missing(block):
        return Attempt(candidate, worst, where, missing)
    _load(block, candidate, site)
    with torch.no_grad():  # a block may take another way where nothing is trained
        error = _forward_error(site, block)
    if not error <= TOLERANCE:
        return Attempt(candidate, error, "without gradients", f"output without gradients misses by {error:.1e}")
    if wrong := _left(site, block, leaves_all):
        return Attempt(candidate, worst, where, wrong)
    apart = "; ".join(_apart(candidate, site, block))
    operations = "" if apart else site.operations.ledger
    return Attempt(candidate, worst, where, apart, operations=operations, apart=bool(apart), skipped=compared.skipped)


def _apart(candidate: Candidate, site: Site, block: nn.Module) -> list[str]:
    """Operations and constants of the one that the other has not, one line each."""
    function = block_function(site, block, exact=False)
    ours = trace(lambda: function(site.call.hidden))
    # Copied code makes its own rotary tables again; our blocks are handed them.
    theirs = trace(lambda: site.call.replay(site.call.hidden)) if candidate.lifts else site.operations
    unexplained = [f"reference only: {line}" for line in _without_lengths(site, theirs.difference(ours))]
    return unexplained + [f"block only: {line}" for line in ours.difference(theirs)]


def operations_apart(candidate: Candidate, site: Site) -> list[str]:
    """As the proof lists them, for a candidate that may miss; [] for one that cannot be run."""
    try:
        block = candidate.build(site.module, site.config).to(torch.float64)
        return [] if _load(block, candidate, site) else _apart(candidate, site, block)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return []


def _left(site: Site, block: nn.Module, leaves_all: bool) -> str:
    """How the block leaves something else for later layers than the module; "" where it does not."""
    handed = any(isinstance(value, Mapping) for value in [*site.call.args, *site.call.kwargs.values()])
    if not handed or isinstance(site.call, ChainCall):  # what a layer leaves before its chain begins is another part's
        return ""
    theirs, context = left_behind(site.call), site.context
    before = dict(context.shared)
    with torch.no_grad():
        block_function(site, block, context=context)(site.call.hidden)
    left = {name: held for name, held in context.shared.items() if before.get(name) is not held}
    kinds = (KEYS, VALUES, LATENTS)
    ours = {name: kind for name in left for kind in kinds if name.startswith(kind)}
    names = {name.removeprefix(kind) for name, kind in ours.items()}
    if not names <= theirs.keys() or (leaves_all and names != theirs.keys()):
        return f"leaves {sorted(names) or 'nothing'} for later layers, the module {sorted(theirs) or 'nothing'}"
    for name, pair in theirs.items():
        for wanted, held in as_shared(name, pair).items():
            if wanted in ours and not relative_error(left[wanted], held) <= TOLERANCE:
                return f"leaves other {wanted!r} for later layers"
    return ""


def _without_lengths(site: Site, lines: list[str]) -> list[str]:
    """Without constants that count the tokens of a block: how many are computed at once is not what is computed."""
    if not any(line.startswith("constant") for line in lines):
        return lines
    lengths = {f"constant {length!r}" for length in site.block_lengths}
    return [line for line in lines if line not in lengths]


def _load(block: nn.Module, candidate: Candidate, site: Site) -> float:
    """Copies the module's parameters and saved buffers into the block. Infinity where they do not fit, else 0."""
    try:
        values = candidate.values(state_of(site.module))
    except (KeyError, ValueError):
        return float("inf")
    parameters = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    if values.keys() != parameters.keys():
        return float("inf")
    with torch.no_grad():
        for name, value in values.items():
            if parameters[name].shape != value.shape:
                return float("inf")
            parameters[name].copy_(value)
    return 0.0


def _forward_error(site: Site, block: nn.Module) -> float:
    try:
        return relative_error(block_function(site, block)(site.call.hidden), site.usual)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return float("inf")


def errors(
    site: Site, candidate: Candidate, block: nn.Module, hidden: Tensor, generator: torch.Generator
) -> dict[str, float]:
    """Relative errors of the output, the input gradient and every parameter gradient, for one input.

    Where softmax is saturated a gradient is what is left of a cancellation, and one rounding of the input moves the
    reference's own gradient by far more than the tolerance. Where something misses by more than rounding, the reference
    is run again on an input that differs by its last bit; a quantity that this moves by more than a tenth of the
    tolerance is not judged on this input. Nothing is where the reference's own output is not finite, as where it takes
    exponentials of what it reads: {}.
    """
    cotangent = torch.randn(site.call.result.shape, generator=generator, dtype=torch.float64)
    last_bit = 1.0 + torch.randint(-1, 2, hidden.shape, generator=generator).double() * 2.0**-52
    theirs = _outputs(site.call.replay, site.module, hidden, cotangent, gradients)
    if not bool(theirs.output.isfinite().all()):
        return {}
    ours = _outputs(block_function(site, block), block, hidden, cotangent, as_trained)
    sizes = [float(torch.linalg.vector_norm(grad)) for grad in theirs.gradients.values()]
    floors = 1e-6 * float(cotangent.norm()), 1e-6 * max(sizes, default=0.0)

    def misses(outputs: _Outputs) -> dict[str, float]:
        """How far the reference's outputs are from `outputs`, whose parameters are ours."""
        wanted = candidate.values(theirs.gradients, ours.gradients)
        return {
            "output": relative_error(outputs.output, theirs.output),
            "input gradient": relative_error(outputs.input, theirs.input, floors[0]),
        } | {
            f"gradient of {name}": relative_error(grad, wanted[name], floors[1])
            for name, grad in outputs.gradients.items()
        }

    found = misses(ours)
    if not max(found.values()) <= _ROUNDING:
        moved = _outputs(site.call.replay, site.module, hidden * last_bit, cotangent, gradients)
        moved.gradients = candidate.values(moved.gradients, ours.gradients)
        noise = misses(moved)
        found = {what: error for what, error in found.items() if what == "output" or not noise[what] > TOLERANCE / 10}
    used = {name for source in candidate.parameters.values() for name in source.names({})}
    for name in theirs.gradients.keys() - used:
        if bool(theirs.gradients[name].any()):
            found[f"gradient of the reference's {name}, which the block does not have"] = float("inf")
    return found


@dataclass
class _Outputs:
    output: Tensor
    input: Tensor
    gradients: dict[str, Tensor]


def _outputs(
    function: Callable[[Tensor], Tensor], module: nn.Module, hidden: Tensor, cotangent: Tensor, differentiate: Gradients
) -> _Outputs:
    """The function's output and its gradients; a parameter that it does not reach has gradient zero."""
    hidden = hidden.detach().clone().requires_grad_(True)
    # A selection bias, whether a buffer or a parameter that no optimizer sees, has no gradient on either side.
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    output, grads = differentiate(lambda: function(hidden), [hidden, *parameters.values()], cotangent)
    return _Outputs(output, grads[0], dict(zip(parameters, grads[1:], strict=True)))
