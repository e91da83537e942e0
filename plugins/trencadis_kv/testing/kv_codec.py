"""Conformance suite of the noun ``kv_codec``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec

__all__ = ["KVCodecConformance", "payloads"]

_HEADER = bytes(range(128))
_OTHER_HEADER = _HEADER[:52] + bytes(32) + _HEADER[84:]
_ENCRYPTED = 256
"""Added to the flags of a codec that encrypts."""
_GUARD = 64
"""Bytes on both sides of ``out`` that must stay as they are."""


def payloads() -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes: sizes of no element's multiple, noise, floats as of a KV cache, and what compresses well. Pure."""
    noise = random.Random(0)
    for size in (0, 1, 2, 3, 7, 16, 63, 64, 65, 1000, 4096, 65536 + 3):
        yield f"noise of {size} bytes", noise.randbytes(size)
    for size in (1, 5, 256, 65536):
        yield f"{size} zeros", bytes(size)
        yield f"{size} times 255", b"\xff" * size
    rows = np.random.default_rng(0).normal(size=(64, 128))
    for dtype in (np.float16, np.float32, np.float64):
        yield np.dtype(dtype).name, rows.astype(dtype).tobytes()
    yield "not a number", np.full(300, np.nan, np.float32).tobytes()
    yield "runs", b"".join(bytes([value]) * (value % 31) for value in range(256))
    yield "cycle", bytes(range(256)) * 40


