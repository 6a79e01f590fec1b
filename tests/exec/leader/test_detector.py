"""Deadlines of silent and stuck workers, and the choice between two workers that are cut off."""

import math

import pytest

from recycle import Worker
from recycle.exec.device import Progress
from recycle.exec.leader.detector import FailureDetector, profiled_seconds, select_fenced
from recycle.exec.protocol import Heartbeat
from recycle.job import PricedJob
from tests.exec.runs import job

A, B, C, D = Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)


LIMITS = {"heartbeat": 0.25, "dead_after": 4.0, "hung_after": 4.0, "hung_factor": 10.0, "warm_up": 60.0}


@pytest.fixture
def config():
    return job(2, 2, 2, membership=LIMITS)


class Detector:
    """A detector over one worker whose heartbeats a test writes, at every quarter of a second."""

    def __init__(self, config: PricedJob, is_starting=False):
        self.detector, self._is_starting = FailureDetector(config, runs_script=is_starting), is_starting
        self.now, self.beats = 100.0, 0

    def until_lost(self, text: str | None, most: float) -> tuple[float, str]:
        """Seconds until it counts as lost while its beat says this (None: says nothing new), and why."""
        began = self.now
        while self.now - began < most:
            self.now += 0.25
            if text is not None:
                self.beats += 1
                progress, state, doing, longest = text.split()
                seconds = None if longest == "new" else float(longest)
                self.detector.take({str(A): Heartbeat(self.beats, int(progress), state == "waiting", doing, seconds)})
            lost = self.detector.lost([A], self.now, is_starting=self._is_starting)
            if lost:
                return self.now - began, lost[A]
        return self.now - began, ""


def test_operation_hangs_after_ten_times_its_longest_duration_or_four_seconds(config):
    for longest, seconds in (("0.1", 4.0), ("0.4", 4.0), ("2.0", 20.0), ("new", 60.0)):
        judge = Detector(config)
        judge.until_lost("6 waiting 0F 0.1", 1.0)
        took, why = judge.until_lost(f"7 working 1F {longest}", 100.0)
        assert took == pytest.approx(seconds + 0.25, abs=0.26)
        assert why == f"no progress for {seconds:g} s in 1F"


def test_waiting_worker_never_hangs_and_silent_worker_is_dead(config):
    judge = Detector(config)
    assert judge.until_lost("7 waiting 1F 0.1", 500.0) == (500.0, "")
    took, why = judge.until_lost(None, 100.0)
    assert took == pytest.approx(4.25, abs=0.26)
    assert why == "no heartbeat for 4 s"


def test_heartbeat_of_a_process_does_not_count_for_its_successor(config):
    judge = Detector(config, is_starting=True)
    judge.until_lost("6 working 1F 0.1", 1.0)
    judge.detector.forget([A])
    took, why = judge.until_lost(None, 500.0)  # until `start_deadline`
    assert (took, why) == (500.0, "")
    judge.until_lost("1 working 0F 0.1", 1.0)
    took, why = judge.until_lost("1 working 0F 0.1", 100.0)
    assert took == pytest.approx(3.25, abs=0.26)
    assert why == "no progress for 4 s in 0F"


def test_first_heartbeats_that_arrive_at_once_are_heard(config):
    judge = Detector(config)
    judge.until_lost(None, 3.5)
    for beats in (1, 2):
        judge.detector.take({str(A): Heartbeat(beats, beats, True, "form", 0.1)})
    took, why = judge.until_lost(None, 100.0)
    assert (took, why) == (pytest.approx(4.25, abs=0.26), "no heartbeat for 4 s")


def test_suspension_of_the_leader_is_not_silence(config):
    judge = Detector(config)
    judge.until_lost("7 working 1F 0.1", 3.0)
    judge.now += 1000.0
    assert judge.until_lost(None, 0.75)[1] == ""


