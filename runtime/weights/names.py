"""Tensor names with placeholders for numbers: `{layer}`, or one that follows from it, `{layer-1}`, `{(layer-1)/2}`."""

import re
from collections.abc import Mapping
from functools import lru_cache

_PLACE = re.compile(r"\{(\()?([a-z]+)([+-]\d+)?(?(1)\))(?:/(\d+))?\}")


def filled(name: str, index: Mapping[str, int]) -> str:
    """The name with all placeholders filled in. index: placeholder -> number. Raises ValueError for a number that does
    not divide, KeyError for a placeholder that is not in `index`.

    >>> filled("queries.{(layer-1)/2}.weight", {"layer": 5})
    'queries.2.weight'
    """
    if not _computed(name):
        return name.format_map(index)

    def number(match: re.Match) -> str:
        whole, left = divmod(index[match[2]] + int(match[3] or 0), int(match[4] or 1))
        if left:
            raise ValueError(f"{name}: {match[2]} {index[match[2]]} does not divide")
        return str(whole)

    return _PLACE.sub(number, name)


@lru_cache(maxsize=4096)
def _computed(name: str) -> bool:
    return any(match[3] or match[4] for match in _PLACE.finditer(name))


def following(placeholder: str, offset: int, step: int = 1) -> str:
    """The placeholder of (number - offset) / step.

    >>> following("layer", 1), following("layer", 1, 2)
    ('{layer-1}', '{(layer-1)/2}')
    """
    moved = f"{placeholder}{-offset:+d}" if offset else placeholder
    return f"{{{moved}}}" if step == 1 else f"{{({moved})/{step}}}" if offset else f"{{{moved}/{step}}}"
