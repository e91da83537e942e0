"""Table of the vendor's fused kernels: module, first release, model parts, and fallback; signatures of those that replace modules.

Kernels are looked up here. A kernel that the installed software lacks gives one warning, in the vendor plugin's words, and the fallback. An
existing kernel is used for a module only if it computes the same (``fused``, ``experts.py`` and ``attention``).

Sources: gaudi-pytorch-bridge 1.19.0 (5a56187), the oldest release that this backend accepts: ``habana_frameworks/torch/hpex`` and, for
operators, ``habana_eager/eager_custom_op_register.cpp`` and ``scripts/hpu_op.yaml``. In use with 1.24.1: vllm-gaudi 091bbadd,
``extension/kernels.py``, ``ops/hpu_layernorm.py``, ``ops/hpu_rotary_embedding.py``, ``ops/hpu_fused_moe.py``. No torch at import: the
command line reads the table.
Shapes: T tokens, B sequences; of rotary embeddings H heads, R rotated dimensions; of experts H hidden size, K experts of a token, I
intermediate size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from trencadis_gaudi.config import GaudiConfig

if TYPE_CHECKING:
    import torch

    from trencadis_gaudi.attention.fused_sdpa import FusedSDPA

__all__ = [
    "EXPERTS",
    "KERNELS",
    "NORM",
    "ROTARY",
    "SDPA",
    "ExpertsKernel",
    "Kernels",
    "Mode",
    "NormKernel",
    "RotaryKernel",
    "VendorKernel",
    "refuse",
]

logger = logging.getLogger("trencadis.gaudi")

Mode = Literal["BLOCKWISE", "PAIRWISE"]


@attrs.frozen(kw_only=True)
class VendorKernel:
    """Row of the table of kernels.

    Attributes:
        name: Name in messages.
        module: Module that contains the kernel.
        paths: Attribute paths of the kernel's parts in the module.
        option: Key of ``[backend.gaudi]`` that switches the kernel off.
        since: First release with the kernel, among those that this backend accepts.
        serves: Model parts that use the kernel.
        fallback: Message about what is used without the kernel.
    """

    name: str
    module: str
    paths: tuple[str, ...]
    option: str
    since: tuple[int, int] = (1, 19)
    serves: str
    fallback: str


SDPA = VendorKernel(
    name="FusedSDPA",
    module="habana_frameworks.torch.hpex.kernels",
    paths=("FusedSDPA.apply",),
    option="fused_sdpa",
    serves="attention of prefills without caps, biases and sinks",
    fallback="Prefills use plain operations.",
)
NORM = VendorKernel(
    name="FusedRMSNorm",
    module="habana_frameworks.torch.hpex.normalization",
    paths=("FusedRMSNorm.apply",),
    option="fused_kernels",
    serves="RMS norms with a weight, or one plus a weight",
    fallback="Norms use plain operations.",
)
ROTARY = VendorKernel(
    name="apply_rotary_pos_emb",
    module="habana_frameworks.torch.hpex.kernels",
    paths=("apply_rotary_pos_emb", "RotaryPosEmbeddingMode"),
    option="fused_kernels",
    serves="rotary embeddings of halves (BLOCKWISE) and of neighbours (PAIRWISE), whole and partial",
    fallback="Rotary embeddings use plain operations.",
)
EXPERTS = VendorKernel(
    name="mixture_of_experts",
    module="torch",
    paths=("ops.hpu.mixture_of_experts.fused_weights",),
    option="fused_kernels",
    serves="experts with gate and up in one matrix, silu, gelu or relu, no bias",
    fallback="Every expert runs on every token.",
)

KERNELS = (SDPA, NORM, ROTARY, EXPERTS)
"""All kernels of the table."""


class NormKernel(Protocol):
    """``FusedRMSNorm.apply`` of ``habana_frameworks.torch.hpex.normalization``, bridge 1.19, up to the last argument in use."""

    def __call__(self, data_in: torch.Tensor, gamma: torch.Tensor, eps: float, /) -> torch.Tensor:
        """Return the norm of an input with three or more dimensions; float32 if the types of input and gamma differ."""
        ...


class RotaryKernel(Protocol):
    """``apply_rotary_pos_emb`` of ``habana_frameworks.torch.hpex.kernels``, bridge 1.19, in one of its modes."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, /) -> torch.Tensor:
        """Return the rotated tensor ``[T, B, H, R]``; float32 if any argument is.

        Args:
            x: Queries or keys, ``[T, B, H, R]``.
            cos: Cosines, ``[T, B, 1, R]``.
            sin: Sines, ``[T, B, 1, R]``.
        """
        ...


