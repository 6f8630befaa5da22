import math

import torch
from exactness import relative_error, worst


def test_what_is_not_a_number_is_the_worst():
    assert worst({"a": 1e-9, "b": math.nan, "c": math.inf}) == "b"
    assert worst({"a": 1e-9, "b": 2.0, "c": 1.0}) == "b"


def test_errors_are_relative_where_there_is_something_to_relate_to():
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want + torch.tensor([0.0, 1.0]), want) == 0.2
    assert relative_error(torch.tensor([0.0, 0.5]), torch.zeros(2)) == 0.5
    assert math.isnan(relative_error(torch.tensor([math.nan, 4.0]), want))
