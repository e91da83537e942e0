"""A device on the CPU that behaves like a Gaudi as far as a serving engine sees it: it compiles, and needs static shapes.

It has the parts of ``habana_frameworks`` that the backend uses, under their names and with their signatures. Results are exact:
every operation runs in PyTorch on the CPU. What it adds is the bookkeeping of a graph compiler: which runs of operations it has
compiled, what a captured graph consists of, and how much memory graphs and tensors would take.

Importing this package imports its account and its errors alone: the rest needs a PyTorch that a Gaudi may not have.
"""

from trencadis_gaudi.emulated.device import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError

__all__ = ["EmulatedDevice", "EmulatedDeviceError", "EmulatedMemoryError"]
