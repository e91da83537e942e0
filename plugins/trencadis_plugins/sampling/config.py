"""Config tables of the samplers; no torch here, the command line reads them."""

from __future__ import annotations

import attrs

__all__ = ["ORDERS", "StandardConfig"]

ORDERS = ("vllm", "hf", "llamacpp")
"""Orders in which temperature and truncation may be applied; named after the programs that use them."""


@attrs.frozen(kw_only=True)
class StandardConfig:
    """Table ``[sampling.standard]``.

    Attributes:
        order: Of temperature and truncation. ``vllm``: temperature, min-p, top-k, top-p. ``hf``: temperature, top-k,
            top-p, min-p. ``llamacpp``: top-k, top-p, min-p, temperature last.
    """

    order: str = attrs.field(
        default="vllm",
        validator=attrs.validators.in_(ORDERS),
        metadata={"help": "Order of temperature and truncation: vllm, hf or llamacpp.", "unit": ""},
    )
