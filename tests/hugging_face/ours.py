"""What recycle's own stages make of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recycle.exec.model.build import build_stages
from recycle.exec.model.megatron_stage import MegatronStage
from recycle.hugging_face.conversion import import_model
from recycle.job import Job

CPU = torch.device("cpu")


def imported(model: Any, **saved: Any) -> Path:
    """Save a model of transformers as `model` and import it as `checkpoint`; gives the folder of the model."""
    model.save_pretrained("model", **saved)
    import_model(Path("model"), Path("checkpoint"))
    return Path("model")


def job_of(weights: Path, ranks: int = 1, chunks: int = 1, more: str = "") -> Job:
    """A job that starts from `weights`, read from a file; `more` adds sections."""
    path = Path("job.toml")
    path.write_text(
        f"[shape]\npipelines = 1\nranks = {ranks}\nmicro_batches = 2\nchunks = {chunks}\n"
        f'[model]\nweights = "{weights}"\nsequence = 24\n{more}\n'
    )
    return Job.load(path)


def our_logits(job: Job, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [rows, sequence, vocabulary] of the job's stages with their initial weights."""
    carried: torch.Tensor | None = None
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for stage in build_stages(job, range(job.shape.stages), CPU).values():
        assert isinstance(stage, MegatronStage)
        module = stage._part.module.eval()
        if carried is not None:
            module.set_input_tensor(carried)
        with torch.no_grad():
            carried = module(input_ids=tokens, position_ids=positions, attention_mask=None, labels=None)
    assert carried is not None
    return carried