class KVCodecConformance:
    """What every KV codec must do; inherit from it, and set ``make``.

    Example::

        class TestDeflate(KVCodecConformance):
            make = Deflate

    Attributes:
        authenticates: An object cannot be changed unnoticed, or put it into another's place; set it to True for a codec that says so.
    """

    authenticates: bool = False

    def make(self) -> KVCodec:
        """Return a codec as every engine of a namespace has it."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourCodec, or a method make(self)")

    # ------------------------------------------------------------------------------------------ there and back

    def test_payloads_come_back_bit_for_bit(self) -> None:
        """From another object of the same codec, as another engine has one."""
        writer, reader = self.make(), self.make()
        for name, payload in payloads():
            assert _decoded(reader, _encoded(writer, payload), len(payload)) == payload, name

    def test_what_was_encoded_is_a_payload_too(self) -> None:
        """A block may hold any bytes, also those that the codec itself writes."""
        codec = self.make()
        for _, payload in payloads():
            once = _encoded(codec, payload)
            assert _decoded(codec, _encoded(codec, once), len(once)) == once

    def test_flags_and_growth_are_small_whole_numbers_and_constant(self) -> None:
        """They are written into headers, and size the staging memory."""
        first, second = self.make(), self.make()
        assert _is_whole(first.flags, 2**16 - 1), f"flags = {first.flags!r}"
        assert _is_whole(first.max_growth_bytes, 65536), f"max_growth_bytes = {first.max_growth_bytes!r}"
        assert (first.flags, first.max_growth_bytes) == (second.flags, second.max_growth_bytes)

    def test_flags_name_this_codec_and_no_other(self) -> None:
        """An engine decodes what has its codec's flags; 0 says that there is nothing to decode."""
        codec = self.make()
        changed = [name for name, payload in payloads() if _encoded(codec, payload) != payload]
        if codec.flags == 0:
            assert not changed, f"flags = 0 say that payloads are kept as they are, and encode() changes {changed[0]}"
        else:
            number = codec.flags % _ENCRYPTED
            is_built_in = type(codec).__module__.partition(".")[0] in ("trencadis", "trencadis_kv")
            assert number >= 128 or is_built_in, (
                f"flags = {codec.flags} hold the number {number}, kept for built-in codecs: take 128 .. 255, and add 256 if it encrypts"
            )

    def test_what_was_encoded_stays_as_it_is(self) -> None:
        """Several objects are on their way to the store at once."""
        codec, cases = self.make(), list(payloads())
        encoded = [codec.encode(memoryview(payload), _HEADER) for _, payload in cases]
        for (name, payload), data in zip(cases, encoded, strict=True):
            assert _decoded(codec, bytes(data), len(payload)) == payload, f"{name}: a later encode() changed it"

    def test_nothing_grows_beyond_the_bound(self) -> None:
        """Noise is what compresses worst."""
        codec = self.make()
        for name, payload in payloads():
            growth = len(_encoded(codec, payload)) - len(payload)
            assert growth <= codec.max_growth_bytes, f"{name}: {growth} bytes more, {codec.max_growth_bytes} are said"

    def test_payloads_and_headers_are_not_changed(self) -> None:
        """The payload may be read-only, or lie in memory that is saved once more."""
        codec = self.make()
        for name, payload in payloads():
            held, header = bytearray(payload), bytearray(_HEADER)
            data = bytes(codec.encode(memoryview(held), bytes(header)))
            stored = bytearray(data)
            codec.decode(memoryview(stored), bytes(header), memoryview(bytearray(len(payload))))
            assert (bytes(held), bytes(header), bytes(stored)) == (payload, _HEADER, data), name

    def test_nothing_is_left_of_earlier_payloads(self) -> None:
        """A call knows nothing of those before it, also of those that failed."""
        codec, fresh = self.make(), self.make()
        cases = list(payloads())
        for _, payload in reversed(cases):
            data = _encoded(codec, payload)
            _refused(codec, data[: len(data) // 2] + b"?", len(payload) + 1)
        for name, payload in cases:
            _encoded(codec, payload)  # the same once more may tempt it to refer to what it has seen
            assert _decoded(fresh, _encoded(codec, payload), len(payload)) == payload, name
            assert _decoded(codec, _encoded(fresh, payload), len(payload)) == payload, name

    def test_one_codec_serves_many_threads(self) -> None:
        """Several threads save and load at once."""
        codec = self.make()
        cases = [payload for _, payload in payloads()] * 4

        def there_and_back(payload: bytes) -> bool:
            return _decoded(codec, _encoded(codec, payload), len(payload)) == payload

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(there_and_back, cases)), "threads disturb each other"

    # -------------------------------------------------------------------------------------- what came from outside

    def test_other_lengths_are_refused(self) -> None:
        """The payload, or what is stored, is cut anywhere, or has something after it."""
        codec = self.make()
        for name, payload in payloads():
            data = _encoded(codec, payload)
            for size in {len(payload) + 1, len(payload) + 8, max(len(payload) - 1, 0), len(payload) // 2}:
                if size != len(payload):
                    assert _refused(codec, data, size), f"{name}: decoded to {size} bytes"
            for cut in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1}:
                if 0 <= cut < len(data):
                    assert _refused(codec, data[:cut], len(payload)), f"{name}: cut to {cut} of {len(data)} bytes"
            assert _refused(codec, data + b"\0", len(payload)), f"{name}: with a byte after it"

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_comes_from_outside_stays_within_out(self, seed: int) -> None:
        """Changed, shuffled or made up: it decodes or is refused, and touches nothing beside."""
        codec, rng = self.make(), random.Random(seed)
        for name, payload in payloads():
            if len(payload) > 5000:
                continue
            for data in _mangled(_encoded(codec, payload), rng):
                was_refused = _refused(codec, data, len(payload))
                assert was_refused or not self.authenticates, f"{name}: a changed object was decoded"

    def test_an_object_in_anothers_place_is_refused(self) -> None:
        """By a codec that authenticates: the header says whose it is."""
        codec = self.make()
        for name, payload in payloads():
            was_refused = _refused(codec, _encoded(codec, payload), len(payload), header=_OTHER_HEADER)
            assert was_refused or not self.authenticates, f"{name}: decoded with another header"

    def test_what_authenticates_reads_no_object_of_another_key(self) -> None:
        """``make_stranger`` returns a codec with another key."""
        codec, stranger = self.make(), self.make_stranger()
        for name, payload in payloads():
            assert _refused(stranger, _encoded(codec, payload), len(payload)), f"{name}: another key reads it"

    def make_stranger(self) -> KVCodec:
        """Return a codec that must not read what ``make`` writes; override it for one with a key, else a test is skipped."""
        if self.authenticates:
            raise NotImplementedError(f"{type(self).__name__} authenticates, so it needs a method make_stranger(self)")
        pytest.skip(f"{type(self).__name__} does not authenticate")


def _is_whole(number: object, most: int) -> bool:
    return type(number) is int and 0 <= number <= most


def _encoded(codec: KVCodec, payload: bytes) -> bytes:
    return bytes(codec.encode(memoryview(payload), _HEADER))


def _decoded(codec: KVCodec, data: bytes, size: int, *, header: bytes = _HEADER) -> bytes:
    """Decode into the middle of a larger piece of memory, and look at what is around."""
    memory = bytearray(b"\xa5" * (size + 2 * _GUARD))
    try:
        codec.decode(memoryview(data), header, memoryview(memory)[_GUARD : _GUARD + size])
    finally:
        around = memory[:_GUARD] + memory[_GUARD + size :]
        assert around == b"\xa5" * (2 * _GUARD), "decode() wrote beyond out"
    return bytes(memory[_GUARD : _GUARD + size])


def _refused(codec: KVCodec, data: bytes, size: int, *, header: bytes = _HEADER) -> bool:
    """Return whether data are refused in the way that the contract says; another error is the codec's fault."""
    try:
        _decoded(codec, data, size, header=header)
    except TransferError as error:
        cause = error.cause
    else:
        return False
    assert cause == TransferCause.CORRUPT, f"the cause is {cause}, not corrupt"
    return True


def _mangled(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Yield what is not the data, though it may look like them: a bit flipped anywhere, parts exchanged, made up."""
    places = {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(8))} if data else set()
    for place in sorted(places):
        yield data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    half = len(data) // 2
    if data[half:] + data[:half] != data:
        yield data[half:] + data[:half]
    for size in {0, 1, 5, len(data)}:
        made_up = rng.randbytes(size)
        if made_up != data:
            yield made_up
