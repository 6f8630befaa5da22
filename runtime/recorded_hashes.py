"""The content hashes that a package records: what each parameter was made of when it was proven."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dayzero.runtime.content_hash import hex_of
from dayzero.runtime.errors import InputError
from dayzero.runtime.weights import Rule

FILE = "hashes.json"


def hashes_as_data(hashes: Mapping[str, str] | None, rules: Sequence[Rule]) -> dict[str, Any]:
    """What the package's file holds: the rules' parameters, by layer where they have one.

    hashes: parameter -> 16 hexadecimal digits; None where nobody read the values, which is written down as it is.
    """
    if hashes is None:
        return {"parameters": None, "why": "onboarded without reading the weights; loading does not check them"}
    made: dict[str, Any] = {}
    for rule in rules:
        for parameter, index in rule.each():
            if not index:
                made[parameter] = hashes[parameter]
            else:
                key = ",".join(str(number) for number in index.values())
                made.setdefault(rule.parameter, {})[key] = hashes[parameter]
    return {"parameters": made}


def read_hashes(folder: Path, rules: Sequence[Rule]) -> dict[str, str] | None:
    """The hashes that a package recorded, by parameter; None where it says that there are none.

    A folder without a lock is a package in the making: it has none. Raises InputError for a package of a version that
    recorded none, and for a file that is not what onboard wrote.
    """
    file = folder / FILE
    if not file.is_file():
        if not (folder / "onboard.lock").is_file():
            return None
        raise InputError(
            str(file),
            found="no such file",
            expected="the hashes of the weights that were proven",
            hint="The package is of an older version. Onboard again: onboard CHECKPOINT",
        )
    try:
        made = json.loads(file.read_text())["parameters"]
        if made is None:
            return None
        found = {}
        for rule in rules:
            for parameter, index in rule.each():
                held = made[rule.parameter]
                text = held[",".join(str(number) for number in index.values())] if index else held
                found[parameter] = hex_of(int(text, 16))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            str(file),
            found=f"no hash for every parameter ({error})",
            expected="what onboard wrote",
            hint="Onboard again: onboard CHECKPOINT",
        ) from None
    return found
