"""Claims about routers and experts: scores, selection, groups, weights, what is shared."""

from typing import Any

from dayzero.onboard.claims.shown import Layer, Shown, Verdict, all_are, argument, by_layer, wrong_length
from dayzero.runtime.block_spec import BlockSpec

_SIGMOID = {"JointRouter"}
_SOFTMAX = {"CarriedRouter", "ProductKeyRouter", "SparseMixerRouter", "TopOneRouter"}
_BIASED = {"CarriedRouter", "JointRouter"}


def _choosing(shown: Shown) -> list[BlockSpec]:
    """Routers that select by scores; a table of token ids has no selection to be described."""
    return [router for router in shown.blocks(lambda layer: layer.routers) if router.block != "HashRouter"]


def _score(router: BlockSpec) -> str:
    return (
        "sigmoid" if router.block in _SIGMOID else "softmax" if router.block in _SOFTMAX else argument(router, "score")
    )


def _biased(router: BlockSpec) -> bool:
    return router.block in _BIASED or bool(argument(router, "selection_bias"))


def _limit(router: BlockSpec) -> BlockSpec | None:
    """The limit to some groups; one group alone limits nothing."""
    limit = argument(router, "limit")
    return limit if limit is not None and argument(limit, "groups") != argument(limit, "kept") else None


def _sums_to_one(router: BlockSpec) -> bool:
    """Whether the weights of the chosen are divided by their sum: by a softmax over them, for one."""
    after = _score(router) == "softmax" and argument(router, "scored") == "selected"
    return after or router.block == "JointRouter" or argument(router, "normalise") is not None


def score(value: Any, shown: Shown) -> Verdict | None:
    """The function that makes scores of logits."""
    if value not in ("softmax", "sigmoid", "sqrtsoftplus"):
        return None
    return all_are(value, map(_score, shown.blocks(lambda layer: layer.routers)), "router scores", shown.hides_ffns)


def method(value: Any, shown: Shown) -> Verdict | None:
    """How the top k are chosen: with a bias for the selection only, by the scores alone, or within the best groups."""
    if value not in ("noaux_tc", "greedy", "group_limited_greedy"):
        return None
    found = []
    for router in _choosing(shown):
        limit = _limit(router)
        if _biased(router):
            found.append(
                "noaux_tc" if limit is None or argument(limit, "by") == "top2" else "a bias, groups by their best"
            )
        elif limit is None:
            one_group = shown.stated("n_group", "num_expert_group") in (None, 1)
            found.append("group_limited_greedy" if value == "group_limited_greedy" and one_group else "greedy")
        else:
            found.append(
                "group_limited_greedy" if argument(limit, "by") == "max" else "groups by their two best, no bias"
            )
    verdict = all_are(value, found, "selection", shown.hides_ffns)
    words = {"noaux_tc": "by scores and a bias (noaux_tc)", "greedy": "by scores alone, of all experts (greedy)"}
    return verdict and verdict._replace(proven=", ".join(words.get(part, part) for part in verdict.proven.split(", ")))


def grouped(value: Any, shown: Shown) -> Verdict | None:
    """Whether experts are chosen within groups; a single group is no limit, and states nothing."""
    if type(value) is not bool:
        return None
    found = [_limit(router) is not None for router in _choosing(shown)]
    if value and found and not any(found) and shown.stated("n_group", "num_expert_group") == 1:
        return Verdict(True, "one group of all experts, which limits nothing")
    return all_are(value, found, "a limit to groups", shown.hides_ffns)


def groups(value: Any, shown: Shown) -> Verdict | None:
    """The number of groups."""
    found = [argument(limit, "groups") if (limit := _limit(router)) else 1 for router in _choosing(shown)]
    return all_are(1 if value is None else value, found, "groups of experts", shown.hides_ffns)


def kept_groups(value: Any, shown: Shown) -> Verdict | None:
    """The number of groups that experts are chosen from. Where all groups are kept, their number says nothing."""
    limits = [_limit(router) for router in _choosing(shown)]
    if limits and not any(limits) and value in (None, shown.stated("n_group", "num_expert_group") or 1):
        return Verdict(True, "all groups are kept")
    return all_are(value, [limit and argument(limit, "kept") for limit in limits], "groups kept", shown.hides_ffns)


def bias(value: Any, shown: Shown) -> Verdict | None:
    """A bias that only the selection sees."""
    if type(value) is not bool:
        return None
    return all_are(value, map(_biased, _choosing(shown)), "selection bias", shown.hides_ffns)


def renormalised(value: Any, shown: Shown) -> Verdict | None:
    """Whether the weights of the chosen experts are divided by their sum."""
    if type(value) is not bool:
        return None
    routers = shown.blocks(lambda layer: layer.routers)
    return all_are(value, map(_sums_to_one, routers), "weights divided by their sum", shown.hides_ffns)


def scale(value: Any, shown: Shown) -> Verdict | None:
    """The factor on the weights of experts."""
    found = [argument(router, "scale") or 1.0 for router in shown.blocks(lambda layer: layer.routers)]
    return all_are(1.0 if value is None else value, found, "factor on weights", shown.hides_ffns)


def top_k(value: Any, shown: Shown) -> Verdict | None:
    """Experts a token."""
    if type(value) is not int:
        return None
    routers = shown.blocks(lambda layer: layer.routers)
    found = [1 if router.block == "TopOneRouter" else argument(router, "top_k") or 2 for router in routers]
    return all_are(value, found, "experts a token", shown.hides_ffns)


