"""The worker class on CPUs."""

from vllm.v1.worker.cpu_worker import CPUWorker

from .worker import AttndWorker


class AttndCpuWorker(AttndWorker, CPUWorker):
    pass
