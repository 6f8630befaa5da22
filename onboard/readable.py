"""Numbers and foreign text as people read them."""


def readable_bytes(count: float) -> str:
    """`1.5 GB`, decimal."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def readable_count(count: float) -> str:
    """`2.78 T`, `373 M`."""
    for unit in ("", " k", " M", " B", " T"):
        if abs(count) < 1000 or unit == " T":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError


def share(part: float, whole: float) -> str:
    """`97.9 %`, `< 0.1 %`."""
    if not whole or part / whole < 0.0005:
        return "< 0.1 %" if part else "0 %"
    return f"{100 * part / whole:.1f} %"


def plain(text: str) -> str:
    """Foreign text for a terminal: what would move its cursor is spelt out."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