def dtype(value: Any, shown: Shown) -> Verdict | None:
    """The precision of routers: float32 at least is how ours compute."""
    if not isinstance(value, str):
        return None
    routers = shown.blocks(lambda layer: layer.routers)
    if not routers:
        return all_are(value, [], "routers", shown.hides_ffns)
    right = value in ("float32", "fp32", "torch.float32")
    return Verdict(right, "routers compute in float32 at least") if not shown.hides_ffns else None


def experts(value: Any, shown: Shown) -> Verdict | None:
    """The number of routed experts."""
    found = [argument(argument(mixture, "experts"), "experts") for mixture in _mixtures(shown)]
    return all_are(value, found, "experts", shown.hides_ffns, by="tensors")


def width(value: Any, shown: Shown) -> Verdict | None:
    """The width of a routed expert."""
    found = [argument(argument(mixture, "experts"), "width") for mixture in _mixtures(shown)]
    return all_are(value, found, "width of an expert", shown.hides_ffns, by="tensors")


def shared_number(value: Any, shown: Shown) -> Verdict | None:
    """How many shared experts; they are one feed-forward layer, as wide as all of them."""
    mixtures = _mixtures(shown)
    shared = [argument(mixture, "shared") for mixture in mixtures]
    if not value or not any(shared) or not all(shared):
        return all_are(bool(value), map(bool, shared), "shared experts", shown.hides_ffns)
    stated = shown.stated("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    found = []
    for mixture, block in zip(mixtures, shared, strict=True):
        each = stated or argument(argument(mixture, "experts"), "width")
        whole = argument(block, "width")
        found.append(value if whole in (each * value, stated) else whole / each)
    return all_are(value, found, "shared experts by their width", shown.hides_ffns, by="tensors")


def shared_width(value: Any, shown: Shown) -> Verdict | None:
    """The width of the shared feed-forward layer, 0 for none; or of one of as many as are stated."""
    shared = [argument(mixture, "shared") for mixture in _mixtures(shown)]
    if not value or not any(shared) or not all(shared):
        return all_are(bool(value), map(bool, shared), "shared experts", shown.hides_ffns)
    number = shown.stated("n_shared_experts", "num_shared_experts") or 1
    widths = [argument(block, "width") for block in shared]
    found = [value if width == value * number else width for width in widths]
    return all_are(value, found, "width of the shared expert", shown.hides_ffns, by="tensors")


def _mixtures(shown: Shown) -> list[BlockSpec]:
    return shown.blocks(lambda layer: layer.mixtures)


def _routed(fact: Any) -> str:
    return "routed" if fact else "not routed"


def _is_routed(layer: Layer) -> bool | None:
    return layer.routed


def frequency(value: Any, shown: Shown) -> Verdict | None:
    """moe_layer_freq: every so many layers experts, counted from 0, after the dense ones; or a flag a layer."""
    if isinstance(value, list):
        flags = shown.entries(value)
        if flags is None:
            return wrong_length(shown, value)
        return by_layer(shown, {index: bool(flag) for index, flag in enumerate(flags)}, _is_routed, _routed)
    if type(value) is not int or value < 1:
        return None
    first = _leading(shown)
    said = {index: index % value == 0 for index in range(first, shown.count)}
    return by_layer(shown, said, _is_routed, _routed)


def leading_dense(value: Any, shown: Shown) -> Verdict | None:
    """first_k_dense_replace: no experts in the first layers, and experts in the rest, unless a frequency thins them."""
    if type(value) is not int:
        return None
    every = shown.stated("moe_layer_freq")
    said = dict.fromkeys(range(min(value, shown.count)), False)
    if every in (None, 1):
        said |= dict.fromkeys(range(value, shown.count), True)
    return by_layer(shown, said, _is_routed, _routed)


def step(value: Any, shown: Shown) -> Verdict | None:
    """decoder_sparse_step: every so many layers experts, counted from 1, but where a list says otherwise."""
    if type(value) is not int or value < 0:
        return None
    return by_layer(shown, _stepwise(shown, value, shown.stated("mlp_only_layers") or []), _is_routed, _routed)


def dense_numbers(value: Any, shown: Shown) -> Verdict | None:
    """mlp_only_layers: numbers from 0 of layers without experts."""
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        return None
    every = shown.stated("decoder_sparse_step")
    every = every if type(every) is int else 1
    return by_layer(shown, _stepwise(shown, every, value), _is_routed, _routed)


def _stepwise(shown: Shown, every: int, dense: list[int]) -> dict[int, bool]:
    return {i: bool(every) and (i + 1) % every == 0 and i not in dense for i in range(shown.count)}


def leading_hashed(value: Any, shown: Shown) -> Verdict | None:
    """num_hash_layers: the first layers choose experts by token ids, the others do not."""
    if type(value) is not int:
        return None
    said = {index: index < value for index in range(shown.count)}
    return by_layer(shown, said, lambda layer: layer.hashed, lambda f: "by token ids" if f else "not by token ids")


def _leading(shown: Shown) -> int:
    """How many leading layers the config says to be dense."""
    value = shown.stated("first_k_dense_replace", "num_dense_layers", "moe_num_dense_layers")
    return value if type(value) is int else 0
