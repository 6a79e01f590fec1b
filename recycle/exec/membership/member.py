"""A worker's side of membership: what it waits for and reports, its heartbeat, and how it learns that a generation has
ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from recycle.errors import RunError
from recycle.exec.device.device_progress import DeviceState
from recycle.exec.members import split_member
from recycle.exec.membership import schema
from recycle.exec.membership.progress import Progress
from recycle.exec.membership.store import Store
from recycle.exec.protocol import (
    GO,
    Commit,
    Copied,
    Evaluated,
    EvaluationReport,
    Formed,
    GenerationRecord,
    Report,
)
from recycle.shape import Worker

INTERRUPT_SECONDS = 0.02
LOOK_SECONDS = 5.0
"""How often who waits for a generation to begin or end looks whether it has missed that: a generation's keys are
deleted once a later one runs."""
FIRST_LOOK_SECONDS = 0.1
"""When who waits for a generation to begin looks first, then after ever longer pauses: it may be one that leaves."""


class GenerationOver(Exception):
    """The generation ended while this worker waited for a decision; not an error."""


class Member:
    """A worker's side of membership.

    Args:
        store: the main thread's client; heartbeat and watch get clones.
        name: of this process, by the position it started in: `k.r`, see members.py.
        heartbeat: seconds between beats.
        interrupt: called from the watch thread while the current generation is over; wakes the main thread. The next
            generation does not begin here before it has returned.
        lost: called with the reason when the store does not answer any more; the process should end then.
        generation: the last one before this worker; a run that is resumed counts on from its earlier ones.
        device: as for `Progress`.

    Attributes:
        worker: of this process, `k.r`.
        over: set while the current generation is over.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        heartbeat: float,
        interrupt: Callable[[], None],
        lost: Callable[[str], None],
        generation: int = 0,
        device: Callable[[], DeviceState] = DeviceState,
    ) -> None:
        self.store, self.name, self.progress = store, name, Progress(device)
        self.worker, _ = split_member(name)
        self._interrupt, self._lost = interrupt, lost
        self._begun = threading.Condition()
        self._generation = self._first = generation
        self.over = threading.Event()
        self._incarnation = 0
        for target, client in ((self._beat, store.clone()), (self._watch, store.clone())):
            threading.Thread(target=self._until_lost, args=(target, client, heartbeat), daemon=True).start()

    def ready(self, incarnation: int) -> None:
        """Start-up of this position's `incarnation`-th process is done."""
        self._incarnation = incarnation
        self.store.set(schema.ReadyKey(self.name, incarnation), True)

    def next_record(self) -> GenerationRecord | None:
        """Wait for the next generation that this worker has a part in and that is not over yet; None when it may leave,
        as it was told to."""
        self.progress.begins("settle")
        self.progress.set_waiting(True)
        looks = FIRST_LOOK_SECONDS
        while True:
            begun = self.store.read(schema.BegunKey()) or 0
            record = self.store.wait(schema.ProposalKey(max(begun, self._generation + 1)), looks)
            looks = min(2 * looks, LOOK_SECONDS)
            if (record is None or self.worker not in record.live) and self._may_leave():
                return None
            if record is None:
                continue
            with self._begun:
                self._generation = record.generation
                self.over.clear()
                self._begun.notify()
            if self.worker in record.live and not self.store.has_all([schema.StopKey(self._generation)]):
                self.progress.set_waiting(False)
                return record

    def _may_leave(self) -> bool:
        return self.store.has_all([schema.LeaveKey(Worker.parse(self.worker), self._incarnation)])

    def acknowledge(self, took_back: bool) -> None:
        """Ready to form the generation; whether this process took back a step, which was not committed, for that."""
        self.store.set(schema.AcknowledgedKey(self._generation, self.name), took_back)

    def has_stale(self) -> None:
        """Live parameters here are not those of the committed iteration; said before this process acknowledges."""
        self.store.set(schema.StaleKey(self._generation), True)

    def is_stale_anywhere(self) -> bool:
        """Whether some process has said so; asked once all have acknowledged."""
        return self.store.has_all([schema.StaleKey(self._generation)])

    def formed(self, error: str = "", expired: bool = False, copied: Sequence[Copied] = ()) -> None:
        """The groups stand and what was to be copied is there, or why not, and whether others did not come in time."""
        self.store.set(schema.FormedKey(self._generation, self.name), Formed(error, expired, list(copied)))

    def has_copied(self, copied: Sequence[Copied]) -> None:
        """What has come so far of that which is copied while the generation runs."""
        self.store.set(schema.CopiedKey(self._generation, self.name), list(copied))

    def permitted(self, what: Literal["form", "run"]) -> bool:
        """Wait until the generation may form or run; False when it is over instead."""
        return self._decided(schema.PermissionKey(self._generation, what)) == GO

    def _decided(self, key: schema.Decision[schema.Content]) -> schema.Content | None:
        """Wait for a decision; None when the generation is over without it.

        The coordinator owns the wait: it ends a generation in which all workers wait for too long.
        """
        self.progress.set_waiting(True)
        value = self.store.wait(key, LOOK_SECONDS)
        while value is None and not self.over.is_set():
            value = self.store.wait(key, LOOK_SECONDS)
        self.progress.set_waiting(False)
        return self.store.read(key) if value is None else value

    def report(self, step: int, report: Report) -> None:
        self.store.set(schema.ReportKey(self._generation, step, self.name), report)

    def decision(self, step: int) -> Commit:
        """Wait for the commit of `step`. Raises GenerationOver when the generation ends without it."""
        commit = self._decided(schema.CommitKey(self._generation, step))
        if not isinstance(commit, Commit):
            raise GenerationOver
        return commit

    def report_evaluation(self, step: int, report: EvaluationReport) -> None:
        self.store.set(schema.EvaluationReportKey(self._generation, step, self.name), report)

    def evaluated(self, step: int) -> Evaluated:
        """Wait for the result of the evaluation after `step`. Raises GenerationOver when the generation ends before."""
        result = self._decided(schema.EvaluatedKey(self._generation, step))
        if not isinstance(result, Evaluated):
            raise GenerationOver
        return result

    def decisions(self) -> Callable[[int], Commit | None]:
        """For another thread: a call that gives the commit of a step of the current generation, None while there is
        none."""
        store = self.store.clone()

        def decided(step: int) -> Commit | None:
            commit = store.read(schema.CommitKey(self._generation, step))
            return commit if isinstance(commit, Commit) else None

        return decided

    def trouble(self, message: str) -> None:
        """The transport broke here."""
        self.store.set(schema.TroubleKey(self._generation), f"worker {self.name}: {message}")

    def cut_off(self, peer: str) -> None:
        """A live connection to `peer` does not answer. Only the first pair of a generation is kept."""
        self.store.compare_set(schema.CutKey(self._generation), None, [self.worker, peer])

    def warn(self, message: str) -> None:
        """Something failed here that training can do without; only the first such message of a run is kept."""
        self.store.compare_set(schema.WarningKey(), None, message)

    def leave_digests(self, digests: dict[int, str]) -> None:
        """The run is over: sha256 of each hosted stage's final state."""
        self.store.set(schema.FinalKey(self.name), digests)

    def _beat(self, store: Store, heartbeat: float) -> None:
        beats = 0
        while True:
            store.set(schema.HeartbeatKey(self.name), self.progress.heartbeat(beats))
            beats += 1
            time.sleep(heartbeat)

    def _watch(self, store: Store, _: float) -> None:
        """Interrupt the main thread when its generation stops, repeatedly until it has left the generation.

        One interrupt is not enough, as the thread may be about to open a connection or to wait on one. The lock keeps
        interrupts out of the next generation.
        """
        watched = self._first
        while True:
            with self._begun:
                while self._generation == watched:
                    self._begun.wait()
                watched = self._generation
            while self._generation == watched and store.wait(schema.StopKey(watched), LOOK_SECONDS) is None:
                pass
            while self._interrupt_in(watched):
                time.sleep(INTERRUPT_SECONDS)

    def _interrupt_in(self, generation: int) -> bool:
        with self._begun:
            if self._generation == generation:
                self.over.set()
                self._interrupt()
            return self._generation <= generation

    def _until_lost(self, target: Callable[[Store, float], None], store: Store, heartbeat: float) -> None:
        try:
            target(store, heartbeat)
        except RunError as error:
            self._lost(str(error))
