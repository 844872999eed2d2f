"""A digest of a model's files, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["digest_of"]

WHOLE = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")
"""Files that are read whole: configuration, tokenizer, chat templates, code."""
TEMPLATES = "additional_chat_templates"
WEIGHTS = (".safetensors", ".bin")
SLICE_BYTES = 4096


def digest_of(model_dir: Path) -> str:
    """Return a digest of a model's files; of weights the size counts, and bytes at three places.

    Two copies of a model have the same.  Two models have not, unless their weights differ elsewhere only.
    """
    digest = hashlib.sha256()
    for path in sorted([*model_dir.iterdir(), *model_dir.glob(f"{TEMPLATES}/*.jinja")]):
        if path.suffix in WHOLE:
            _add(digest, str(path.relative_to(model_dir)), path.read_bytes())
        elif path.suffix in WEIGHTS:
            size = path.stat().st_size
            with path.open("rb") as file:
                for start in (0, size // 2, max(0, size - SLICE_BYTES)):
                    file.seek(start)
                    _add(digest, f"{path.name} {size}", file.read(SLICE_BYTES))
    return digest.hexdigest()[:32]


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)} ".encode())
    digest.update(content)
