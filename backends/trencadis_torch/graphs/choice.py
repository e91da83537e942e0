"""How a backend runs its buckets: as they are, or with a graph for each.

no graphs               ``BucketMode``
compile = "buckets"     ``CompiledMode``      the forward, compiled by torch.compile, on the CPU
graphs = "buckets"      ``CudaGraphMode``    decodes, captured by CUDA and replayed
"""

from __future__ import annotations

import torch

from trencadis.clock import Clock
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs.mode import BucketMode

__all__ = ["choose_mode"]


def choose_mode(config: TorchConfig, *, device: torch.device, clock: Clock) -> BucketMode:
    """Return the mode that a configuration asks for; of the others nothing is imported.

    Args:
        config: Configuration of the backend, its keys checked against each other.
        device: Device of the model.
        clock: For the duration of a warm-up.

    Raises:
        BackendError: Nothing can be compiled here, or the device does not capture in this way.
    """
    if config.compile != "off":
        from trencadis_torch.graphs.compiled import CompiledMode

        return CompiledMode(config, device=device, clock=clock)
    if config.graphs != "off":
        from trencadis_torch.graphs.cuda_graphs import CudaGraphMode

        return CudaGraphMode(config, device=device)
    return BucketMode(config, compiles_kernels=device.type == "cuda")
