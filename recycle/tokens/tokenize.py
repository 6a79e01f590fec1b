"""Tokenizes documents of any size with a Hugging Face tokenizer into Megatron-LM's token files, in constant memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from recycle.errors import JobError, RecycleError
from recycle.files import read_whole, require_content
from recycle.tokens.token_files import TokenFiles

EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-document token if no file states it: GPT-2, Llama 3, Llama 2, Gemma."""
BATCH_PIECES = 512


@dataclass(frozen=True)
class TokenizedFiles:
    """The outcome of `tokenize`; `[model] vocabulary` must be at least its `vocabulary`."""

    documents: int
    tokens: int
    vocabulary: int
    eod: int | None


def tokenize(
    sources: Sequence[Path],
    prefix: Path,
    tokenizer: Path,
    *,
    key: str = "text",
    eod: str | None = "auto",
    progress: Callable[[Path, int], None] = lambda *_: None,
) -> TokenizedFiles:
    """Write the tokens of all documents to `PREFIX.bin` and `PREFIX.idx`.

    Tokens that a tokenizer adds around a text (beginning of sentence) are omitted.

    Args:
        tokenizer: a `tokenizer.json`, or the folder of a model with one.
        eod: the token that ends each document; "auto" for the tokenizer's own; None for none.
        progress: called with the current file and the bytes read so far, over all files.

    Raises:
        JobError: a source or the tokenizer cannot be read, or lacks the token; names file and place.
        RecycleError: the files cannot be written; no partial files remain.
    """
    encoder = _load(tokenizer)
    vocabulary = encoder.get_vocab_size(with_added_tokens=True)
    end = None if eod is None else _end_of_document(encoder, tokenizer, eod)
    before = 0
    with TokenFiles(prefix, vocabulary) as files:
        for source in sources:
            read = 0
            for batch in _batches(documents(source, key)):
                encodings = encoder.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
                for piece, encoded in zip(batch, encodings, strict=True):
                    files.add(encoded.ids)
                    if piece.ends:
                        files.end_document(() if end is None else (end,))
                read = batch[-1].read
                progress(source, before + read)
            before += read
        if not files.tokens:
            raise RecycleError(f"{prefix}.bin: not written: no text in {', '.join(map(str, sources))}")
    return TokenizedFiles(files.documents, files.tokens, vocabulary, end)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= PIECE_BYTES or len(batch) == BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _load(path: Path) -> Any:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        hint = "; the folder has no fast tokenizer of Hugging Face" if path.is_dir() else ""
        raise JobError(f"{file}: does not exist{hint}")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise JobError(
            "tokenize: needs the package tokenizers; install it with: pip install 'recycle-pipeline[data]'"
        ) from None
    try:
        return Tokenizer.from_str(read_whole(file, JobError).decode())
    except JobError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise JobError(f"{file}: is not a tokenizer of Hugging Face ({' '.join(str(error).split())[:200]})") from None


def _end_of_document(encoder: Any, path: Path, wanted: str) -> int:
    if wanted != "auto":
        token = encoder.token_to_id(wanted)
        if token is None:
            raise JobError(f"{path}: has no token {wanted!r}; give one of its tokens with --eod, or --no-eod for none")
        return int(token)
    named = _configured_end(path if path.is_dir() else path.parent)
    for name in (named,) if named else EOD_NAMES:
        if (token := encoder.token_to_id(name)) is not None:
            return int(token)
    raise JobError(f"{path}: states no token that ends a document; give it with --eod TOKEN, or --no-eod for none")


def _configured_end(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return None
    try:
        config = json.loads(read_whole(file, JobError))
    except ValueError as error:
        raise JobError(f"{file}: not valid JSON: {error}") from None
    token = config.get("eos_token") if isinstance(config, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


LINES = (".jsonl", ".ndjson")
"""Suffixes of files with a JSON object per line, optionally followed by `.gz`. All other files are text."""
PIECE_BYTES = 1 << 18
"""Maximum size of a piece of text; pieces end at a line end if possible."""
MOST_LINE_BYTES = 1 << 26


class Piece(NamedTuple):
    """Part of a document; `read` are the bytes of the file, as stored, that are read so far."""

    text: str
    ends: bool
    read: int


def documents(path: Path, key: str) -> Iterator[Piece]:
    """Iterate over the documents of a file, piece by piece.

    Raises:
        JobError: the file cannot be read, or has other content; names the line or the byte.
    """
    suffixes = path.suffixes
    is_packed = suffixes[-1:] == [".gz"]
    is_lines = (suffixes[-2:-1] if is_packed else suffixes[-1:]) in [[suffix] for suffix in LINES]
    try:
        require_content(path, JobError)
        with path.open("rb") as file, ExitStack() as unpacked:
            stream: Any = unpacked.enter_context(gzip.open(file)) if is_packed else file
            yield from (_lines(path, stream, file, key) if is_lines else _text(path, stream, file))
    except (OSError, EOFError) as error:  # gzip's own errors have no strerror
        raise JobError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _lines(path: Path, stream: IO[bytes], file: IO[bytes], key: str) -> Iterator[Piece]:
    line_type: Any = msgspec.defstruct("Line", [("text", str, msgspec.field(name=key))])
    decoder = msgspec.json.Decoder(line_type)
    number = 0
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise JobError(f"{path}: line {number} is longer than {MOST_LINE_BYTES >> 20} MiB; cut it into documents")
        if line.isspace():
            continue
        try:
            document = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise JobError(
                f'{path}: line {number}: {error}; each line is an object with a text under "{key}", or the key of --key'
            ) from None
        yield Piece(document.text, True, file.tell())


def _text(path: Path, stream: IO[bytes], file: IO[bytes]) -> Iterator[Piece]:
    remainder, start = b"", 0
    while True:
        block = stream.read(PIECE_BYTES - len(remainder))
        content = remainder + block
        cut = _cut(content) if block else len(content)
        try:
            text = content[:cut].decode("utf-8")
        except UnicodeDecodeError as error:
            raise JobError(f"{path}: is not UTF-8 text (byte {start + error.start})") from None
        yield Piece(text, not block, file.tell())
        if not block:
            return
        remainder, start = content[cut:], start + cut


def _cut(content: bytes) -> int:
    end = content.rfind(b"\n", 0, len(content) - 1)
    while end >= 0:
        if not content[end + 1 : end + 2].isspace():
            return end + 1
        end = content.rfind(b"\n", 0, end)
    for back in range(1, min(4, len(content)) + 1):
        first = content[-back]
        if first & 0xC0 != 0x80:  # the first byte of a character says how many it has
            length = 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)
            return len(content) - (back if length > back else 0)
    return len(content)
