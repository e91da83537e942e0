"""State of a policy: copied while the engine serves, written to a flight record, restored into another object."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import cut
from trencadis.interfaces import EvictionPolicy, SchedulingPolicy
from trencadis.interfaces.plain_state import has_plain_state

__all__ = ["PolicyMemory"]

_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, np.int64, np.int32, np.float64, np.bool_})
_SHALLOW: Final = _ATOMS | {tuple}
_WIRING: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_CONTAINERS: Final[dict[type[Any], str]] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
    dict: "dict",
    OrderedDict: "ordered",
}
_MADE_BY: Final = {name: kind for kind, name in _CONTAINERS.items()}


class PolicyMemory:
    """A copy of what one policy remembers. Containers of plain values are copied by C code: 100,000 entries take a millisecond.

    Args:
        policy: Scheduling or eviction.

    Attributes:
        obstacle: Why it cannot be copied, in words; empty: it was.
    """

    def __init__(self, policy: object) -> None:
        self.obstacle = ""
        self._fields: dict[str, Any] = {}
        try:
            self._fields = _fields_of(policy)
        except ContractError as error:
            self.obstacle = str(error)

    def encoded(self, number_of: Callable[[bytes], int]) -> dict[str, Any]:
        """Return it as values of msgpack.

        Args:
            number_of: Returns the number that stands for ``bytes``.
        """
        return {name: _encoded(value, number_of) for name, value in self._fields.items()}

    @staticmethod
    def restore(policy: object, encoded: Mapping[str, Any], bytes_of: Callable[[int], bytes]) -> None:
        """Let a new policy remember what is encoded.

        Args:
            policy: Built by the same configuration.
            encoded: The answer of :meth:`encoded`.
            bytes_of: Returns what a number stands for.

        Raises:
            ContractError: The policy remembers nothing by a name, or something of another kind: the record is of another policy.
        """
        own = _remembered(policy)
        for name, value in encoded.items():
            if name not in own or _is_wiring(own[name]):
                raise ContractError(f"{type(policy).__name__} remembers nothing that is called {cut(name, 80)!r}")
            if isinstance(value, dict) != _is_object(own[name]):
                raise ContractError(f"{type(policy).__name__}.{name} is of another kind in the record")
            if isinstance(value, dict):
                PolicyMemory.restore(own[name], value, bytes_of)
            else:
                object.__setattr__(policy, name, _decoded(value, bytes_of))


def _fields_of(policy: object) -> dict[str, Any]:
    """Return copies of the attributes of a policy, or of an object that one has."""
    kind = type(policy)
    if isinstance(policy, SchedulingPolicy | EvictionPolicy) and not has_plain_state(kind):
        raise ContractError(f"{kind.__name__} does not declare what it remembers (see plain_state)")
    return {
        name: _copied(value, f"{kind.__name__}.{name}", 0)
        for name, value in _remembered(policy).items()
        if not _is_wiring(value)
    }


def _remembered(policy: object) -> dict[str, Any]:
    """Return the attributes of an object, not those of its class."""
    values = dict(getattr(policy, "__dict__", {}))
    for base in type(policy).__mro__:
        slots = getattr(base, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(policy, name):
                values[name] = getattr(policy, name)
    return values


def _is_object(value: object) -> bool:
    """Return whether a value is an object with attributes of its own, in the terms of :func:`_copied`."""
    kind = type(value)
    if kind in _ATOMS or kind is np.ndarray or kind in _CONTAINERS or kind is itertools.count:
        return False
    return not _is_random(value)


def _is_random(value: object) -> bool:
    """Return whether a value draws random numbers; one of numpy's cannot be unless that part of numpy is imported."""
    numbers = sys.modules.get("numpy.random")
    return isinstance(value, random.Random) or (numbers is not None and isinstance(value, numbers.Generator))


@functools.cache
def _bit_generators() -> Mapping[str, Any]:
    kinds = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
    return {kind.__name__: kind for kind in kinds}


def _is_wiring(value: object) -> bool:
    return isinstance(value, _WIRING) or attrs.has(type(value))


def _copied(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is np.ndarray:
        return value.copy()
    if kind in _CONTAINERS:
        if set(map(type, value.values() if isinstance(value, dict) else value)) <= _SHALLOW:
            return copy.copy(value)
        if isinstance(value, dict):
            return kind((key, _copied(item, where, depth + 1)) for key, item in value.items())
        items = (_copied(item, where, depth + 1) for item in value)
        return deque(items, value.maxlen) if isinstance(value, deque) else kind(items)
    if kind is itertools.count:
        return copy.copy(value)
    if _is_random(value):
        return copy.deepcopy(value)
    if depth or isinstance(value, np.generic):
        raise ContractError(f"{where} holds {kind.__name__}, which is not copied")
    return _Fields(_fields_of(value))


class _Fields(dict[str, Any]):
    """Attributes of an object that a policy has."""


def _encoded(value: Any, number_of: Callable[[bytes], int]) -> Any:
    kind = type(value)
    if kind is _Fields:
        return {name: _encoded(item, number_of) for name, item in value.items()}
    if kind is bytes:
        return ["bytes", number_of(value) if value else -1]
    if kind is np.ndarray or value is None:
        return value
    if kind in _ATOMS:
        return value.item() if isinstance(value, np.generic) else value
    if kind is itertools.count:
        return ["count", value.__reduce__()[1][0]]
    if isinstance(value, random.Random):
        version, words, spare = value.getstate()
        return ["random", [version, list(words), spare]]
    if _is_random(value):
        return ["generator", json.dumps(value.bit_generator.state)]  # its numbers have 128 bits, msgpack's 64
    items: Iterable[Any] = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
    encoded: list[Any] = [_CONTAINERS[kind], [_encoded(item, number_of) for item in items]]
    return [*encoded, value.maxlen] if isinstance(value, deque) else encoded


def _decoded(value: Any, bytes_of: Callable[[int], bytes]) -> Any:
    if not isinstance(value, list):
        return value
    tag, content = value[0], value[1]
    if tag == "bytes":
        return b"" if content < 0 else bytes_of(content)
    if tag == "count":
        return itertools.count(content)
    if tag == "random":
        made = random.Random()
        made.setstate((content[0], tuple(content[1]), content[2]))
        return made
    if tag == "generator":
        state = json.loads(content)
        generator = np.random.Generator(_bit_generators()[state["bit_generator"]]())
        generator.bit_generator.state = state
        return generator
    items = [_decoded(item, bytes_of) for item in content]
    if tag in ("dict", "ordered"):
        return _MADE_BY[tag](zip(items[::2], items[1::2], strict=True))
    return deque(items, value[2]) if tag == "deque" else _MADE_BY[tag](items)
