"""Attention heads of one rank: which query heads, which KV heads, and the attributes that attention modules read their numbers from.

KV heads a multiple of the ranks   each rank has its own
ranks a multiple of the KV heads   ranks that follow each other have the same one
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from trencadis.errors import ModelLoadError

__all__ = ["Heads", "LocalConfig", "divides", "set_local_heads"]

_QUERY_HEADS: Final = ("num_heads", "num_attention_heads", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS: Final = ("split_size",)
_GROUPS: Final = ("num_key_value_groups", "n_rep")


@attrs.frozen(kw_only=True)
class Heads:
    """The heads of one rank, counted over all ranks.

    Attributes:
        first_query: First query head.
        num_query: How many.
        first_kv: First KV head.
        num_kv: How many.
    """

    first_query: int
    num_query: int
    first_kv: int
    num_kv: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, *, rank: int, size: int, what: str) -> Heads:
        """Return the heads of a rank. Pure.

        Args:
            num_heads: Query heads of a layer.
            num_kv_heads: KV heads of a layer.
            rank: Rank within the group.
            size: Number of ranks of the group.
            what: Names the model in an error.

        Raises:
            ModelLoadError: They cannot be divided over so many ranks.
        """
        if not divides(num_heads, num_kv_heads, size):
            legal = [str(n) for n in range(1, num_heads + 1) if divides(num_heads, num_kv_heads, n)]
            raise ModelLoadError(
                f"[parallel] tensor = {size}: {what} has {num_heads} query heads and {num_kv_heads} KV heads, which do not go over so "
                "many ranks.",
                hint=f"Set [parallel] tensor to one of: {', '.join(legal)}.",
            )
        num_query = num_heads // size
        if num_kv_heads % size == 0:
            num_kv = num_kv_heads // size
            first_kv = rank * num_kv
        else:
            num_kv, first_kv = 1, rank // (size // num_kv_heads)
        return cls(first_query=rank * num_query, num_query=num_query, first_kv=first_kv, num_kv=num_kv)


def divides(num_heads: int, num_kv_heads: int, size: int) -> bool:
    """Return whether heads can be divided over so many ranks. Pure."""
    return num_kv_heads > 0 and num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


class LocalConfig:
    """A model's configuration with other numbers of heads, for modules that read them from there; all else is the model's.

    Args:
        config: The model's. What changes there, such as the attention implementation, changes here.
        local: Other values.
    """

    def __init__(self, config: Any, **local: Any) -> None:
        self.__dict__.update(local, _whole=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_whole"], name)


def set_local_heads(module: Any, heads: Heads, *, num_heads: int, num_kv_heads: int) -> None:
    """Give an attention module the numbers of one rank.

    Args:
        module: Changed.
        heads: Heads of the rank.
        num_heads: Query heads of all ranks.
        num_kv_heads: KV heads of all ranks.
    """
    local = {
        **dict.fromkeys(_QUERY_HEADS, (num_heads, heads.num_query)),
        **dict.fromkeys(_KV_HEADS, (num_kv_heads, heads.num_kv)),
        **dict.fromkeys(_GROUPS, (num_heads // num_kv_heads, heads.num_query // heads.num_kv)),
    }
    for name, (whole, here) in local.items():
        if module.__dict__.get(name) == whole:
            setattr(module, name, here)
    for name in _WIDTHS:
        if name in module.__dict__:
            setattr(module, name, module.__dict__[name] * heads.num_query // num_heads)
    config = getattr(module, "config", None)
    if config is not None:
        found = {name: here for name, (whole, here) in local.items() if getattr(config, name, None) == whole}
        module.config = LocalConfig(config, **found)
