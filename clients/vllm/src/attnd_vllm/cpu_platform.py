"""The platform class on CPUs."""

from vllm.platforms.cpu import CpuPlatform

from .platform import AttndPlatform


class AttndCpuPlatform(AttndPlatform, CpuPlatform):
    attnd_worker = "attnd_vllm.cpu_worker.AttndCpuWorker"
