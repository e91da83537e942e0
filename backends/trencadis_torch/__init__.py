"""The backend ``torch``: CPU and CUDA, on transformers models. The hook alone; torch is imported by the factory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Backend, Component, ComponentContext
from trencadis_torch.config import TorchConfig

__all__ = ["trencadis_backends"]


@hookimpl
def trencadis_backends() -> Iterable[Component]:
    """Yield ``torch``."""
    yield Component(
        name="torch",
        factory=_make_torch,
        config=TorchConfig,
        summary="CPU and CUDA through PyTorch; runs any decoder of transformers with a paged KV cache.",
        interface_version=1,
        stability="stable",
        provides=frozenset({"backend.data_attention", "backend.expert", "backend.pipeline"}),
        preload=_preload,
    )


def _preload(config: TorchConfig) -> None:
    from trencadis_torch.preload import preload

    preload()


def _make_torch(config: TorchConfig, context: ComponentContext) -> Backend:
    from trencadis_torch.environment import set_environment

    set_environment(os.environ, sys.modules)
    from trencadis_torch.backend import TorchBackend

    return TorchBackend(
        config,
        clock=context.clock,
        replica=context.replica,
        num_replicas=context.num_replicas,
        owns_process=context.own_process and context.layout.num_ranks == 1,
    )
