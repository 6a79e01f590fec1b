"""Checks that a run can work on this machine. Imports torch.

Launchers and agents do not import torch: their fork server calls `main` before it forks any worker.
"""

from __future__ import annotations

import difflib
import fnmatch
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from recycle.errors import JobError, RecycleError, RunError
from recycle.exec.checkpoint.checkpoint import verify_files
from recycle.exec.faults.faults import Fault, parse_fault
from recycle.exec.faults.kinds import KINDS
from recycle.exec.launch.request import FAILED, Findings, check_without_torch
from recycle.exec.launch.trackers import asks_for_gpu
from recycle.exec.model.build import build_module
from recycle.exec.model.providers import Providers
from recycle.exec.model.state.rules import require_optimizers
from recycle.exec.transport.plugin import name_of, transport_named, transport_of
from recycle.exec.worker.specification import REFUSED
from recycle.job import Job
from recycle.job.sections import ShapeSection
from recycle.job.shape import Worker


def check_request(
    job: Job,
    steps: int,
    faults: Sequence[Fault],
    absent: frozenset[Worker],
    providers: Providers | None = None,
    processes: int = 0,
) -> Findings:
    """Raise JobError for a request that cannot work on this machine, before any worker starts; return the findings.

    Args:
        providers: functions for the model, the data and the loss; None for those that the job names.
        processes: number of processes on this machine.
    """
    text_digest = None
    check_without_torch(job, steps, faults, absent)
    check_libraries(job)
    if job.model.kind != "emulated":
        from recycle.exec.data.loading import load_batches, load_evaluation
        from recycle.exec.data.samples import require_samples

        if job.model.weights is not None:
            verify_files(Path(job.model.weights))
        providers = providers or Providers.from_job(job)
        require_optimizers(job)
        if job.train.groups and providers.model is None:
            _require_matches(job, providers)
        if providers.data is None:
            require_samples(job, steps)
        batches = load_batches(job, providers.data)
        batches.require_vocabulary()
        if job.evaluation.every:
            load_evaluation(job, providers.evaluation_data(job)).require_vocabulary()
        text_digest = batches.digest
    transport = transport_of(job)
    transport.require_machine(processes)
    for fault in faults:
        if KINDS[fault.kind].on_link and not transport.paces_links:
            raise JobError(
                f'fault {fault}: this transport does not hold messages back; set [membership] transport = "gloo"'
            )
    gpu = torch.cuda.get_device_name() if asks_for_gpu(job) and torch.cuda.is_available() else ""
    return Findings(text_digest, transport.environment, gpu, transport.gpus(), name_of(transport))


def _require_matches(job: Job, providers: Providers) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of missing packages
        from recycle.exec.model.tensor_ranks import ensure_parallel_state
        from recycle.exec.model.weights import global_names
    ensure_parallel_state(None)
    whole = msgspec.structs.replace(job.without_weights().model, split=None, recompute="none")
    with torch.device("meta"):
        part = build_module(Job(grid=ShapeSection(1, 1, 1), model=whole), 0, 0, providers, is_filled=False)
    names = list(global_names(part, 0))
    for place, group in enumerate(job.train.groups):
        for pattern in group.parameters:
            if not fnmatch.filter(names, pattern):
                raise JobError(
                    f'[train] groups[{place}].parameters: "{pattern}" matches no parameter; names are such as'
                    f" {', '.join(difflib.get_close_matches(pattern, names, 2, 0.0))}"
                )


def check_libraries(job: Job) -> None:
    """Raise JobError for a setting that a transport or megatron-core does not know."""
    transport = job.membership.transport
    if transport != "auto" and ":" not in transport:
        transport_named(transport)
    if job.model.kind != "emulated" and job.model.config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core, whose import takes seconds, warns of missing packages
            from recycle.exec.model.config import transformer_config
        transformer_config(job)


def main(text: str) -> None:
    """Run the checks of `RunRequest.checked_by`; the last printed line holds the findings or the refusal."""
    job, steps, faults, absent, processes = msgspec.json.decode(text, type=tuple[str, int, list[str], list[str], int])
    workers = frozenset(map(Worker.parse, absent))
    try:
        findings = check_request(
            Job.from_toml(job), steps, list(map(parse_fault, faults)), workers, processes=processes
        )
    except RecycleError as error:
        print(f"\n{error}")
        sys.exit(FAILED if isinstance(error, RunError) else REFUSED)
    print(f"\n{msgspec.json.encode(findings).decode()}")
