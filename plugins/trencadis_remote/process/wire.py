"""Messages as bytes: msgpack, and one pair of hooks for the values that it does not know, which are arrays and errors.

Records are encoded as tables of their fields and decoded by the types that they declare: what a peer sends becomes one of these records
or an error, and never names code to import or to call. A name that a record does not have is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import attrs
import msgspec
import numpy as np

from trencadis import errors
from trencadis.client.engine_client import StepOutputs
from trencadis.errors import InternalError, InvalidRequestError, RequestRefusedError, TrencadisError
from trencadis.records import Request
from trencadis.records.plain import plain_fault
from trencadis_remote.process.messages import ClientMessage, Message, StartMessage, WorkerMessage

__all__ = [
    "as_error",
    "decode_client_message",
    "decode_request",
    "decode_start",
    "decode_worker_message",
    "encode",
    "readable",
]

_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "<f8")}


# ------------------------------------------------------------------------------------------------------------- hooks


class _Fault(msgspec.Struct, array_like=True, gc=False):
    """An error: the name of its class, its whole message, its hint, the field at fault and when to try again, if it knows."""

    kind: str
    message: str
    hint: str
    field: str = ""
    retry_after_s: float = 1.0


def _array_or_plain(value: Any) -> Any:
    if type(value) is np.ndarray and value.ndim == 1:
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return little.dtype.str, little.tobytes()
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return an error, a number of NumPy, or a value of a class derived from a plain one, as plain values.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, TrencadisError):
        return _fault_of(value)
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} cannot be encoded")


def _decoded(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, TrencadisError):
        return _error_of(msgspec.convert(value, _Fault), kind)
    name, data = value
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is no element type of an array")
    return np.frombuffer(data, _DTYPES[name]).astype(_item_type(kind), casting="same_kind", copy=False)


@functools.cache
def _item_type(kind: Any) -> type[np.generic]:
    """Return the element type of an array type such as ``Int32Array``. Pure."""
    item: type[np.generic] = get_args(get_args(kind)[1])[0]
    return item


# ------------------------------------------------------------------------------------------------------------ errors


def as_error(error: BaseException) -> TrencadisError:
    """Return an error as one of :mod:`trencadis.errors`: any other is a broken invariant. Pure."""
    return error if isinstance(error, TrencadisError) else InternalError(f"{type(error).__name__}: {error}")


def _fault_of(error: TrencadisError) -> _Fault:
    """Return an error as the nearest class of :mod:`trencadis.errors`. Pure."""
    return _Fault(
        kind=next(one.__name__ for one in type(error).__mro__ if one.__name__ in errors.__all__),
        message=readable(str(error)),
        hint=readable(error.hint),
        field=readable(error.field) if isinstance(error, InvalidRequestError) else "",
        retry_after_s=error.retry_after_s if isinstance(error, RequestRefusedError) else 1.0,
    )


def _error_of(fault: _Fault, least: type[TrencadisError]) -> TrencadisError:
    """Return the error that :func:`_fault_of` was given; one that is no ``least`` becomes one. Pure."""
    found = getattr(errors, fault.kind, None) if fault.kind in errors.__all__ else None
    kind = found if isinstance(found, type) and issubclass(found, TrencadisError) else InternalError
    error = (kind if issubclass(kind, least) else InvalidRequestError)(fault.message)  # it has the hint already
    error.hint = fault.hint
    if isinstance(error, InvalidRequestError):
        error.field = fault.field
    if isinstance(error, RequestRefusedError):
        error.retry_after_s = fault.retry_after_s
    return error


def readable(text: str) -> str:
    r"""Return a text that UTF-8 can hold: half a surrogate pair is written as ``\ud800``. Pure."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------------------------------------------------- messages


def _decoder(kind: Any) -> Callable[[bytes | msgspec.Raw], Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded).decode


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_encode_outputs: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_array_or_plain).encode
_decode_request: Callable[[bytes | msgspec.Raw], Request] = _decoder(Request)
# Each raises msgspec.DecodeError for what is no such message. They are called for every step, without a function around them.
decode_start: Callable[[bytes], StartMessage] = _decoder(StartMessage)
decode_client_message: Callable[[bytes], ClientMessage] = _decoder(ClientMessage)
decode_worker_message: Callable[[bytes], WorkerMessage] = _decoder(WorkerMessage)


def encode(message: Message | StepOutputs | Request) -> bytes:
    """Return a message, or the request in one, as bytes. Pure.

    Only the outputs of a step may hold arrays, each a field of a record that declares its type.

    Raises:
        InvalidRequestError: A value cannot be encoded, such as a whole number beyond 64 bits. It belongs to the request, or the
            answer, whose message this is; ``field`` names it.
    """
    try:
        return _encode_outputs(message) if type(message) is StepOutputs else _encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise _refusal(message, error) from None


def decode_request(data: bytes | msgspec.Raw) -> Request:
    """Decode the request of an ``AddMessage``. Pure.

    Raises:
        InvalidRequestError: It is none, or holds a value that no client could have given.
    """
    try:
        return _decode_request(data)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the request cannot be read: {error}.") from None


def _refusal(message: Any, error: Exception) -> InvalidRequestError:
    """Return the error for what cannot be encoded, with the place of the value at fault."""
    for field, value in _values(message):
        fault = plain_fault(value)
        if fault is not None:
            where, why = fault
            return InvalidRequestError(f"{field}{where} {why}.", field=field)
    return InvalidRequestError(f"a value cannot be sent to the other process: {error}.")


def _values(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a message or record by the names that its sender knows: those of fields, and of an operator's arguments."""
    is_struct = isinstance(record, msgspec.Struct)
    for name, value in (msgspec.structs.asdict(record) if is_struct else attrs.asdict(record, recurse=False)).items():
        if attrs.has(type(value)):
            yield from _values(value)
        elif name == "arguments":
            yield from value.items()
        else:
            yield name, value
