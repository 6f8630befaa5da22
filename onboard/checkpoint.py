"""A checkpoint as it lies on disk: config, tensor headers, tokenizer files. Reads no tensor and runs no code."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, headers_sha256, read_headers
from dayzero.runtime.shards import check_inside
from dayzero.runtime.strict_json import read_object, shown

if TYPE_CHECKING:  # the blocks need torch, which takes longer to import than a trillion parameters take to read
    from dayzero.runtime.spec import CheckpointId

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tiktoken.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
LONGEST_CONFIG, DEEPEST_CONFIG = 16_000_000, 16  # bytes, objects in objects


def _as_headers(value: Any) -> dict[str, TensorHeader]:
    """Headers as `read_headers` made and checked them, or as they come back from JSON."""
    if isinstance(value, dict) and (not value or type(next(iter(value.values()))) is TensorHeader):
        return value
    return {name: TensorHeader(dtype, tuple(shape), *rest) for name, (dtype, shape, *rest) in dict(value).items()}


# Half a million of them: pydantic would look at every number again.
Headers = Annotated[dict[str, TensorHeader], PlainValidator(_as_headers), PlainSerializer(lambda value: value)]


class Checkpoint(BaseModel):
    """headers: by tensor name, sorted. quantization: the config's own words about it, {} for none.
    remote_code: Python files that came along; they are listed and never run."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    headers: Headers
    quantization: dict[str, Any]
    tokenizer: list[str]
    remote_code: list[str]

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or ["unknown"])[0]

    @property
    def total_bytes(self) -> int:
        return sum(header.bytes for header in self.headers.values())

    def identity(self) -> "CheckpointId":
        """What a package records so that it is never trained on another checkpoint's weights."""
        from dayzero.runtime.spec import CheckpointId

        dtypes: dict[str, int] = {}
        for header in self.headers.values():
            dtypes[header.dtype] = dtypes.get(header.dtype, 0) + 1
        canonical = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return CheckpointId(
            architecture=self.architecture,
            config_sha256=hashlib.sha256(canonical.encode()).hexdigest(),
            headers_sha256=headers_sha256(self.headers),
            tensors=len(self.headers),
            bytes=self.total_bytes,
            dtypes=dict(sorted(dtypes.items())),
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises InputError for a folder that is not a complete safetensors checkpoint."""
    if not path.is_dir():
        raise InputError(
            str(path),
            found="a file" if path.exists() else "no such folder",
            expected="a Hugging Face checkpoint folder: config.json and safetensors files",
        )
    config = _read_json(path, "config.json", required=True)
    quantization = _check_config(path / "config.json", config)
    generation = _read_json(path, "generation_config.json", required=False)
    headers = read_headers(path)
    return Checkpoint(
        path=path.resolve(),
        config=config,
        generation_config=generation,
        headers=headers,
        quantization=quantization,
        tokenizer=[name for name in TOKENIZER_FILES if (path / name).is_file()],
        remote_code=sorted(file.name for file in path.glob("*.py") if file.name.isprintable()),
    )


def _check_config(file: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What the config says of quantisation, {} for nothing."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(map(_is_class_name, names))):
        raise InputError(f"{file}: architectures", found=json.dumps(names)[:80], expected="a list of class names")
    found: dict[str, Any] = {}
    for prefix, part in (("", config), *((f"{name}.", value) for name, value in config.items())):
        quantization = part.get("quantization_config") if isinstance(part, Mapping) else None
        if not isinstance(quantization, dict | None):
            where = f"{file}: {prefix}quantization_config"
            raise InputError(where, found=json.dumps(quantization)[:80], expected="a JSON object")
        found = found or quantization or {}
    return found


def _is_class_name(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isidentifier()


def _read_json(folder: Path, name: str, required: bool) -> dict[str, Any]:
    file = folder / name
    if not file.is_file():
        if required:
            raise InputError(str(file), found="no such file", expected="the model's config")
        return {}
    check_inside(folder, name)
    content = read_object(file, LONGEST_CONFIG)
    _check_strings(file, content)
    return content


def _check_strings(file: Path, content: dict[str, Any]) -> None:
    """Raises InputError for values nested deeper than any config is, and for text that is no text."""
    level: list[Any] = [content]
    for _ in range(DEEPEST_CONFIG):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
                for key in value:
                    if len(key) > 200 or not _is_text(key):
                        raise InputError(str(file), found=f"a field named {shown(key)}", expected="a name")
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and not _is_text(value):
                raise InputError(str(file), found=f"the text {shown(value)}", expected="Unicode text")
        level = below
        if not level:
            return
    raise InputError(str(file), found=f"more than {DEEPEST_CONFIG} values in one another", expected="a flat config")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character
        return False
    return True
