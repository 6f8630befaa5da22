import pytest

from dayzero.runtime.errors import InputError
from dayzero.runtime.parallel import Layout


def test_experts_use_the_same_ranks():
    layout = Layout(dp_replicate=2, dp_shard=8, ep=4)
    assert (layout.world, layout.efsdp) == (16, 4)
    layout.check_experts([8, 64])


@pytest.mark.parametrize(
    ("sizes", "experts", "says"),
    [
        ((1, 8, 3), [6], r"ep\n.*3\n.*divisor of the 8 ranks\n.*\[1, 2, 4, 8\]"),
        ((1, 8, 4), [8, 6], r"ep\n.*4\n.*6 experts\n.*\[1, 2\]"),
        ((1, 4, 2), [], "no routed experts"),
        ((1, 4, 0), [8], "1 or more"),
        ((0, 4, 1), [8], "dp_replicate"),
    ],
)
def test_sizes_that_do_not_fit(sizes, experts, says):
    with pytest.raises(InputError, match=says):
        Layout(*sizes).check_experts(experts)
