"""Emulation of a Gaudi on the CPU, as seen by a serving engine: it compiles programs and needs static shapes.

It has the parts of ``habana_frameworks`` that the backend uses, with the same names and signatures. Results are exact:
every operation runs in PyTorch on the CPU. In addition it does the bookkeeping of a graph compiler: which sequences of operations are
compiled, the content of captured graphs, and the memory of graphs and tensors.

Importing this package imports only its memory account and errors; the rest needs a PyTorch version that a Gaudi may not have.
"""

from trencadis_gaudi.emulated.device import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError

__all__ = ["EmulatedDevice", "EmulatedDeviceError", "EmulatedMemoryError"]
