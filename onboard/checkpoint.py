"""A checkpoint as it lies on disk: config, tensor headers, tokenizer files. Reads no tensor and runs no code."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, headers_sha256, read_headers
from dayzero.runtime.spec import CheckpointId

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tiktoken.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class Checkpoint(BaseModel):
    """headers: by tensor name, sorted. quantization: the config's own words about it, {} for none.
    remote_code: Python files that came along; they are listed and never run."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    headers: dict[str, TensorHeader]
    quantization: dict[str, Any]
    tokenizer: list[str]
    remote_code: list[str]

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or ["unknown"])[0]

    @property
    def total_bytes(self) -> int:
        return sum(header.bytes for header in self.headers.values())

    def identity(self) -> CheckpointId:
        """What a package records so that it is never trained on another checkpoint's weights."""
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
    config = _read_json(path / "config.json", required=True)
    _check_config(path / "config.json", config)
    headers = read_headers(path)
    generation = _read_json(path / "generation_config.json", required=False)
    return Checkpoint(
        path=path.resolve(),
        config=config,
        generation_config=generation,
        headers=headers,
        quantization=config.get("quantization_config") or {},
        tokenizer=[name for name in TOKENIZER_FILES if (path / name).is_file()],
        remote_code=sorted(file.name for file in path.glob("*.py")),
    )


def _check_config(file: Path, config: dict[str, Any]) -> None:
    names, quantization = config.get("architectures"), config.get("quantization_config")
    if names is not None and not (isinstance(names, list) and all(map(_is_class_name, names))):
        raise InputError(f"{file}: architectures", found=json.dumps(names)[:80], expected="a list of class names")
    if not isinstance(quantization, dict | None):
        raise InputError(f"{file}: quantization_config", found=json.dumps(quantization)[:80], expected="a JSON object")


def _is_class_name(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isidentifier()


def _read_json(file: Path, required: bool) -> dict[str, Any]:
    if not file.is_file():
        if required:
            raise InputError(str(file), found="no such file", expected="the model's config")
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), found=f"not JSON ({error})", expected="a JSON object") from None
    if not isinstance(content, dict):
        raise InputError(str(file), found=f"a JSON {type(content).__name__}", expected="a JSON object")
    return content
