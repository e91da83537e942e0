"""KV cache of a simulated device as seen by connectors: its layout and its link to the stores of the run, without bytes."""

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
        stores: Stores of the run.
        block_size: Tokens of a block.
        token_bytes: KV bytes of a token.
        load_timeout_s: Time after which the engine gives a load up, seconds.

    Attributes:
        stores: Stores of the run.
        load_timeout_s: Time after which the engine gives a load up, seconds.
        link: Link of the replica; None until a connector has requested one.
        cost: Cost model of the connector, to which the executor adds step times; None without a connector.
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
        """Layout with one part of the size of all layers."""
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
