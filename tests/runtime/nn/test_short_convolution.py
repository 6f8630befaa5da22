import pytest
import torch
from recurrences import LENGTHS, check_packed, context, drawn

from dayzero.runtime.nn import GatedShortConvolution
from dayzero.runtime.nn.causal_convolution import causal_convolution


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 3, 80])
def test_a_convolution_is_its_sum_and_crosses_no_document(width, bias):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(LENGTHS), 4, generator=draw, dtype=torch.float64)
    weight = torch.randn(4, width, generator=draw, dtype=torch.float64)
    shift = torch.randn(4, generator=draw, dtype=torch.float64) if bias else None
    rows = []
    for document in x.split(LENGTHS):
        for t in range(len(document)):
            row = torch.zeros(4, dtype=torch.float64) if shift is None else shift.clone()
            for back in range(min(width, t + 1)):
                row += weight[:, width - 1 - back] * document[t - back]
            rows.append(row)
    assert torch.allclose(causal_convolution(x, weight, shift, LENGTHS), torch.stack(rows), rtol=1e-12, atol=1e-13)
    assert causal_convolution(x[:0], weight, shift, ()).shape == (0, 4)


def test_packed_documents_are_documents_alone():
    check_packed(drawn(GatedShortConvolution(10, 12, 3, bias=True, conv_bias=True, output_bias=True)), 10)


def test_the_block_is_its_equations():
    block = drawn(GatedShortConvolution(10, 12, 3))
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = block.B(x) * block.u(x)
    seen = torch.stack(
        [sum(block.conv.weight[:, 2 - i] * before[t - i] for i in range(min(3, t + 1))) for t in range(5)]
    )
    assert torch.allclose(block(x, context((5,))), block.output(block.C(x) * seen), rtol=1e-12, atol=1e-13)
