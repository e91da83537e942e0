"""What a checkpoint's format gives to those who load a model: its weights by the names that the model has for them, one at a time.

files, mapped ─▶ WeightSource ─┬─ weight("model.layers.0.mlp.down_proj.weight") ─▶ HeldWeight [N, K]
                               └─ tensor("model.norm.weight") ─▶ Tensor
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from trencadis_torch.linear.held import FloatWeight, HeldWeight, StackedWeight

__all__ = ["WeightSource"]


class WeightSource(ABC):
    """Weights of one checkpoint, read as they are asked for: nothing is held that the caller does not hold."""

    @property
    @abstractmethod
    def format(self) -> str:
        """The checkpoint's format in words, such as ``GPTQ, 4 bit in groups of 128`` or ``safetensors, bfloat16``."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most weights are stored in as floats; float32 where most are not."""
        return torch.float32

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Return the names of all weights, as a checkpoint without quantisation has them: ``model.layers.0.self_attn.q_proj.weight``."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape, without reading it.

        Raises:
            KeyError: There is no such weight.
        """

    @abstractmethod
    def weight(self, name: str) -> HeldWeight:
        """Return the matrix of a linear layer or of embeddings, ``[N, K]``, in the form nearest to the file's.

        Raises:
            KeyError: There is no such weight.
            ModelLoadError: The file's tensors contradict each other; names them.
        """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Return any weight as floats: as stored where it is stored as floats (a view of the file), else float32.

        Raises:
            KeyError: There is no such weight.
            ModelLoadError: The file's tensors contradict each other; names them.
        """

    def stack(self, name: str) -> StackedWeight:
        """Return the matrices of a layer's experts, which are one weight of three dimensions, in the form nearest to the file's.

        Raises:
            KeyError: There is no such weight.
            ModelLoadError: The file's tensors contradict each other; names them.
        """
        return StackedWeight([FloatWeight(one) for one in self.tensor(name)])

    def let_go(self) -> None:  # noqa: B027 - a source that maps nothing has nothing to let go of
        """Take pages of mapped files out of this process's memory, where files are mapped; what was returned before stays valid."""