def test_one_silent_or_hung_process_of_a_worker_is_enough():
    detector = FailureDetector(job(2, 2, 2, shape={"tensor_parallel": 2}, membership=LIMITS))
    for tick in range(40):
        now = tick / 4
        detector.take(
            {
                "0.0": Heartbeat(tick, 7, True, "1F", 0.1),
                "0.1": Heartbeat(tick, tick, False, "1F", 0.1),
                "0.0t1": Heartbeat(tick, 7, False, "1F", 0.1),
                "0.1t1": Heartbeat(3, 7, True, "1F", 0.1),
            }
        )
        lost = detector.lost([A, B], now)
        assert not lost or now > 4.0
        if len(lost) == 2:
            break
    assert lost == {A: "tensor rank 1: no progress for 4 s in 1F", B: "tensor rank 1: no heartbeat for 4 s"}
    assert [detector.is_silent(worker, now) for worker in (A, B)] == [False, True]
    detector.forget([B])
    assert not detector.is_silent(B, now)


def test_the_profile_counts_where_its_unit_is_known():
    emulated = job(2, 2, 2, model={"seconds_per_unit": 3.0}, membership=LIMITS)
    assert profiled_seconds(emulated) == 6.0
    slow = job(2, 2, 2, model={"seconds_per_unit": 30.0}, membership=LIMITS)
    assert [float(FailureDetector(config).patience(math.nan)) for config in (emulated, slow)] == [60.0, 600.0]
    assert profiled_seconds(job(2, 2, 2, kind="gpt")) == 0.0


def test_the_heartbeat_says_the_longest_time_of_its_kind_lately_without_waits(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("recycle.exec.device.time.monotonic", lambda: clock[0])
    progress = Progress()
    for worked, waited in ((2.0, 50.0), (1.0, 0.0)):
        progress.begin_operation("1F")
        clock[0] += worked
        progress.set_waiting(True)
        clock[0] += waited
        progress.end_operation()
    assert progress.heartbeat(3) == Heartbeat(3, progress.count, False, "1F", 1.8)
    progress.begin_operation("undo", warms_up=False)
    assert progress.heartbeat(4) == Heartbeat(4, progress.count, False, "undo", 1.8)
    progress.begin_operation("1W")
    clock[0] += 9.0
    progress.begin_operation("1W")
    assert progress.heartbeat(5) == Heartbeat(5, progress.count, False, "1W", None)


def test_cut_pair_is_fenced_by_rule():
    assert select_fenced((A, B), [A, B, C, D]) == B
    assert select_fenced((B, A), [A, B, C, D]) == B
    assert select_fenced((A, B), [A, B, C]) == A
    assert select_fenced((A, B), [A, B, D]) == B
    assert select_fenced((A, B), [A, B, C, D], suspects=[A]) == A
    assert select_fenced((A, C), [A, B, D]) == C
    assert select_fenced((A, B), [A, B]) is None


@pytest.mark.parametrize(("silent", "seconds"), [((A,), 4.0), ((A, B), 4.0), ((A, B, C), 8.0), ((A, B, C, D), 8.0)])
def test_the_silence_of_most_workers_is_first_taken_for_a_busy_machine(config, silent, seconds):
    detector, lost = FailureDetector(config), {}
    for quarter in range(400, 500):
        now = quarter / 4
        counts = {str(w): min(quarter, 408) if w in silent else quarter for w in (A, B, C, D)}
        detector.take({name: Heartbeat(count, 1, True, "0F", 0.1) for name, count in counts.items()})
        lost = detector.lost([A, B, C, D], now)
        if lost:
            break
    assert set(lost) == set(silent)
    assert now - 102 == pytest.approx(seconds + 0.25, abs=0.26)


def test_workers_are_not_judged_without_new_heartbeats(config):
    judge = Detector(config)
    judge.until_lost("7 waiting 1F 0.1", 1.0)
    judge.detector.are_due = False
    for _ in range(100):
        judge.now += 0.25
        assert judge.detector.lost([A], judge.now) == {}
    judge.detector.are_due = True
    took, why = judge.until_lost(None, 100.0)
    assert took == pytest.approx(4.25, abs=0.26)
    assert why == "no heartbeat for 4 s"
