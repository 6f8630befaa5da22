"""Damaged and deceptive checkpoints, made from a small sound one by a seeded generator.

sound = hostile.write(folder)
for mutation in hostile.mutations(seed, count): ...    # (which file, its new bytes, or a link's target)
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import skeleton

CONFIG, INDEX = "config.json", skeleton.INDEX
SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")
SENTINEL = "executed"

PAYLOADS = [
    f"__import__('pathlib').Path('{SENTINEL}').touch()",
    f"'); open('{SENTINEL}', 'w') #",
    f'"""\nopen("{SENTINEL}", "w")\n"""',
    f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{% include '{SENTINEL}' %}}",
    f"${{jndi:x}}$(touch {SENTINEL})`touch {SENTINEL}`; touch {SENTINEL}",
    "{layer.__class__.__init__.__globals__}",
    "%s%n%(x)s",
    "<script>alert(1)</script> | [x](javascript:y) | [/bold] [red]",
    "\x1b[2J\x1b]0;title\x07\r\b",
    "a\nb\x00c\u202ed\ufeff",
    "../../../../etc/passwd",
    "/etc/passwd",
    "C:\\CON",
    "x" * 70_000,
    "\ud800",
    "",
    "0",
    "model.layers.99999999999999999999.w",
    "model.layers.0.mlp.experts.999999999.w1.weight",
]
RAW = [
    "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" + "0" * 400, "9" * 5000, "-1", "-0", "0.1", "1.0", "true",
    "false", "null", str(2**63), str(2**64), str(-(2**63)), str(2**63 - 1), "[" * 5000 + "]" * 5000,
    '{"a":' * 40 + "1" + "}" * 40, "[[[[]]]]", "[" + "0," * 3000 + "0]", '"\\ud800"', "{}", "[]", '""', "0", "1", "2",
    "64", "[1, 1.0]", '["a", 1]', "[true, false]", '{"a": 1, "a": 2}', "1e-400", "00", "0x10", "'a'", "[1,]", "{a: 1}",
]  # fmt: skip
BYTES = [
    b"\xff\xfe",
    b"\xc3\x28",
    b"\x00",
    b"\xef\xbb\xbf",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\",
    b"\n",
    b"9",
]

_WEIGHTS = [
    ("model.embed_tokens.weight", [16, 8], "BF16"),
    ("model.norm.weight", [8], "F32"),
    ("lm_head.weight", [16, 8], "BF16"),
    *(
        (f"model.layers.{layer}.{name}", shape, dtype)
        for layer in range(2)
        for name, shape, dtype in [
            ("self_attn.q_proj.weight", [8, 8], "F8_E4M3"),
            ("self_attn.q_proj.weight_scale_inv", [1, 1], "F32"),
            ("self_attn.k_proj.weight", [8, 8], "BF16"),
            ("self_attn.v_proj.weight", [8, 8], "BF16"),
            ("mlp.gate.weight", [2, 8], "F32"),
            ("mlp.experts.0.w1.weight_packed", [4, 4], "U8"),
            ("mlp.experts.0.w1.weight_scale", [4, 1], "U8"),
            ("mlp.experts.1.w1.weight_packed", [4, 4], "U8"),
            ("mlp.experts.1.w1.weight_scale", [4, 1], "U8"),
            ("input_layernorm.weight", [8], "BF16"),
        ]
    ),
]
_SETTINGS: dict[str, Any] = {
    "architectures": ["TinyForCausalLM"],
    "model_type": "tiny",
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 16,
        "num_attention_heads": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 0,
        "hidden_act": "silu",
        "layer_types": ["full_attention", "sliding_attention"],
        "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1, 2], "head_dim": 4},
        "compress_ratios": [0, 0],
        "mlp_layer_types": ["sparse", "sparse"],
        "sliding_window": 4,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "quantization_config": {"quant_method": "fp8", "ignore": ["re:.*self_attn.*", "lm_head", "model.layers.*.mlp"]},
}


def write(folder: Path) -> dict[str, bytes]:
    """The sound checkpoint; file name -> content."""
    skeleton.write(_WEIGHTS, folder, _SETTINGS, shard_bytes=800)
    return {name: (folder / name).read_bytes() for name in (CONFIG, INDEX, *SHARDS)}


def mutations(sound: dict[str, bytes], seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(file, its content), `count` times: config, index and headers in turn, each damaged once or a few times."""
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice((CONFIG, CONFIG, INDEX, SHARDS[0], SHARDS[1]))
        content = sound[name]
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            content = _shard(content, rng) if name in SHARDS else _json(content, rng)
        yield name, content


def _shard(content: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    match rng.randrange(8):
        case 0:
            sizes = [0, 1, 8, length + 1, length - 1, len(content), 10**8 + 1, 2**31, 2**63, 2**64 - 1]
            return (rng.choice(sizes) % 2**64).to_bytes(8, "little") + text + data
        case 1:
            return content[: rng.randrange(len(content) + 1)]
        case 2:
            return content + rng.randbytes(rng.randrange(1, 64))
        case 3:
            return _framed(_offsets(text, rng), data)
        case _:
            return _framed(_json(text, rng), data)


def _framed(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def _offsets(text: bytes, rng: random.Random) -> bytes:
    """A header whose tensors lie elsewhere: overlapping, outside, apart, backwards, or enormous."""
    try:
        header = json.loads(text)
        name = rng.choice([name for name in header if name != "__metadata__"])
        start, end = header[name]["data_offsets"]
        by = rng.choice((-8, -1, 1, 8, 2**62, 2**63, -(2**63)))
        header[name]["data_offsets"] = rng.choice(([start + by, end + by], [start, end + by], [end, start], [start]))
        if rng.random() < 0.3:
            header[name]["shape"] = rng.choice(([2**63, 2**63], [2**40] * 40, [0] * 3000, [-1, -8], [], [8, 8, 0]))
        return json.dumps(header).encode()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):  # it was damaged before
        return text


def _json(text: bytes, rng: random.Random) -> bytes:
    match rng.randrange(6):
        case 0:
            at = rng.randrange(len(text) + 1)
            return text[:at] + rng.choice(BYTES) + text[at + rng.randrange(2) :]
        case 1:
            at = rng.randrange(len(text) + 1)
            return text[:at] + rng.choice(RAW).encode(errors="surrogatepass") + text[at:]
        case 2 if b'": ' in text or b'":' in text:
            return _twice(text, rng)
        case _:
            return _value(text, rng)


def _twice(text: bytes, rng: random.Random) -> bytes:
    """A key that stands twice."""
    at = rng.choice([i for i in range(len(text)) if text.startswith(b'":', i)])
    start = text.rfind(b'"', 0, at)
    key = text[start : at + 1]
    return text[:start] + key + b": " + rng.choice((b"1", b'"x"', b"{}", b"[]")) + b", " + text[start:]


def _value(text: bytes, rng: random.Random) -> bytes:
    """A value or a key somewhere in the tree becomes a hostile one."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return text
    places = list(_places(root))
    if not places:
        return text
    holder, key = rng.choice(places)
    payload = rng.choice(PAYLOADS)
    if isinstance(holder, dict) and rng.random() < 0.3:
        holder[payload] = holder.pop(key)
    elif rng.random() < 0.5:
        holder[key] = payload
    else:
        holder[key] = "@raw@"
        return json.dumps(root).replace('"@raw@"', rng.choice(RAW)).encode()
    return json.dumps(root).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])
