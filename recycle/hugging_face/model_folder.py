"""Folders of Hugging Face models: configuration, weight files and accompanying files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from recycle.errors import JobError, errors_as
from recycle.files import decoded, read_whole, require_content, write_whole

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COMPANION_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "LICENSE", "LICENSE.txt", "USE_POLICY.md", "NOTICE"),
)
"""Files that accompany weights."""


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _Token(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_Token] | None = None


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises JobError for other content."""
    text = read_whole(path, JobError)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path}: not valid JSON, perhaps cut off: {error}") from None
    if not isinstance(content, dict):
        raise JobError(f"{path}: does not hold a JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files with a model's weights.

    Raises JobError if the folder has none, or one that the index names is missing.
    """
    if not (folder / INDEX).exists():
        if (folder / WEIGHTS).exists():
            return [folder / WEIGHTS]
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        if others:
            raise JobError(
                f"{folder}: has {others[0]} but not {INDEX}, which lists the content of its {len(others)} file(s);"
                f" fetch it too, or name a single file {WEIGHTS}"
            )
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; it has pickle files only, which transformers converts with save_pretrained" if pickled else ""
        raise JobError(f"{folder}: has no weights, {WEIGHTS} or {INDEX}{hint}")
    index = read_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise JobError(f"{folder / INDEX}: weight_map: does not map tensors to files")
    names = list(dict.fromkeys(index.values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise JobError(f"{folder / INDEX}: weight_map: {name!r} is not the name of a file in the folder")
        if not (folder / name).is_file():
            raise JobError(f"{folder / name}: missing, though {INDEX} names it; fetch it")
    return [folder / name for name in sorted(names)]


def require_tokenizer_within(folder: Path, vocabulary: int) -> None:
    """Raise JobError for a tokenizer with tokens that the embedding has no row for."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    with errors_as(JobError, str(path)):
        tokenizer = decoded(read_whole(path, JobError), _Tokenizer, JobError)
    words = tokenizer.model.vocab
    numbers = words.values() if isinstance(words, dict) else range(len(words))
    count = max((*numbers, *(token.id for token in tokenizer.added_tokens or ())), default=-1) + 1
    if count > vocabulary:
        raise JobError(
            f"{path}: has {count} tokens, and the model's vocabulary is {vocabulary} ({CONFIG}: vocab_size); use its"
            " tokenizer, or have transformers resize the embedding (resize_token_embeddings)"
        )


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the accompanying files from one folder to another, which is created; return their names.

    Raises:
        JobError: a file is a pointer of Git LFS.
        OSError: a file cannot be read or written.
    """
    names = [name for name in COMPANION_FILES if (source / name).is_file()]
    target.mkdir(exist_ok=True)
    for name in names:
        require_content(source / name, JobError)
        shutil.copyfile(source / name, target / name)
    return names


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object in Hugging Face's format: two spaces, a line end. Raises RecycleError."""
    write_whole(path, json.dumps(content, indent=2, sort_keys=path.name == CONFIG) + "\n")
