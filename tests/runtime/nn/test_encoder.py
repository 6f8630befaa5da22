"""A decoder with an encoder: documents apart, sources of other lengths, prompts that show nothing to be predicted."""

import torch

from dayzero.runtime import nn
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.nn.encoder import prompts

H = 12


def model(own_embedding=False):
    def attention(first, causal):
        inner = nn.GroupedQueryAttention(H, 3, 3, 4, 1.0, rotary=None, causal=causal)
        return nn.DistanceBiasedAttention(inner, 8 if first else None, 20, not causal)

    def decoder(first):
        parts = {"mixer": attention(first, True), "cross": nn.CrossAttention(H, H, 3, 4, 1.0)}
        return nn.DecoderLayer(parts, {"mixer": "x", "cross": "x + mixer"}, "x + mixer + cross")

    def encoder(first):
        return nn.DecoderLayer({"mixer": attention(first, False)}, {"mixer": "x"}, "x + mixer")

    beside = nn.Encoder(
        [encoder(True), encoder(False)],
        nn.RMSNorm(H, 1e-6),
        vocabulary=40 if own_embedding else None,
        hidden=H,
        embed_scale=2.0,
        positions=nn.SinusoidalPositions(H, first=1, padding=0),
    )
    made = nn.CausalLM(
        40, H, [decoder(True), decoder(False)], nn.RMSNorm(H, 1e-6), tied=True, encoder=beside,
        positions=nn.SinusoidalPositions(H),
    )  # fmt: skip
    initialise(made.double(), 0.3, 0)
    return made


def ids(count, seed=0):
    return torch.randint(0, 40, (count,), generator=torch.Generator().manual_seed(seed))


def test_packed_documents_are_the_documents():
    made, tokens, source = model(), ids(20), ids(15, 1)
    bounds, sources = torch.tensor([0, 6, 7, 20]), torch.tensor([0, 3, 10, 15])
    packed = made(tokens, bounds, source=(source, sources))
    for i in range(3):
        own, theirs = tokens[bounds[i] : bounds[i + 1]], source[sources[i] : sources[i + 1]]
        alone = made(own, torch.tensor([0, len(own)]), source=(theirs, torch.tensor([0, len(theirs)])))
        torch.testing.assert_close(packed[bounds[i] : bounds[i + 1]], alone, rtol=1e-11, atol=1e-11)


def test_without_a_source_the_encoder_reads_the_documents():
    made, tokens, bounds = model(), ids(9), torch.tensor([0, 4, 9])
    assert torch.equal(made(tokens, bounds), made(tokens, bounds, source=(tokens, bounds)))
    other = made(tokens, bounds, source=(tokens.flip(0), bounds))
    assert (made(tokens, bounds) - other).abs().max() > 1e-3


def test_an_embedding_of_its_own_is_read_instead():
    made, tokens, bounds = model(own_embedding=True), ids(6), torch.tensor([0, 6])
    before = made(tokens, bounds)
    with torch.no_grad():
        made.encoder.embed.weight.mul_(-1.0)
    assert (made(tokens, bounds) - before).abs().max() > 1e-3
    assert model().encoder.embed is None


def test_prompts_end_where_the_first_token_is_to_be_predicted():
    tokens, bounds = torch.arange(10), torch.tensor([0, 4, 7, 10])
    labels = torch.tensor([-100, -100, 3, -100, 5, 6, -100, -100, -100, -100])
    source, sources = prompts(tokens, bounds, labels)
    assert source.tolist() == [0, 1, 2, 4, 7, 8, 9]
    assert sources.tolist() == [0, 3, 4, 7]


def test_no_logit_that_is_trained_depends_on_a_later_token():
    made, tokens, bounds = model(), ids(12), torch.tensor([0, 12])
    labels = torch.cat((torch.full((4,), -100), tokens[5:], torch.tensor([-100])))
    loss = made(tokens, bounds, labels, source=prompts(tokens, bounds, labels))
    changed = tokens.clone()
    changed[11] = (changed[11] + 1) % 40
    again = made(changed, bounds, source=prompts(changed, bounds, labels))
    first = made(tokens, bounds, source=prompts(tokens, bounds, labels))
    assert torch.equal(first[:11], again[:11])
    whole = torch.nn.functional.cross_entropy(first, labels, reduction="sum")
    assert abs(float((loss - whole).detach())) <= 1e-10
