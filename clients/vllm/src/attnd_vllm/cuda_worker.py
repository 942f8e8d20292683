"""The worker class on NVIDIA's GPUs."""

from vllm.v1.worker.gpu_worker import Worker

from .worker import AttndWorker


class AttndCudaWorker(AttndWorker, Worker):
    pass
