"""Small sizes for a config, no two alike, that its architecture still accepts.

A first proposal gives every size a value of its own. Where the reference refuses it, sizes that were related in the
real config (equal, a sum, a product, a multiple) are related again, one relation at a time, and what brings the
reference further is kept. Relations that nothing asks for are dropped: they were accidents of round numbers.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from dayzero.onboard.config_fields import IRRELEVANT, SIZES
from dayzero.onboard.shrink.relations import Relation, relations
from dayzero.onboard.shrink.trial import SEQUENCE, Trial

Path = tuple[str, ...]
Size = tuple[Path, int]  # where it stands and its real value: a list may hold several sizes, and one of them twice
Change = dict[Size, int]

# heads * head_dim = 96, kv_heads * head_dim = 48; 2 * width and 2 * expert_width stay apart from all of them too.
# hidden is a multiple of heads, which some configs insist on; experts fall into 4 groups of 3, of which 2 hold more
# than top_k. Further values are for a second size of the same meaning.
_SMALL: dict[str, tuple[int, ...]] = {
    "hidden": (72, 84),
    "heads": (6, 9),
    "kv_heads": (3, 2),
    "head_dim": (16, 20),
    "vocabulary": (131, 139),
    "width": (58, 46, 62),
    "expert_width": (34, 30, 38),
    "shared_width": (26, 22),
    "experts": (12, 8),
    "top_k": (5, 4, 3),
    "window": (9, 7),
}
# The same for sizes that no other code needs to know by meaning: field -> value.
_MORE: dict[str, tuple[int, ...]] = {
    "d_rel": (10,), "rel_extent": (13,), "q_lora_rank": (38, 42), "kv_lora_rank": (28, 32),
    "qk_nope_head_dim": (18, 20), "qk_rope_head_dim": (8, 4),
    "v_head_dim": (10, 14), "o_lora_rank": (14,), "index_head_dim": (20,), "index_n_heads": (7,), "index_topk": (10,),
    "indexer_head_dim": (20,), "indexer_n_heads": (7,), "indexer_budget": (10,),
    "n_group": (4,), "num_expert_group": (4,), "topk_group": (2,), "moe_latent_size": (44,), "moe_hidden_size": (44,),
    "linear_key_head_dim": (14,), "linear_value_head_dim": (22,), "linear_num_key_heads": (5,),
    "linear_num_value_heads": (10,), "linear_head_dim": (14,), "linear_num_heads": (5,), "mamba_n_heads": (8,),
    "mamba_num_heads": (8,), "n_mamba_heads": (8,), "mamba_d_head": (18,), "mamba_head_dim": (18,), "state_size": (11,),
    "ssm_state_size": (11,), "mamba_d_state": (11,), "mamba_n_groups": (4,), "n_groups": (4,), "mamba_ngroups": (4,),
    "chunk_size": (7,), "mamba_chunk_size": (7,), "block_size": (7,), "mamba_dt_rank": (13,), "time_step_rank": (13,),
    "dense_intermediate_size": (58,), "shared_intermediate_size": (26,), "d_kv": (16,), "d_ff": (58,),
    "attention_chunk_size": (10,), "kv_channels": (16,), "zero_expert_num": (6,),
    "unpadded_vocab_size": (123,), "relative_attention_num_buckets": (14,), "relative_attention_max_distance": (20,),
    "expert_capacity": (3,),  # of a document: some expert of a few is asked more often
    "heavily_compressed_attention": (6,),  # tokens of a window: a document of a proof has several windows
}  # fmt: skip
_WHOSE = {"swa", "sliding", "global", "local", "per", "layer"}  # words that say of which layers a size is
_SIZES_LEFT = (30, 42, 50, 54, 62, 66, 70, 74, 78, 82, 86, 90, 94, 98, 102, 106, 110, 114, 118, 122)
_COUNTS_LEFT = (8, 11, 6, 13, 4, 15, 17, 19)
_KEPT = 4  # counts up to here are small enough
_UNTOUCHED = re.compile(
    r"token_id|token_index|theta|_token$|max_position|max_length|max_seq|^seed$|original_max|version"
)
_ROTARY = re.compile(r"rope_(parameters|scaling)")
_TOWER_KEPT = 16
_TOWER = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176)
_SECTION = "section"  # a list of how many rotary frequencies belong to each axis: its sum is the size
MOST_TRIALS = 120
MOST_POLISHED = 60


class NoSmallSizes(Exception):
    """No small sizes were found that the reference accepts; the message is what it said last."""


def sizes_of(config: Mapping[str, Any], skipped: frozenset[Path] = frozenset()) -> dict[Size, int]:
    """Every whole number of the config that can be a size, with its value. skipped: paths that hold something else."""
    found: dict[Size, int] = {}

    def walk(value: Any, path: Path) -> None:
        if path in skipped or (path and (_UNTOUCHED.search(path[-1]) or path[-1] in IRRELEVANT)):
            return
        if isinstance(value, Mapping):
            for name, held in value.items():
                walk(held, path if str(name).isdigit() else (*path, str(name)))
        elif _is_section(value, path):
            found[path, sum(value)] = sum(value)
        elif isinstance(value, (list, tuple)):
            for held in value:
                walk(held, path)
        elif type(value) is int and value > 0:
            found[path, value] = value

    walk(config, ())
    return found


def _is_section(value: Any, path: Path) -> bool:
    named = bool(path) and path[-1].endswith(_SECTION)
    return named and isinstance(value, list) and all(type(held) is int for held in value)


def _split(total: int, shares: list[int]) -> list[int]:
    """The total, split like the shares; where it does not go up, equal shares stay equal if they can."""
    whole = sum(shares)
    parts = [total * share // whole for share in shares]
    for share in sorted(set(shares), key=shares.index):
        members = [index for index, other in enumerate(shares) if other == share]
        if len(members) <= total - sum(parts):
            for index in members:
                parts[index] += 1
    parts[-1] += total - sum(parts)
    return parts


def resized(config: Any, values: Mapping[Size, int], path: Path = ()) -> Any:
    """The config with every size replaced that `values` has."""
    if isinstance(config, Mapping):
        return {
            name: resized(held, values, path if str(name).isdigit() else (*path, str(name)))
            for name, held in config.items()
        }
    if _is_section(config, path):
        total = values.get((path, sum(config)), sum(config))
        return config if total == sum(config) else _split(total, config)
    if isinstance(config, (list, tuple)):
        return [resized(held, values, path) for held in config]
    return values.get((path, config), config) if type(config) is int else config


def small_sizes(
    config: Mapping[str, Any],
    text: Path,
    skipped: frozenset[Path],
    matters: Callable[[Mapping[str, Any]], bool],
    attempt: Callable[[Mapping[str, Any]], Trial],
    collisions: Callable[[Mapping[str, Any]], set[int]],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The config at small sizes.

    text: where the language model's part is. matters: whether a config has other shapes than this one. attempt: how far
    the reference gets with a config. collisions: dimensions of a config's tensors that agree and should not. Raises
    NoSmallSizes.
    """
    real = sizes_of(config, skipped)
    values = {**real, **propose(real, text, lambda change: matters(resized(config, change)))}
    held = [relation for relation in relations(real) if _worthwhile(relation, text)]
    tried = 0

    def go(values: Mapping[Size, int]) -> Trial:
        nonlocal tried
        tried += 1
        return attempt(resized(config, values))

    best, seen = go(values), set()
    while best.stage != "runs":
        seen.add(_pattern(best.message))
        for change in _changes(held, real, values, best.message):
            if tried >= MOST_TRIALS:
                raise NoSmallSizes(best.message)
            result = go({**values, **change})
            # A refused config shows no progress but another complaint, which counts where this one spoke of the size.
            spoken_of = any(path[-1] in best.message for path, _ in change)
            new_refusal = result.stage == best.stage == "refused" and _pattern(result.message) not in seen and spoken_of
            if result.progress > best.progress or new_refusal:
                tell(f"{best.message[:80]}: {', '.join(f'{path[-1]}={v}' for (path, _), v in change.items())}")
                best, values = result, {**values, **change}
                break
        else:
            raise NoSmallSizes(best.message)
    return resized(config, _apart(values, real, go, collisions, lambda values: resized(config, values)))


