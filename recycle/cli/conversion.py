"""`recycle tokenize`, and conversion of checkpoints from and to Hugging Face and Megatron."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from recycle.cli.terminal import Result, TwentiethLines, megabytes, progress_bars
from recycle.errors import JobError
from recycle.files import require_absent, require_writable
from recycle.job import Job, is_stated
from recycle.job.pricing import parse_bytes


def tokenize(
    sources: list[Path],
    output: Path,
    tokenizer: Path,
    key: str = "text",
    eod: str | None = None,
    no_eod: bool = False,
) -> Result:
    """Tokenize text of any size into Megatron-LM's token files.

    A file named .jsonl or .ndjson holds one document per line, each in an object; any other file is one document of
    text. A job reads the result with `[data] kind = "megatron"` and `path = "PREFIX"`. Texts over 256 KiB are encoded
    in pieces that end at line ends; a tokenizer that does not split text into words may produce other tokens there.

    Example: **recycle tokenize corpus.jsonl -o corpus --tokenizer models/llama**

    Example: **recycle tokenize book.txt -o book --tokenizer tokenizer.json --eod '<|endoftext|>'**

    Args:
        sources (FILE...): JSON lines or text, optionally compressed as .gz.
        output (-o PREFIX): writes PREFIX.bin and PREFIX.idx.
        tokenizer (--tokenizer FILE|DIR): tokenizer.json of Hugging Face, or the folder of a model with one.
        key (KEY): key of the text in each line's object.
        eod (TOKEN): token that ends each document; the tokenizer's own if left out.
        no_eod: let documents end without a token.
    """
    from recycle.tokens.tokenize import tokenize as write

    if eod is not None and no_eod:
        raise JobError("tokenize: --eod and --no-eod contradict each other; give one")
    for suffix in (".bin", ".idx"):
        require_writable(Path(f"{output}{suffix}"))
        require_absent(Path(f"{output}{suffix}"))
    total = round(sum(source.stat().st_size for source in sources if source.exists()) / 1e6, 1)
    with progress_bars(otherwise=TwentiethLines()) as report:
        written = write(
            sources,
            output,
            tokenizer,
            key=key,
            eod=None if no_eod else eod or "auto",
            progress=lambda source, read: report("read", round(read / 1e6, 1), total, f"{source.name} [MB]"),
        )
    end = "no token between them" if written.eod is None else f"each ends with token {written.eod}"
    return Result(
        {"prefix": str(output), **asdict(written)},
        [
            f"{output}.bin, {output}.idx: {written.documents} documents, {written.tokens} tokens; {end}",
            f'use them with [data] kind = "megatron", path = "{output}" and [model] vocabulary = {written.vocabulary}',
        ],
    )


def import_hf(source: Path, output: Path) -> Result:
    """Make a checkpoint from a Llama, Qwen 2, Qwen 3 or Mixtral of Hugging Face.

    A job starts from it with `[model] weights = "CHECKPOINT"`. Weights are kept in fp32, which represents bf16 and fp16
    exactly. The checkpoint includes the tokenizer's files, and `recycle export-hf` returns all of it.

    Example: **recycle import-hf models/Llama-3.1-8B -o llama**

    Args:
        source (DIR): folder of the model: config.json, safetensors, tokenizer.
        output (-o CHECKPOINT): folder to write; must not exist.
    """
    from recycle.hugging_face.conversion import DTYPES, import_model

    with megabytes("written") as report:
        result = import_model(source, output, report)
    types = [DTYPES[name][0] for name in result.stored]
    converted = "" if types == ["float32"] else f", converted from {' and '.join(types)} to float32"
    figures = {"architecture": result.architecture, "parameters": result.parameters, "stored": types}
    return Result(
        {"checkpoint": str(output), **figures, "carried": list(result.carried)},
        [
            f"{output}: {result.architecture}, {result.parameters:,} parameters{converted}",
            f"also kept: {', '.join(result.carried) or 'nothing (the folder has no tokenizer)'}",
            f'start from it with [model] weights = "{output}"',
        ],
    )


def export_hf(
    checkpoint: Path,
    output: Path,
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    shard_size: str = "2 GiB",
) -> Result:
    """Make a Hugging Face folder from a checkpoint of a Llama, Qwen 2, Qwen 3 or Mixtral.

    The folder has the weights as safetensors, `config.json`, and the tokenizer of an imported model. The shape of the
    run does not matter.

    Example: **recycle export-hf runs/mine/checkpoints/step-00000999 -o mine**

    Example: **recycle export-hf runs/mine/checkpoints/step-00000999 -o mine-bf16 --dtype bf16 --shard-size "5 GB"**

    Args:
        checkpoint (CHECKPOINT): an imported checkpoint, or one of a run's checkpoints.
        output (-o DIR): folder to write; must not exist.
        dtype: type of the weights; auto is the type that the model was imported in.
        shard_size (SIZE): maximum size of a file.
    """
    from recycle.hugging_face.conversion import DTYPES, export_model

    most_bytes = int(parse_bytes(shard_size, "export-hf: --shard-size"))
    with megabytes("written") as report:
        result = export_model(checkpoint, output, dtype, most_bytes, report)
    (stored,) = (DTYPES[name][0] for name in result.stored)
    rounded = "" if stored == "float32" else ", rounded from float32 (--dtype fp32 keeps every bit)"
    carried = ", ".join(result.carried) or "no tokenizer (the weights came without one; copy yours to the folder)"
    figures = {"architecture": result.architecture, "parameters": result.parameters, "dtype": stored}
    return Result(
        {"folder": str(output), **figures, "carried": list(result.carried)},
        [
            f"{output}: {result.architecture}, {result.parameters:,} parameters in {stored}{rounded}",
            f"also written: config.json, {carried}",
            f'load it with transformers: AutoModelForCausalLM.from_pretrained("{output}")',
        ],
    )


def import_megatron(source: Path, job: Path, output: Path, run: bool = False) -> Result:
    """Make a checkpoint from the weights in a Megatron checkpoint (torch_dist) of any parallel sizes.

    A job starts from it with `[model] weights = "CHECKPOINT"`. With --run the optimizer's moments and step count are
    imported too, and the job resumes from there. Megatron's index is a pickle: read only trusted checkpoints.

    The job's model is compared with the checkpoint's tensors and, if present, with Megatron-LM's arguments. Properties
    that the checkpoint does not state are printed as taken on trust. A job that does not state `vocabulary` keeps every
    row.

    Examples:

    **recycle import-megatron megatron/checkpoints --job job.toml -o weights**

    **recycle import-megatron megatron/checkpoints --job job.toml --run -o runs/mine**

    Args:
        source (DIR): Megatron checkpoint (torch_dist): an iteration, or its parent.
        job (--job JOB): job with the [model] of the weights.
        output (-o CHECKPOINT): folder to write; must not exist.
        run: import the optimizer's moments too; the folder is a run directory to resume.
    """
    from recycle.megatron.conversion import import_model, import_run

    described = Job.load(job)
    is_stated_by_job = described.model.weights is not None or is_stated(job, "model", "vocabulary")
    if run and not is_stated_by_job:
        raise JobError("[model] vocabulary: state it in the job, which resumes with it; count tokens without padding")
    if run:
        result = import_run(source, described, output)
    else:
        result = import_model(source, described.model, output, keeps_rows=not is_stated_by_job)
    figures = {"parameters": result.parameters, "iteration": result.iteration}
    more = {"left_out_rows": result.left_out_rows, "unstated": list(result.unstated)}
    kept = f"vocabulary: every row of the checkpoint is kept, because {job} does not state [model] vocabulary"
    padding = f"{result.left_out_rows} rows of padding after the {described.model.vocabulary} of the vocabulary"
    trusted = f"taken on trust from {job}, because the checkpoint does not state it: {', '.join(result.unstated)}"
    resume = f"resume with: recycle train {job} --resume --run {output}"
    return Result(
        {"checkpoint": str(output), **figures, **more},
        [
            f"{output}: {result.parameters:,} parameters, of iteration {result.iteration}",
            "" if is_stated_by_job else kept,
            f"left out: {padding}" if result.left_out_rows else "",
            trusted if result.unstated else "",
            resume if run else f'start from it with [model] weights = "{output}"',
        ],
    )


def export_megatron(checkpoint: Path, output: Path) -> Result:
    """Make a Megatron checkpoint (torch_dist): weights and, for a run's checkpoint, Adam's moments and step count.

    Megatron loads it at any tensor, pipeline and virtual pipeline size, whatever shape the run had.

    Example: **recycle export-megatron runs/mine/checkpoints/step-00000999 -o megatron**

    Args:
        checkpoint (CHECKPOINT): an imported checkpoint, or one of a run's checkpoints.
        output (-o DIR): folder to write; must not exist.
    """
    from recycle.megatron.conversion import export_model

    result = export_model(checkpoint, output)
    weights = "parameters with their moments" if result.moments else "parameters"
    figures = {"parameters": result.parameters, "iteration": result.iteration, "moments": result.moments}
    return Result(
        {"folder": str(output), **figures},
        [
            f"{output}: {result.parameters:,} {weights} in float32, of iteration {result.iteration}",
            f"load it with Megatron-LM: --load {output} --no-load-rng{'' if result.moments else ' --no-load-optim'}",
        ],
    )
