"""What ends a command early: bad input, or a run that failed."""


class InputError(Exception):
    """Bad input or usage. The command line prints it without a traceback and exits with 2.

    Write `where`, then what was found, what was expected and what to do, each on its own line:

        raise InputError("config.json: num_experts_per_tok", found="9", expected="at most num_experts=8", hint="...")
    """

    def __init__(self, where: str, *, found: str = "", expected: str = "", hint: str = ""):
        self.where, self.found, self.expected, self.hint = where, found, expected, hint
        lines = [where]
        if found:
            lines.append(f"  found     {found}")
        if expected:
            lines.append(f"  expected  {expected}")
        if hint:
            lines.append(f"  {hint}")
        super().__init__("\n".join(lines))


def unwritable(error: OSError) -> InputError:
    """What to tell of a full disk, or of a folder that may not be written: where, and what the system said."""
    where = str(error.filename2 or error.filename or "what was being written")
    return InputError(where, found=error.strerror or str(error), expected="a place that may be written, with room left")


class RunFailed(Exception):
    """A run that ended early; the text is for the user, as it stands. code: 1, or 130 if it was interrupted."""

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code
