"""`recycle tokenize`: text and JSON lines to the token files that Megatron-LM reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from recycle.cli.terminal import JsonOption, TwentiethLines, print_result, progress_bars
from recycle.errors import JobError
from recycle.files import require_writable


def tokenize(
    sources: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON lines, or text. Or .gz of these.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PREFIX", help="Writes PREFIX.bin and PREFIX.idx.")],
    tokenizer: Annotated[
        Path, typer.Option(metavar="FILE|DIR", help="A tokenizer.json of Hugging Face, or a model's folder with one.")
    ],
    key: Annotated[str, typer.Option(metavar="KEY", help="Where the text is in each line's object.")] = "text",
    eod: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Ends each document. Else what the tokenizer says.")
    ] = None,
    no_eod: Annotated[bool, typer.Option("--no-eod", help="Let documents end without a token.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make Megatron-LM's token files of text, of any size.

    A file named .jsonl or .ndjson has an object per line, each with a document; any other file is one document of
    text. A job reads the result with `[data] kind = "megatron"` and `path = "PREFIX"`. A text longer than 256
    KiB is encoded in pieces that end where a line does; a tokenizer that does not split text into words may give other
    tokens there.

    Example: **recycle tokenize corpus.jsonl -o corpus --tokenizer models/llama**

    Example: **recycle tokenize book.txt -o book --tokenizer tokenizer.json --eod '<|endoftext|>'**
    """

    from recycle.tokens.tokenize import tokenize as write

    if eod is not None and no_eod:
        raise JobError("tokenize: --eod and --no-eod contradict each other; give one")
    for suffix in (".bin", ".idx"):
        require_writable(Path(f"{output}{suffix}"))
        if Path(f"{output}{suffix}").exists():
            raise JobError(f"{output}{suffix}: exists already; remove it, or choose another name with -o")
    whole = round(sum(map(_size, sources)) / 1e6, 1)
    with progress_bars(otherwise=TwentiethLines()) as report:
        written = write(
            sources,
            output,
            tokenizer,
            key=key,
            eod=None if no_eod else eod or "auto",
            progress=lambda source, read: report("read", round(read / 1e6, 1), whole, f"{source.name} [MB]"),
        )
    end = "no token between them" if written.eod is None else f"each ends with token {written.eod}"
    print_result(
        as_json,
        {"prefix": str(output), **asdict(written)},
        f"{output}.bin, {output}.idx: {written.documents} documents, {written.tokens} tokens; {end}",
        f'use them with [data] kind = "megatron", path = "{output}" and [model] vocabulary = {written.vocabulary}',
    )


def _size(source: Path) -> int:
    try:
        with source.open("rb") as file:
            return file.seek(0, 2)
    except OSError as error:
        raise JobError(f"{source}: cannot be read ({error.strerror})") from None
