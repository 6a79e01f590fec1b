"""A small tokenizer of Hugging Face, made of a few words."""

import json
from pathlib import Path

import pytest

WORDS = "the worker that dies and the worker that lives hold the same weights of one stage\nand go on, été 你好\n" * 20


def saved_tokenizer(folder: Path, eos="<end>") -> Path:
    """A model's folder with a byte-level BPE of 300 tokens and one that is called as in `eos`."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    encoder.train_from_iterator([WORDS], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder
