"""`python -m recycle.megatron SCRIPT ...`: a pretraining script of Megatron-LM that survives failures."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recycle.megatron",
        usage="recycle agent JOB [OPTIONS] -- python -m recycle.megatron SCRIPT [ARGUMENTS]",
        description="Run a pretraining script of Megatron-LM, such as pretrain_gpt.py; it survives dead workers. The"
        " script is not changed. Its arguments agree with the job: data- and pipeline-parallel size, model chunks,"
        " micro-batches and iterations. See docs/guides/own-loop.md.",
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="calls megatron.training.pretrain")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the script")
    given = parser.parse_args()
    if not given.script.is_file():
        parser.error(f"{given.script}: does not exist; name a script of Megatron-LM")

    from recycle.megatron.pretrain import run

    run(given.script, given.arguments)


if __name__ == "__main__":
    main()
