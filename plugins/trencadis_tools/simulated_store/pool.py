"""The KV cache of a simulated device, as connectors see it: its layout and its way to the stores of the run, but no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trencadis.errors import BackendError
from trencadis.interfaces import KVPool
from trencadis.records import KVLayout, KVPart
from trencadis_tools.simulated_store.store import StoreLink, Stores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trencadis_kv.store.cost import CostModel

__all__ = ["SimulatedPool"]


class SimulatedPool(KVPool):
    """Blocks without bytes.

    Args:
        stores: Of the run.
        block_size: Tokens of a block.
        token_bytes: KV of a token.
        load_timeout_s: After which the engine gives a load up.

    Attributes:
        stores: As given.
        load_timeout_s: As given.
        link: The replica's, once a connector has asked for one.
        cost: Predicts times, of the same connector; the executor adds those of steps.
    """

    def __init__(self, stores: Stores, *, block_size: int, token_bytes: int, load_timeout_s: float) -> None:
        self.stores = stores
        self.load_timeout_s = load_timeout_s
        self.link: StoreLink | None = None
        self.cost: CostModel | None = None
        part = KVPart(layer=0, kind="key_value", num_heads=1, head_dim=token_bytes, dtype="uint8", item_bytes=1)
        self._layout = KVLayout(parts=(part,), block_size=block_size, last_head=1, numerics="simulated")

    @property
    def layout(self) -> KVLayout:
        """One part of the size of all."""
        return self._layout

    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Refuse.

        Raises:
            BackendError: Always.
        """
        raise BackendError("a simulated device has no bytes to copy.")

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Refuse.

        Raises:
            BackendError: Always.
        """
        raise BackendError("a simulated device has no place for bytes.")
