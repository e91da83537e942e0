"""``hpu_backend`` of torch.compile, emulated: graphs run as they are, and each one made is a compilation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from trencadis_gaudi.emulated.device import EmulatedDevice

__all__ = ["counting_backend"]


def counting_backend(device: EmulatedDevice) -> Callable[..., Any]:
    """Return a backend for ``torch.compile`` whose signature is that of ``hpu_backend``, bridge 1.19."""
    numbers = itertools.count()

    def hpu_backend(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        # torch.compile asks only for graphs it does not have.
        device.need_recipe(b"compiled" + next(numbers).to_bytes(8, "little"), what="A graph of torch.compile")
        return graph_module.forward

    return hpu_backend
