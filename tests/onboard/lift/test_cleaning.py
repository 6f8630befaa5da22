"""Copied source without what serves caches, dispatch and documentation."""

import ast

from dayzero.onboard.lift.cleaning import clean


class Names:
    """A file in which `decorate` and `log` are the library's and `fast` is bound to None."""

    def value(self, name):
        return None

    def constant(self, name):
        return name == "fast"

    def allowed(self, name):
        return name in {"int", "torch", "str"}

    def droppable(self, name):
        return name == "decorate"

    def is_logger(self, name):
        return name == "log"

    def installed(self, name):
        return False if name == "is_fast_available" else None

    def is_module(self, name):
        return name == "Layer"


def cleaned(text, **options):
    return ast.unparse(ast.parse(clean(text, Names(), options.pop("called", ()), **options)))


def test_a_branch_for_caches_goes_and_the_other_stays():
    text = """
def f(x, cache=None):
    if cache is not None:
        state = cache.get()
        if x is None:
            return state
    else:
        state = None
    return g(x, state, cache is not None)
"""
    assert cleaned(text) == "def f(x, cache=None):\n    state = None\n    return g(x, state, False)"


def test_what_follows_from_a_missing_cache_is_folded_too():
    text = """
def f(x, past_key_values=None, use_cache=False):
    state, other = (past_key_values.a, past_key_values.b) if past_key_values is not None else (None, None)
    state, other = None, None
    if state is not None and x.shape[1] == 1:
        x = step(x)
    elif use_cache:
        x = keep(x)
    elif x.shape[1] > 3:
        x = long(x)
    else:
        x = short(x)
    return x if other is None else other
"""
    assert "step" not in cleaned(text)
    assert "keep" not in cleaned(text)
    assert "if x.shape[1] > 3:\n        x = long(x)\n    else:\n        x = short(x)" in cleaned(text)
    assert cleaned(text).endswith("return x")


def test_a_branch_that_depends_on_anything_else_stays():
    for text in (
        "def f(x, cache=None):\n    if x is None or g(cache):\n        return 1\n    return 2",
        "def f(x, mask=None):\n    if mask is not None:\n        x = x + mask\n    return x",
        "def f(x, cache=None):\n    cache = make()\n    if cache is not None:\n        x = cache(x)\n    return x",
        "def f(x, cache=None):\n    for cache in x:\n        if cache is not None:\n            x = g(x)\n    return x",
        "def f(x, cache):\n    if cache is not None:\n        x = cache(x)\n    return x",
    ):
        assert cleaned(text) == ast.unparse(ast.parse(text))


def test_kernels_that_are_not_there_are_not_asked_for():
    text = "def f(x):\n    if is_fast_available() and fast is not None:\n        return fast(x)\n    return slow(x)"
    assert cleaned(text) == "def f(x):\n    return slow(x)"


def test_decorators_annotations_and_messages():
    text = """
@decorate("name")
@keep
def f(x: int, y: Unknown[int] = 1, **kwargs: Unpack["Any"]) -> Output:
    log.warning_once("slow")
    z: Unknown = x
    w: int = y
    return z + w
"""
    assert cleaned(text) == "@keep\ndef f(x: int, y=1, **kwargs):\n    z = x\n    w: int = y\n    return z + w"


def test_methods_that_nothing_calls_are_left_out_of_modules_only():
    text = """
class Layer(Module):
    flag = True
    width = 3

    def __init__(self, config):
        self.attention = Attention(config)
        self.size = self.width

    def forward(self, x):
        return self.part(x)

    def part(self, x):
        return x

    def generate(self, x):
        return self.flag

    def outside(self, x):
        return x
"""
    made = cleaned(text, called={"outside"})
    assert "part(self" in made
    assert "outside(self" in made
    assert "width = 3" in made
    assert "generate" not in made
    assert "flag" not in made
    assert "generate" in cleaned(text.replace("Layer", "Function"))


def test_modules_that_are_replaced_are_not_made():
    text = "class Layer(M):\n    def __init__(self, c):\n        self.a = A(c)\n        self.b = Layer(c)"
    made = cleaned(text, replaced={"a"}, name="Layer_around_a")
    assert "self.a = None" in made
    assert "class Layer_around_a(M)" in made
    assert "self.b = Layer_around_a(c)" in made
