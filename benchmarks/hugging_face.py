"""Import and export of Hugging Face models: seconds and peak memory, against transformers loading and saving them.

    python -m benchmarks.hugging_face [--layers N] [--hidden H]

The model is a Llama in bf16 with random weights, in four safetensors files with an index. Memory is the peak of a
process's private pages (RssAnon of /proc/PID/status, sampled every 5 ms). Mapped files do not count, because the kernel
can drop their pages. Memory includes what Python and torch take before they read anything; the first row gives that
part. The tensors and `config.json` of the export are compared with the model's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from recycle.hugging_face.architectures import model_of
from recycle.hugging_face.correspondence import blocks

FILES = 4
COMMAND = "from recycle.cli import main; main()"
NOTHING = "import recycle.hugging_face.conversion"
PEER = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).save_pretrained(sys.argv[2])
"""


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """Write the model, file by file; returns the bytes of its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {block.theirs: block.their_shape for block in blocks(model_of(config, "config.json"))}
    names = list(shapes)
    count, files = -(-len(names) // FILES), {}
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        part = {name: torch.randn(shapes[name]).bfloat16() for name in names[number * count : (number + 1) * count]}
        save_file(part, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum((folder / file).stat().st_size for file in set(files.values()))


def measure(code: str, *arguments: Path | str) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak private MB) of a Python process."""
    begin, most = time.monotonic(), 0
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        status = Path(f"/proc/{process.pid}/status")
        while True:
            ended, how, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            line = next((line for line in status.read_text().splitlines() if line.startswith("RssAnon")), "RssAnon: 0")
            most = max(most, int(line.split()[1]))
            time.sleep(0.005)
        process.returncode = os.waitstatus_to_exitcode(how)
    if process.returncode:
        raise SystemExit(f"{arguments}: failed")
    return time.monotonic() - begin, used.ru_utime + used.ru_stime, most / 1000


def is_same(folder: Path, other: Path) -> bool:
    """Whether the models in two folders have the same tensors to the bit, and the same `config.json`."""
    theirs = {name: path for path in other.glob("*.safetensors") for name in load_file(path)}
    configs = [json.loads((at / "config.json").read_text()) for at in (folder, other)]
    found = 0
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            found += torch.equal(tensor, load_file(theirs[name])[name])
    return found == len(theirs) and configs[0] == configs[1]


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_model(folder / "model", arguments.layers, arguments.hidden)
        print(f"weights of {size / 1e6:.0f} MB in bf16, {2 * size / 1e6:.0f} MB in fp32")
        print(f"{'':36} {'s':>6} {'CPU s':>6} {'own memory [MB]':>16}")
        ways = {
            "nothing: imports alone": (NOTHING,),
            "recycle import-hf": (COMMAND, "import-hf", folder / "model", "-o", folder / "checkpoint"),
            "recycle export-hf": (COMMAND, "export-hf", folder / "checkpoint", "-o", folder / "back"),
            "recycle export-hf, files of 256 MiB": (
                *(COMMAND, "export-hf", folder / "checkpoint", "-o", folder / "small", "--shard-size", "256 MiB"),
            ),
            "transformers: load and save": (PEER, folder / "model", folder / "peer"),
        }
        for way, command in ways.items():
            seconds, cpu, memory = measure(*command)
            print(f"{way:36} {seconds:6.1f} {cpu:6.1f} {memory:16.0f}", flush=True)
        print(f"exported as it was imported: {is_same(folder / 'model', folder / 'back')}")


if __name__ == "__main__":
    main()