class ExpertsKernel(Protocol):
    """``torch.ops.hpu.mixture_of_experts.fused_weights``, bridge 1.19."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        expert_routing_table: torch.Tensor,
        router_weights: torch.Tensor,
        w12: list[torch.Tensor],
        w3: list[torch.Tensor],
        permuted_weights: bool,
        activation: str,
        experts_min: int,
        experts_max: int,
    ) -> torch.Tensor:
        """Return ``[T, H]``.

        Args:
            hidden_states: Hidden states, ``[T, H]``.
            expert_routing_table: Experts of each token, int64 ``[T, K]``.
            router_weights: Routing weights of these experts, ``[T, K]``, in the type of the hidden states.
            w12: Gate and up projection of each expert, gate first: ``[2·I, H]``, or ``[H, 2·I]`` if not permuted.
            w3: Down projection of each expert, ``[H, I]``, or ``[I, H]`` if not permuted.
            permuted_weights: Whether ``w12`` and ``w3`` have the output dimension first.
            activation: Activation function: ``silu``, ``gelu`` or ``relu``.
            experts_min: Index of the first expert.
            experts_max: Index of the last expert.
        """
        ...


class Kernels:
    """Available and enabled kernels of one device, looked up at first use.

    Args:
        config: Table ``[backend.gaudi]``.
        import_module: Imports a module of the device's software by name.
    """

    def __init__(self, config: GaudiConfig, import_module: Callable[[str], Any]) -> None:
        self._config = config
        self._import_module = import_module
        self._found: dict[str, tuple[Any, ...] | None] = {}

    @property
    def attention(self) -> FusedSDPA | None:
        """Fused attention, or None."""
        found: tuple[FusedSDPA] | None = self._find(SDPA)
        return None if found is None else found[0]

    @property
    def norm(self) -> NormKernel | None:
        """RMS norm, or None."""
        found: tuple[NormKernel] | None = self._find(NORM)
        return None if found is None else found[0]

    @property
    def rotary(self) -> Mapping[Mode, RotaryKernel] | None:
        """Rotary embedding in each of its modes, or None."""
        found = self._find(ROTARY)
        if found is None:
            return None
        kernel, modes = found
        return {mode: _rotary(kernel, modes[mode]) for mode in ("BLOCKWISE", "PAIRWISE")}

    @property
    def experts(self) -> ExpertsKernel | None:
        """Mixture of experts, or None."""
        found: tuple[ExpertsKernel] | None = self._find(EXPERTS)
        return None if found is None else found[0]

    def _find(self, kernel: VendorKernel) -> Any:
        if not getattr(self._config, kernel.option):
            return None
        if kernel.name not in self._found:
            self._found[kernel.name] = self._look_up(kernel)
        return self._found[kernel.name]

    def _look_up(self, kernel: VendorKernel) -> tuple[Any, ...] | None:
        """Return the parts of a kernel, or None with a warning."""
        try:
            module = self._import_module(kernel.module)
            return tuple(attrgetter(path)(module) for path in kernel.paths)
        except (ImportError, AttributeError):
            logger.warning("Could not import HPU %s kernel. %s", kernel.name, kernel.fallback)
            return None


def _rotary(kernel: Callable[..., Any], mode: Any) -> RotaryKernel:
    """Return a function that calls a kernel as vllm-gaudi does, without position ids and offset."""

    def rotary(x: Any, cos: Any, sin: Any) -> Any:
        return kernel(x, cos, sin, None, 0, mode)

    return rotary


def refuse(kernel: VendorKernel, why: str) -> None:
    """Log a warning that an existing kernel is not used."""
    logger.warning("HPU %s kernel is not used: %s. %s", kernel.name, why, kernel.fallback)
