"""A stand-in for NVML: the functions of `pynvml` that recycle calls, over GPUs that a test breaks.

It is loaded in the place of the real module (`sys.modules`), because the machines of these tests have no GPU.
"""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace


@dataclass
class Gpu:
    uuid: str
    uncorrected: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    links: list[int] = field(default_factory=lambda: [1, 1])
    processors: int = 0b1
    is_lost: bool = False


class Nvml(ModuleType):
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 6, 10, 15
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_DISABLED = 18, 0
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        def __init__(self, value: int):
            super().__init__(value)
            self.value = value

        def __str__(self) -> str:
            return {3: "Not Supported", 6: "Not Found", 10: "Timeout", 15: "GPU is lost"}[self.value]

    def __init__(self, *gpus: Gpu):
        super().__init__("pynvml")
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.xids = []
        self._watched = []

    def nvmlInit(self):
        return

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        if uuid not in self.gpus:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return self.gpus[uuid]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        if gpu.is_lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        assert (kind, counter) == (1, 0)
        return gpu.uncorrected

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        return gpu.rows

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        if link >= len(gpu.links):
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return gpu.links[link]

    def nvmlDeviceGetCpuAffinity(self, gpu: Gpu, words: int) -> list[int]:
        return [gpu.processors >> 64 * word & 2**64 - 1 for word in range(words)]

    def nvmlEventSetCreate(self) -> list[Gpu]:
        return self._watched

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, events: list[Gpu]):
        assert kinds == self.nvmlEventTypeXidCriticalError
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[Gpu], milliseconds: int):
        assert milliseconds == 0
        while self.xids:
            gpu, xid = self.xids.pop(0)
            if gpu in events:
                return SimpleNamespace(device=gpu, eventData=xid)
        raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
