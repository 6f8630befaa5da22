"""A document is a row of a batch, or a batch of one row where the rows change one another."""

import pytest
import torch
from zoo import families

from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.documents import documents


@pytest.mark.parametrize(("changes", "rows"), [({}, 1), ({"is_moe": False}, 2)])
def test_rows_that_change_one_another_are_not_documents(changes, rows):
    """The mixture of this family reads its router's logits across the rows of a batch; its plain layers do not."""
    model, _ = reference.build({**families.config("doge"), **changes})
    reference.redraw(model, torch.Generator().manual_seed(0))
    ids = documents(model, 100, 24, torch.Generator().manual_seed(1))
    assert ids.shape == (rows, 24)
    assert ids.equal(torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(1))[:rows])
