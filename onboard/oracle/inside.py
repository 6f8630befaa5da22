"""What runs inside the sandbox: a request on the command line, one JSON object a line on standard output.

    python -m dayzero.onboard.oracle.inside '{"job": "run", "checkpoint": ..., "folder": ..., ...}'

The code of the checkpoint is imported here and nowhere else. Whoever reads the lines takes them for data.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from dayzero.onboard.oracle.remote_code import remote_code, using
from dayzero.runtime.errors import InputError


def main(request: dict[str, Any]) -> None:
    """Does the job and says what came of it: progress, then "done", "unproven" or "refused"."""
    from dayzero.onboard.checkpoint import read_checkpoint
    from dayzero.onboard.prove.proven import NotProven

    torch.set_num_threads(1)
    # What the checkpoint's code prints is not ours: it would stand between the lines.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        stream.write(json.dumps(values, default=str) + "\n")
        stream.flush()

    checkpoint = Path(request["checkpoint"])
    try:
        config = read_checkpoint(checkpoint).config
        with using(remote_code(checkpoint, config)):
            say(done=_JOBS[request["job"]](request, say))
    except NotProven as error:
        say(unproven=[vars(item) for item in error.unproven])
    except InputError as error:
        say(refused={name: getattr(error, name) for name in ("where", "found", "expected", "hint")})


def _run(request: dict[str, Any], say: Any) -> dict[str, Any]:
    from dayzero.onboard.agent import Outcome, Run, execute

    run = Run(
        Path(request["checkpoint"]),
        Path(request["folder"]),
        request["name"],
        request["devices"],
        request["hbm"],
        request["align"],
    )
    outcome = None
    for event in execute(run):
        if isinstance(event, Outcome):
            outcome = event
        else:
            say(progress=event.model_dump())
    assert outcome is not None
    return outcome.model_dump(mode="json")


def _align(request: dict[str, Any], say: Any) -> dict[str, Any]:
    from dayzero.onboard.package import align_package

    package = Path(request["folder"]) / request["name"]
    alignment, tried = align_package(package, Path(request["checkpoint"]), lambda line: say(line=line))
    return {
        "alignment": alignment.model_dump(mode="json"),
        "tried": [item.model_dump(mode="json") for item in tried],
    }


def _specify(request: dict[str, Any], say: Any) -> dict[str, Any]:
    from dayzero.onboard.checkpoint import read_checkpoint
    from dayzero.onboard.specify_checkpoint import specify_checkpoint

    checkpoint = read_checkpoint(Path(request["checkpoint"]))
    specification, _ = specify_checkpoint(checkpoint, request["name"], {}, lambda line: say(line=line))
    return specification.spec.model_dump(mode="json")


_JOBS = {"run": _run, "align": _align, "specify": _specify}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
