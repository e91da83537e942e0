"""Sampling on the host for a device that compiles: logits are copied to the host, tokens back, and nothing in between is compiled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import torch

from trencadis.interfaces import SamplingContext

__all__ = ["HostThread"]

Choose = Callable[[torch.Tensor, SamplingContext, np.ndarray], torch.Tensor]
"""Chooses tokens from logits, given whose they are and their rows."""


class HostThread:
    """Runs one call at a time on a thread of its own, and waits for it.

    What records the operations of the device's thread (a graph capture, lazy mode, an emulated device) must not take the host's
    for the device's; torch keeps such modes by thread.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def run(self, choose: Choose, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray) -> torch.Tensor:
        """Return the result of ``choose`` for host copies, on the device of ``logits``.

        Args:
            choose: May overwrite the logits it is given.
            logits: ``[L, V]``; left as they are.
            context: Whose they are.
            rows: Rows of the processor, ``[L]``.
        """
        held = logits.to("cpu", torch.float32, copy=True)
        tokens = attrs.evolve(context, tokens=context.tokens.cpu())
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="trencadis-sampling")
        # Such modes are the caller's thread's, too: what was made in inference mode can be changed in it only.
        mode = torch.inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()
        chosen = self._pool.submit(mode(choose), held, tokens, rows).result()
        return chosen.to(logits.device)
