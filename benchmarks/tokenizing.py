"""Tokenizing: megabytes per second and peak memory, of `recycle tokenize` and of a plain loop.

    python -m benchmarks.tokenizing [--megabytes N] [--plain N]

The text is the source code of Python's standard library, in documents of a few hundred to some ten thousand bytes,
repeated up to N megabytes of JSON lines. The tokenizer is a byte-level BPE of 32,000 tokens trained on it. The plain
loop encodes line by line with the same tokenizer and writes with megatron-core's IndexedDatasetBuilder, like each
process of Megatron-LM's `preprocess_data.py`; it gets the first `--plain` megabytes. The files of both are compared
byte for byte. Memory is the process's largest resident size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

PLAIN = """
import json, sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer
lines, prefix, tokenizer = sys.argv[1:]
encoder = Tokenizer.from_file(tokenizer)
end = encoder.token_to_id("<end>")
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(encoder.get_vocab_size()))
with open(lines, "rb") as file:
    for line in file:
        ids = encoder.encode(json.loads(line)["text"], add_special_tokens=False).ids
        builder.add_document(numpy.array([*ids, end]), [len(ids) + 1])
builder.finalize(prefix + ".idx")
"""


def documents() -> list[str]:
    """Pieces of source files, cut before each definition."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [source.read_text(encoding="utf-8", errors="ignore") for source in sources]
    return [piece for text in texts for piece in text.split("\ndef ") if piece.strip()]


def write_lines(path: Path, texts: list[str], size: int) -> None:
    """At least `size` bytes of JSON lines."""
    number = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            for text in texts:
                file.write(json.dumps({"id": number, "text": text}) + "\n")
                number += 1
                if number % 1000 == 0 and file.tell() >= size:
                    return


def save_tokenizer(folder: Path, texts: list[str]) -> Path:
    """A model's folder with a tokenizer of 32,000 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    encoder.train_from_iterator(texts, trainer)
    folder.mkdir()
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


def measure(command: list[str], size: int) -> tuple[float, float, float]:
    """(MB a second, MB a second of the processor, largest resident MB) of a process."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begin
    if status:
        raise SystemExit(f"{command[:4]} failed")
    return size / 1e6 / seconds, size / 1e6 / (used.ru_utime + used.ru_stime), used.ru_maxrss / 1e3


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--plain", type=int, default=50, help="megabytes that the plain loop has")
    arguments = parser.parse_args()
    texts = documents()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tokenizer(folder / "model", texts)
        print(f"{'':28} {'MB':>6} {'MB/s':>7} {'MB/CPU s':>9} {'memory [MB]':>12}")
        for megabytes in sorted({arguments.plain, arguments.megabytes}):
            lines = folder / f"{megabytes}.jsonl"
            write_lines(lines, texts, megabytes * 1_000_000)
            size = lines.stat().st_size
            ways = {"recycle tokenize": ["-c", "from recycle.cli import main; main()", "tokenize", str(lines), "-o",
                                         str(folder / "ours"), "--tokenizer", str(model)]}  # fmt: skip
            if megabytes == arguments.plain:
                ways["line by line, megatron-core"] = ["-c", PLAIN, str(lines), str(folder / "plain"),
                                                       str(model / "tokenizer.json")]  # fmt: skip
            for way, command in ways.items():
                rate, cpu_rate, memory = measure([sys.executable, *command], size)
                print(f"{way:28} {size / 1e6:6.0f} {rate:7.2f} {cpu_rate:9.2f} {memory:12.0f}", flush=True)
            for suffix in (".bin", ".idx"):
                ours, plain = (folder / f"{which}{suffix}" for which in ("ours", "plain"))
                if plain.exists():
                    print(f"{suffix} the same: {ours.read_bytes() == plain.read_bytes()}")
                    plain.unlink()
                ours.unlink()
            lines.unlink()


if __name__ == "__main__":
    main()
