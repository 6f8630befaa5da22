import harness
import pytest
import ranks


def test_results_come_back_in_rank_order():
    assert harness.run(ranks.rank_and_sum, 3, 10) == [(0, 60), (1, 60), (2, 60)]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "rank 1: .*ValueError: rank went wrong"),
        ("die", "rank 1: the process died"),
        ("hang", r"no answer from ranks \[0, 1, 2\]"),
    ],
)
def test_a_rank_that_misbehaves_is_named(how, says):
    with pytest.raises(harness.RankError, match=f"(?s){says}"):
        harness.run(ranks.misbehave, 3, 1, how, timeout=3)
