"""The README's tour: its commands run, and they print what it says, apart from the numbers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ELLIPSIS = "..."


def console_blocks(text: str) -> list[list[tuple[str, list[str]]]]:
    """Every ```console block: its commands and the lines that follow each."""
    blocks = []
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        commands: list[tuple[str, list[str]]] = []
        for line in block.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            else:
                commands[-1][1].append(line)
        blocks.append(commands)
    return blocks


def shape(line: str) -> str:
    """The line with every number replaced and runs of spaces as one."""
    return re.sub(r"\s+", " ", re.sub(r"[0-9][0-9.,e+-]*", "#", line)).strip()


def agrees(printed: list[str], promised: list[str]) -> bool:
    """Whether `promised` is what was printed, `...` standing for any number of lines."""
    if not promised:
        return not printed
    if promised[0] == ELLIPSIS:
        return any(agrees(printed[skip:], promised[1:]) for skip in range(len(printed) + 1))
    return bool(printed) and printed[0] == promised[0] and agrees(printed[1:], promised[1:])


@pytest.mark.slow
def test_the_tour_prints_what_it_says(tmp_path):
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    (commands,) = console_blocks((ROOT / "README.md").read_text())
    assert len(commands) >= 6
    for command, promised in commands:
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed = [shape(line) for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        assert agrees(printed, [shape(line) or line for line in promised]), f"{command}\n" + "\n".join(printed)


def test_agreement_is_not_vacuous():
    assert agrees(["a", "b", "c"], ["a", "...", "c"])
    assert not agrees(["a", "b"], ["a"])
    assert not agrees(["a"], ["a", "b"])
    assert shape("step 3/8  loss 6.9") == "step #/# loss #"
