"""For a checkpoint without a reference: names, shapes and config decide by rules, and nothing is verified.

A rule covers the commonest decoder: grouped-query attention, gated feed-forward layers and routed experts before
which an RMS norm stands. What no rule covers ends onboarding with what was found; nothing is guessed in silence. What
a rule takes for granted, since neither a name nor a field says it, is a line of evidence that begins with `ASSUMED`.
"""

ASSUMED = "assumed: "
NOTICE = (
    "UNVERIFIED: nothing of this model was compared with a reference, for none was found. Rules read the tensors' "
    "names, shapes and the config. Before you train it, give the checkpoint its modeling code and onboard it with "
    "--trust-remote-code, install a transformers that has the architecture, or compare logits by hand."
)