def _apart(
    values: Mapping[Size, int],
    real: Mapping[Size, int],
    go: Callable[[Mapping[Size, int]], Trial],
    collisions: Callable[[Mapping[str, Any]], set[int]],
    make: Callable[[Mapping[Size, int]], dict[str, Any]],
) -> Mapping[Size, int]:
    """The values, with a few of them changed so that fewer dimensions agree that differ in the real model."""
    left = collisions(make(values))
    tried = 0
    counts = {*SIZES["experts"], *SIZES["top_k"]}  # groups hang on them
    for size in [size for size in values if values[size] != real[size] and size[0][-1] not in counts]:
        near = sorted({other for other in left if other % values[size] == 0})
        for other in _nearby(values[size], real[size], set(values.values()) | left) if near else ():
            tried += 1
            changed = {**values, size: other}
            found = collisions(make(changed))
            if len(found) < len(left) and go(changed).stage == "runs":
                values, left = changed, found
                break
        if not left or tried >= MOST_POLISHED:
            break
    return _told_apart(values, real, go, counts)


def _told_apart(
    values: Mapping[Size, int],
    real: Mapping[Size, int],
    go: Callable[[Mapping[Size, int]], Trial],
    fixed: Collection[str],
) -> Mapping[Size, int]:
    """The values, where one number stood for two sizes of the real model with one of these moved: what a number in a
    rule of the small model stands for must be known."""
    for size in sorted(values, key=lambda size: len(size[0])):
        twins = [other for other in values if values[other] == values[size] and real[other] != real[size]]
        if values[size] <= _KEPT or not twins or size[0][-1] in fixed or _UNTOUCHED.search(size[0][-1]):
            continue
        for other in itertools.islice(_nearby(values[size], real[size], set(values.values())), 4):
            changed = {**values, size: other}
            if go(changed).stage == "runs":
                values = changed
                break
    return values


