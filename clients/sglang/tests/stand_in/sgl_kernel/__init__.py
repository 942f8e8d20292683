"""Stands for SGLang's kernels where they are not installed: names that SGLang imports on a CPU
without AMX, and does not call there."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **options):
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return absent
