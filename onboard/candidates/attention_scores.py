"""What stands between the products of queries and keys and the softmax: a factor, a cap, a mask, sinks."""

import torch
from torch import Tensor

from dayzero.onboard.candidates.equality import CLOSE, close, shifted_ratio
from dayzero.onboard.candidates.evidence import Evidence, Site, literal
from dayzero.onboard.candidates.softmax import SoftmaxSeen
from dayzero.onboard.candidates.where_held import any_number, as_float, held, rank
from dayzero.runtime.weights import Source, Stored

_MASKED = -1e30


class ScoresSolver:
    """site: the attention. seen: its softmax."""

    def __init__(self, site: Site, seen: SoftmaxSeen):
        self.site, self.seen = site, seen
        self.heads = seen.query.shape[1]

    def _seen_keys(self) -> Tensor:
        """[B, N, S, U] bool."""
        return self.seen.scores[..., : self.seen.key.shape[2]] > _MASKED

    def _given_scores(self) -> Tensor:
        """[B, N, S, U]: what the softmax was given for the keys."""
        return self.seen.scores[..., : self.seen.key.shape[2]]

    def _scores(self) -> tuple[float, float | None, Evidence | None] | None:
        """(factor between products and scores, softcap, where it is held); None for scores that are more than that.

        A row may be shifted as a whole, which a softmax does not see: scores are compared with the diagonal's.
        """
        products, scores = self.seen.products, self._given_scores()
        keep = self._seen_keys()
        if not bool(torch.diagonal(keep, dim1=-2, dim2=-1).all()):
            return None
        ratio = shifted_ratio(products, scores, keep)
        if ratio is not None:
            return ratio, None, None
        if "tanh" not in self.site.operations.steps:
            return None
        constants = sorted(self.site.operations.constants)
        for cap in (value for value in constants if value > 1):
            for ratio in (1.0, *(value for value in constants if 0 < value < 1)):
                found = shifted_ratio(cap * torch.tanh(products * ratio / cap), scores, keep)
                if found is not None and abs(found - 1.0) <= CLOSE:
                    return ratio, cap, as_float(any_number(self.site, cap, ("cap",)))
        return None

    def _visibility(self) -> list[dict[str, Evidence]] | None:
        """What the mask shows; None where it is no function of the distance alone."""
        seen = self._seen_keys()
        mask = seen[0, 0]
        if mask.shape[0] != mask.shape[1] or not bool((seen == mask).all()):
            return None
        at = torch.arange(mask.shape[0])
        age = at[:, None] - at
        if bool(mask.all()) and mask.shape[0] > 1:
            return [{"causal": literal(False, "the mask hides nothing")}]
        if torch.equal(mask, age >= 0):
            return [{}]
        widest = int(mask.sum(-1).max())
        if not widest:
            return None
        for kind, shown in (("window", age < widest), ("chunk", at[:, None] // widest == at // widest)):
            if torch.equal(mask, (age >= 0) & shown):
                return [{kind: evidence} for evidence in self._extents(widest, kind)[:1]]
        return None

    def _extents(self, widest: int, kind: str) -> list[Evidence]:
        """Attributes and fields of this value; fields of one less, which do not count the token itself."""
        found = held(self.site, widest, int, handed=True)
        found.sort(key=lambda evidence: rank(evidence, (kind,)))
        less = [e for e in held(self.site, widest - 1, int, handed=True) if kind in e.label]
        found += [
            Evidence(
                f"{e.label} + 1",
                lambda module, config, e=e: None if (held := e.resolve(module, config)) is None else held + 1,
            )
            for e in less
        ]
        return found or [literal(widest, "the mask's band")]

    def _sinks(self) -> tuple[dict[str, Evidence], dict[str, Source]] | None:
        """The parameter that is the softmax's last column; nothing without one, None for another kind of column."""
        columns = self.seen.scores.shape[-1] - self.seen.key.shape[2]
        if not columns:
            return {}, {}
        for name, parameter in self.site.module.named_parameters(recurse=False):
            if parameter.shape != (self.heads,):
                continue
            # The row's shift is known from its diagonal, once the scores' factor is.
            scores, factor = self.seen.scores, self._scores()
            if factor is None:
                continue
            products = self.seen.products * factor[0]
            if factor[1] is not None:
                products = factor[1] * torch.tanh(products / factor[1])
            shift = torch.diagonal(scores[..., :-1], dim1=-2, dim2=-1) - torch.diagonal(products, dim1=-2, dim2=-1)
            if close(scores[..., -1] - shift, parameter.detach()[None, :, None].expand_as(shift)):
                return {"sinks": literal(True, "the softmax's last column")}, {"sinks": Stored(name)}
        return None
