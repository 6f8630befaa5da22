"""The one exception for bad input: what a user did, said so that they can mend it."""


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
