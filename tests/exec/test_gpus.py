"""The GPU of a place, its health and the processors near it; tests/exec/nvml.py stands for NVML."""

import os
import sys
import threading
from pathlib import Path

import pytest

from recycle import RunError
from recycle.cli.planner import plan_for_training
from recycle.exec.faults.faults import parse_fault
from recycle.exec.gpus import GpuHealth, GpuWatch, gpus_of, own_index, stay_near
from recycle.exec.launch.launcher import train
from recycle.exec.launch.trackers import Observer
from recycle.exec.transport.gloo import Gloo
from tests.exec.nvml import Gpu, Nvml
from tests.exec.runs import job, kinds

GPUS = ["GPU-a", "GPU-b", "GPU-c"]


def test_a_place_keeps_its_gpu_when_numbers_change_and_is_refused_without_it():
    assert [own_index(GPUS, GPUS, place) for place in range(5)] == [0, 1, 2, 0, 1]
    assert own_index(GPUS, ["GPU-a", "GPU-c"], 2) == 1
    for visible in (["GPU-a", "GPU-c"], ["GPU-a", "GPU-x", "GPU-c"], []):
        with pytest.raises(RunError, match="GPU-b, the GPU of local number 1"):
            own_index(GPUS, visible, 1)
    assert own_index([], [], 7) == 7
    assert gpus_of(GPUS, range(2, 4)) == ["GPU-c", "GPU-a"]
    assert gpus_of([], range(2)) == []


def lose(library: Nvml, gpu: Gpu):
    gpu.is_lost = True


def remove(library: Nvml, gpu: Gpu):
    del library.gpus[gpu.uuid]


DEFECTS = {
    "GPU-b is lost: GPU is lost": lose,
    "GPU-b is lost: Not Found": remove,
    "GPU-b has 2 more uncorrected memory errors than at the start of the run": lambda _, gpu: setattr(
        gpu, "uncorrected", 5
    ),
    "GPU-b has 1 more memory rows that wait for a reset to be remapped than at the start of the run": (
        lambda _, gpu: setattr(gpu, "rows", (9, 1, 1, 0))
    ),
    "GPU-b has 1 more memory rows that cannot be remapped than at the start of the run": lambda _, gpu: setattr(
        gpu, "rows", (0, 0, 0, 1)
    ),
    "GPU-b has 1 more NVLinks that are down than at the start of the run": lambda _, gpu: setattr(
        gpu, "links", [1, 0, 0]
    ),
    "GPU-b has reported Xid error 79": lambda library, gpu: library.xids.append((gpu, 79)),
}


@pytest.mark.parametrize("expected", DEFECTS)
def test_a_gpu_is_defective_once_it_is_worse_than_at_the_start(expected):
    spoiled = Gpu("GPU-b", uncorrected=3, links=[1, 1, 0])
    library = Nvml(Gpu("GPU-a"), spoiled)
    health = GpuHealth(["GPU-a", "GPU-b", "GPU-unknown", "GPU-b"], library)
    library.xids.append((spoiled, 31))  # a program's
    assert health.defects() == {}
    DEFECTS[expected](library, spoiled)
    for _ in range(2):
        assert health.defects() == {"GPU-b": expected}


@pytest.fixture
def library(monkeypatch):
    library = Nvml(*map(Gpu, GPUS))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_the_watch_checks_when_asked_and_wakes(library):
    checked = threading.Event()
    watch = GpuWatch({"0.0": ["GPU-a"], "1.0": ["GPU-b", "GPU-c"]}, 60.0, checked.set)
    try:
        assert checked.wait(10)
        checked.clear()
        library.xids.append((library.gpus["GPU-c"], 94))
        watch.check()
        assert watch.is_checking
        assert checked.wait(10)
        assert not watch.is_checking
        assert watch.defect("1.0") == "GPU-c has reported Xid error 94"
        assert watch.defect("0.0") is watch.defect("2.0") is None
    finally:
        watch.close()


@pytest.mark.parametrize("spoil", ["no module", "no function"])
def test_nothing_waits_for_a_watch_that_cannot_check(library, spoil, monkeypatch):
    if spoil == "no module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.delattr(Nvml, "nvmlDeviceGetRemappedRows")
    watch = GpuWatch({"0.0": ["GPU-a"]}, 60.0, lambda: None)
    watch.check()
    for thread in threading.enumerate():
        if thread.name == "gpus":
            thread.join(10)
    assert not watch.is_checking
    assert watch.defect("0.0") is None


def test_a_process_stays_on_the_processors_near_its_gpu(library):
    allowed = os.sched_getaffinity(0)
    last = max(allowed)
    library.gpus["GPU-b"].processors = 1 << last | 2 << last
    library.gpus["GPU-c"].processors = 2 << last  # none of them is allowed here
    seen = []

    def bind():  # in a new thread, with which the affinity ends
        for place in (2, 1):
            stay_near(GPUS, place)
            seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert seen == [allowed, {last}]


class OnGpus(Gloo):
    """Gloo that claims the GPUs of a file."""

    @classmethod
    def gpus(cls) -> list[str]:
        return Path(os.environ["GPUS_OF_TEST"]).read_text().split()


@pytest.mark.process
def test_a_restarted_worker_is_refused_without_its_gpu_and_the_run_goes_on(tmp_path, monkeypatch):
    gpus = tmp_path / "gpus"
    gpus.write_text("GPU-a GPU-b GPU-c GPU-d")
    monkeypatch.setenv("GPUS_OF_TEST", str(gpus))

    class Breaking(Observer):
        def committed(self, line):
            gpus.write_text("GPU-a GPU-b GPU-c")  # the last position is 1.1

    run = train(
        job(2, 2, 2, membership={"transport": f"{__name__}:OnGpus"}),
        tmp_path / "run",
        steps=6,
        faults=[parse_fault("kill:1.1@2"), parse_fault("rejoin:1.1@4")],
        planner=plan_for_training,
        observer=Breaking(),
    )
    assert len(run.losses) == 6
    assert "rejoined" not in kinds(run)
    log = (tmp_path / "run" / "logs" / "1.1.log").read_text().splitlines()
    assert [line for line in log if "GPU-d" in line] == [
        "GPU-d, the GPU of local number 3 since the start of the run, is not visible here any more;"
        " repair it, or drain this worker"
    ]
    assert not any("Traceback" in line for line in log)
