"""A device on the CPU that behaves like a Gaudi as far as a serving engine sees it: it compiles, and needs static shapes.

It has the parts of ``habana_frameworks`` that the backend uses, under their names and with their signatures. Results are exact:
every operation runs in PyTorch on the CPU. What it adds is the bookkeeping of a graph compiler: which runs of operations it has
compiled, what a captured graph consists of, and how much memory graphs and tensors would take.
"""

from trencadis_gaudi.emulated.device import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError
from trencadis_gaudi.emulated.surface import emulated_habana

__all__ = ["EmulatedDevice", "EmulatedDeviceError", "EmulatedMemoryError", "emulated_habana"]
