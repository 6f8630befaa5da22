"""What each part of a layer could be: candidate blocks from the library, likeliest first.

A candidate is a block, where each of its arguments comes from, and where each of its parameters comes from. It is a
claim about the reference module, to be proven (`onboard.prove`); nothing here decides. Arguments are kept as evidence
that can be resolved again on another model: the shrunk one, one with changed config values, and the real one.
"""

from collections.abc import Callable
from functools import partial

from dayzero.onboard.candidates.adapted import propose_adapted
from dayzero.onboard.candidates.attention import propose_attention
from dayzero.onboard.candidates.compressed_attention import propose_compressed_attention
from dayzero.onboard.candidates.convolution import (
    propose_convolution_residual,
    propose_recurrent_block,
    propose_short_convolution,
)
from dayzero.onboard.candidates.cross_attention import propose_cross_attention
from dayzero.onboard.candidates.delta_rule import propose_delta_rule
from dayzero.onboard.candidates.distance_bias import propose_distance_bias
from dayzero.onboard.candidates.dynamic_mask import propose_dynamic_mask
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, site_of
from dayzero.onboard.candidates.feed_forward import propose_feed_forward
from dayzero.onboard.candidates.handed_keys import propose_attention_with_handed_keys
from dayzero.onboard.candidates.joins import propose_join
from dayzero.onboard.candidates.latent_attention import propose_latent_attention
from dayzero.onboard.candidates.layer_inputs import propose_gated_layer_input
from dayzero.onboard.candidates.linear_attention import propose_lightning_attention
from dayzero.onboard.candidates.matrix_memory import propose_mlstm
from dayzero.onboard.candidates.mixture_of_attention import propose_mixture_of_attention
from dayzero.onboard.candidates.moe import propose_moe
from dayzero.onboard.candidates.norm import propose_norm
from dayzero.onboard.candidates.projections import propose_projection
from dayzero.onboard.candidates.recurrence import propose_channel_mix, propose_time_mix
from dayzero.onboard.candidates.relative_attention import propose_relative_attention
from dayzero.onboard.candidates.routing import propose_routing
from dayzero.onboard.candidates.selective_scan import propose_mamba
from dayzero.onboard.candidates.sparse_attention import propose_sparse_attention
from dayzero.onboard.candidates.state_space import propose_mamba2
from dayzero.onboard.candidates.streams import propose_connection, propose_merge

# Role of a layer's part -> what may propose blocks for it. A new kind of block joins by adding its proposer here.
PROPOSERS: dict[str, tuple[Callable[[Site], list[Candidate]], ...]] = {
    "norm": (propose_norm,),
    "mixer": (
        propose_attention,
        propose_attention_with_handed_keys,
        propose_latent_attention,
        propose_compressed_attention,
        propose_relative_attention,
        propose_distance_bias,
        propose_dynamic_mask,
        propose_sparse_attention,
        propose_mixture_of_attention,
        propose_delta_rule,
        propose_mamba2,
        propose_mamba,
        propose_lightning_attention,
        propose_short_convolution,
        propose_convolution_residual,
        propose_recurrent_block,
        propose_time_mix,
        propose_channel_mix,
        propose_mlstm,
        propose_moe,  # whose router may look at other tokens
        partial(propose_adapted, proposers=(propose_attention,)),
    ),
    "ffn": (propose_feed_forward, propose_moe, partial(propose_adapted, proposers=(propose_feed_forward,))),
    "cross": (propose_cross_attention,),
    "routing": (propose_routing,),
    "connection": (propose_connection,),
    "merge": (propose_merge, propose_join),
    "join": (propose_join,),
    "projection": (propose_projection,),
    "mixer of several": (),
    "chain": (propose_gated_layer_input,),
}


def propose(role: str, site: Site) -> list[Candidate]:
    """All candidates for the module at `site`, likeliest first."""
    return [candidate for proposer in PROPOSERS[role] for candidate in proposer(site)]


__all__ = ["PROPOSERS", "Candidate", "Evidence", "Site", "propose", "site_of"]