def propose(real: Mapping[Size, int], text: Path, matters: Callable[[Change], bool]) -> Change:
    """Small values for the sizes, by their meaning where it is known, otherwise the next that is free."""
    meanings = {name: meaning for meaning, names in SIZES.items() for name in names}
    change: Change = {}
    given: dict[str, dict[int, int]] = {}  # meaning or field -> real value -> small value
    text_values: dict[int, int] = {}
    for size in sorted(real, key=lambda size: (len(size[0]), -size[1])):
        path, value = size
        if path[: len(text)] != text or len(path) > len(text) + 2 or _ROTARY.search("".join(path)):
            continue
        name = path[-1]
        if name not in meanings and name not in _MORE:
            name = "_".join(word for word in name.split("_") if word not in _WHOSE)
        meaning = meanings.get(name, name)
        choices = _SMALL.get(meaning) or _MORE.get(name)
        if choices is None:
            continue
        mine = given.setdefault(meaning, {})
        # One of something is a case of its own, not a size.
        if value > 1 and value not in mine and len(mine) < len(choices):
            mine[value] = choices[len(mine)]
        if value in mine:
            change[size] = mine[value]
            text_values.setdefault(value, mine[value])
    for (path, value), _ in real.items():
        if path[-1].endswith(_SECTION):
            for half in _half_of_a_head(value, real, change)[:1]:
                change[path, value] = half
    taken = set(change.values()) | {2 * value for value in change.values()}
    sizes, counts = (iter([v for v in pool if v not in taken]) for pool in (_SIZES_LEFT, _COUNTS_LEFT))
    towers: dict[int, int] = {}
    for size in sorted(real, key=lambda size: (len(size[0]), size[1])):
        path, value = size
        if size in change or value <= _KEPT or _ROTARY.search("".join(path)):
            continue
        name = path[-1]
        if path[: len(text)] != text:
            if value > _TOWER_KEPT:
                tied = text_values.get(value)
                if value not in towers and len(towers) < len(_TOWER):
                    towers[value] = _TOWER[len(towers)]
                change[size] = tied if tied is not None else min(value, towers.get(value, value))
            if name in SIZES["layers"] or name in {"depth", "encoder_layers"}:
                change[size] = 1
        elif matters({size: value + max(2, value // 2) * 2}):
            change[size] = min(value, next(sizes, value)) if value > _TOWER_KEPT else value
        elif value >= SEQUENCE:
            change[size] = next(counts, value)
    return change


def _half_of_a_head(half: int, real: Mapping[Size, int], change: Change) -> list[int]:
    """What becomes of half the rotary part of a head, for each head size of which it may be a part."""
    heads = [(size[1], change[size]) for size in change if "head_dim" in size[0][-1]]
    hidden, number = ([s for s in real if s[0][-1] in SIZES[meaning]] for meaning in ("hidden", "heads"))
    heads += [(a[1] // b[1], change.get(a, a[1]) // change.get(b, b[1])) for a in hidden for b in number]
    return [half * small // large for large, small in heads if large % half == 0 and half * small % large == 0]


def _worthwhile(relation: Relation, text: Path) -> bool:
    """Relations between the parts of a composite other than equality say nothing."""
    inside = {name[0][: len(text)] == text and len(name[0]) > len(text) for name in relation.names}
    return len(inside) == 1 or relation.kind == "equal"


def _changes(
    held: list[Relation], real: Mapping[Size, int], values: Mapping[Size, int], message: str
) -> Iterator[Change]:
    """Changes that may help, likeliest first: relations that no longer hold, those of the sizes that the message names
    before the others; then other values for single sizes, and their real ones."""
    words = set(re.findall(r"\w+", message))
    numbers = {int(word) for word in words if word.isdigit()}

    def named(size: Size) -> bool:
        return size[0][-1] in words or (values[size] in numbers and values[size] > 2)

    broken = [relation for relation in held if not relation.holds(values)]
    broken.sort(key=lambda relation: 2 * sum(named(name) for name in relation.names) < len(relation.names))
    together: Change = {}
    for relation in broken:
        if relation.kind == "equal" and all(name[0][-1] in words for name in relation.names):
            together |= min(relation.repairs(values), key=lambda change: max(_anchored(size) for size in change))
    if len(together) > 1:
        yield together
    offered: set[tuple[Size, int]] = set()

    def fresh(change: Mapping[Any, int]) -> bool:
        item = next(iter(change.items()))
        if item in offered or values[item[0]] == item[1]:
            return False
        offered.add(item)
        return True

    for relation in broken:
        repairs: list[Change] = list(relation.repairs(values))
        repairs.sort(key=lambda change: max(_anchored(size) for size in change))
        yield from (change for change in repairs if fresh(change))
    moved = [size for size in values if values[size] != real[size]]
    moved.sort(key=lambda size: not named(size))
    for size in moved:
        for other in _nearby(values[size], real[size], set(values.values())):
            if fresh({size: other}):
                yield {size: other}
    for one in moved:
        if named(one) and fresh({one: real[one]}):
            yield {one: real[one]}


def _anchored(size: Size) -> int:
    """How much else hangs on a size: those of the whole model are changed last."""
    names = [name for meaning in ("head_dim", "heads", "vocabulary", "hidden") for name in SIZES[meaning][:4]]
    return names.index(size[0][-1]) + 1 if size[0][-1] in names else 0


def _pattern(message: str) -> str:
    """The message without its numbers: a complaint about the same thing in other words is not another one."""
    return re.sub(r"\d+", "#", message)


def _nearby(value: int, real: int, taken: set[int]) -> list[int]:
    """Other values of about the same size, those with more factors of two first."""
    most = max(real, 2 * value)
    options = [other for other in range(max(2, value // 2), 2 * value + 1) if other <= most and other != value]
    options.sort(key=lambda other: (other in taken, -min(3, (other & -other).bit_length() - 1), abs(other - value)))
    return options[:4] + [other for other in (2 * value, 3 * value // 2) if other in options[4:]]
