"""Write a small token file with megatron-core's own builder: modules of Python's standard library, one per document.

    python examples/megatron_data/write_dataset.py [--prefix PATH] [--documents N]

Tokens are bytes, and 256 ends a document. A real run has its own tokenizer and Megatron-LM's `preprocess_data.py`.
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
END_OF_DOCUMENT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, default=HERE / "stdlib", help="the files without .bin and .idx")
    parser.add_argument("--documents", type=int, default=40)
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{arguments.prefix}.bin", dtype=np.uint16)
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: arguments.documents]
    for module in modules:
        builder.add_item(torch.tensor([*module.read_bytes(), END_OF_DOCUMENT]))
        builder.end_document()
    builder.finalize(f"{arguments.prefix}.idx")
    print(f"{len(modules)} documents in {arguments.prefix}.bin, their index in {arguments.prefix}.idx")


if __name__ == "__main__":
    main()
