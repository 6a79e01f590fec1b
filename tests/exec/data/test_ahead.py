"""Batches made ahead: by another thread, in the order in which they are asked for, and the same as without."""

from __future__ import annotations

import threading

import pytest
import torch

from recycle import MicroBatch, RunError
from recycle.exec.data.batches import TokenRows
from recycle.exec.data.loading import DEPTH, BatchesAhead
from recycle.exec.worker.interpreter import Interpreter
from recycle.ir.families import one_f_one_b
from recycle.job.shape import Shape, Worker
from tests.exec.drive import build_pipeline, small_job

HERE = threading.main_thread().name


class Recorded(TokenRows):
    """Batches that note who asked for what; iteration 9 cannot be read."""

    digest = "of nothing"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.threads: list[str] = []

    def _rows(self, iteration: int, micro_batch: int) -> torch.Tensor:
        self.asked.append((iteration, micro_batch))
        self.threads.append(threading.current_thread().name)
        if iteration == 9:
            raise RunError("a token is not in the vocabulary")
        return torch.tensor([[iteration, micro_batch, 0]])


def test_batches_are_made_ahead_by_a_thread_and_no_more_than_a_few() -> None:
    batches = Recorded()
    ahead = BatchesAhead(batches, pinned=False)
    keys = [(step, number) for step in (0, 1) for number in (3, 1, 2)]
    ahead.expect(keys)
    for place, key in enumerate(keys):
        tokens, labels = ahead.batch(*key).values()
        assert tokens.tolist() == [list(key)]
        assert labels.tolist() == [[key[1], 0]]
        assert len(batches.asked) <= place + 1 + DEPTH
    assert batches.asked == keys
    assert HERE not in batches.threads


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_worker_computes_on_batches_that_were_made_ahead(recompute: str) -> None:
    of = small_job(1, 1, 3, model={"recompute": recompute, "layers": 1})
    (stage,) = build_pipeline(of)
    batches, threads = stage._data._batches, list[str]()
    rows = batches._rows

    def recorded(iteration: int, micro_batch: int) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return rows(iteration, micro_batch)

    batches._rows = recorded  # type: ignore[method-assign]
    program = one_f_one_b(Shape(1, 1, 3)).program(Worker(0, 0))

    class Nowhere:
        def begin(self, *_: object) -> None:
            return

    interpreter = Interpreter({0: stage}, 1, Nowhere(), lambda _: None)  # type: ignore[arg-type]
    for step in range(2):
        interpreter.begin(program, step)
        for instruction in program[: 2 * 3]:
            interpreter.execute(instruction)
    assert stage.held_micro_batches() == 0
    assert len(threads) >= 2 * 3 * (2 if recompute == "full" else 1)
    assert HERE not in threads
    assert stage.forward(MicroBatch(0, 0), None) is None
