"""The codec suite passes small correct codecs and fails every broken one, each for the right reason."""

from __future__ import annotations

import zlib
from hashlib import blake2b

import pytest

from support.mutants import broken, proofs
from trencadis.errors import TransferError
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.testing.kv_codec import KVCodecConformance, payloads


class Deflate(KVCodec):
    """Correct: compresses, and is longer by a little where it cannot. Each mutant breaks one thing."""

    flags = 200
    max_growth_bytes = 1

    def encode(self, payload, header):
        packed = zlib.compress(payload, 1)
        return b"\1" + packed if len(packed) < len(payload) else b"\0" + payload

    def decode(self, data, header, out):
        plain = self.inflated(data, len(out))
        if len(plain) != len(out):
            raise TransferError("another length", cause="corrupt")
        out[:] = plain

    def inflated(self, data, size):
        if not len(data) or data[0] > 1:
            raise TransferError("no codec of mine", cause="corrupt")
        if not data[0]:
            return data[1:]
        inflate = zlib.decompressobj()
        try:
            plain = inflate.decompress(data[1:], size + 1)
        except zlib.error as error:
            raise TransferError(str(error), cause="corrupt") from error
        if inflate.unused_data or not inflate.eof:
            raise TransferError("not one whole stream", cause="corrupt")
        return plain


class TestDeflate(KVCodecConformance):
    make = Deflate


class Signed(Deflate):
    """Correct, and authenticates."""

    flags = 201
    max_growth_bytes = 33
    key = b"mine"

    def tag(self, header, data):
        return blake2b(header + data, key=self.key, digest_size=32).digest()

    def encode(self, payload, header):
        data = super().encode(payload, header)
        return self.tag(header, data) + data

    def decode(self, data, header, out):
        if self.tag(header, bytes(data[32:])) != data[:32]:
            raise TransferError("not signed by me", cause="corrupt")
        super().decode(data[32:], header, out)


class SignedByAnother(Signed):
    key = b"theirs"


class Authenticated(KVCodecConformance):
    authenticates = True

    def make_stranger(self):
        return SignedByAnother()


class TestSigned(Authenticated):
    make = Signed


class ReturnsItsBuffer(Deflate):
    """What it returned is overwritten by the next call."""

    def __init__(self):
        self.buffer = memoryview(bytearray(1 << 17))

    def encode(self, payload, header):
        data = super().encode(payload, header)
        self.buffer[: len(data)] = data
        return self.buffer[: len(data)]


class WritesIntoThePayload(Deflate):
    def encode(self, payload, header):
        data = super().encode(payload, header)
        if not payload.readonly and len(payload):
            payload[0] ^= 1
        return bytes(data)


class KeepsADictionary(Deflate):
    """Refers to the payload before instead of repeating it."""

    last = b""

    def encode(self, payload, header):
        same, self.last = bytes(payload[:64]) == self.last and len(payload) >= 64, bytes(payload[:64])
        data = super().encode(payload[64:] if same else payload, header)
        return (b"\2" if same else b"\3") + data

    def decode(self, data, header, out):
        if not len(data) or data[0] not in (2, 3):
            raise TransferError("no codec of mine", cause="corrupt")
        if data[0] == 2:
            out[:64] = self.last
            super().decode(data[1:], header, out[64:])
        else:
            super().decode(data[1:], header, out)

    max_growth_bytes = 2


class SharesABuffer(Deflate):
    """One buffer for all threads."""

    def __init__(self):
        self.buffer = bytearray(1 << 17)

    def encode(self, payload, header):
        self.buffer[: len(payload)] = payload
        for _ in range(40):
            zlib.crc32(bytes(50_000))
        return super().encode(memoryview(bytes(self.buffer[: len(payload)])), header)


class IgnoresTheRest(Deflate):
    def inflated(self, data, size):
        if len(data) and data[0] == 1:
            try:
                return zlib.decompressobj().decompress(data[1:], size)
            except zlib.error as error:
                raise TransferError(str(error), cause="corrupt") from error
        return super().inflated(data, size)


class RaisesWhatZlibRaises(Deflate):
    def inflated(self, data, size):
        if len(data) and data[0] == 1:
            return zlib.decompress(data[1:])
        return super().inflated(data, size)


class WritesBeyond(Deflate):
    """As C code does that trusts a length."""

    def decode(self, data, header, out):
        if len(data) and data[0] > 1:
            memory = out.obj
            memory[:4] = b"oops"
        super().decode(data, header, out)


class SaysEvicted(Deflate):
    def decode(self, data, header, out):
        try:
            super().decode(data, header, out)
        except TransferError as error:
            raise TransferError(str(error), cause="evicted") from error


class IgnoresTheHeader(Signed):
    def tag(self, header, data):
        return super().tag(b"", data)


class ChecksHalf(Signed):
    def tag(self, header, data):
        return super().tag(header, data[: len(data) // 2 + 1])


class PublicKey(Signed):
    def tag(self, header, data):
        return blake2b(header + data, digest_size=32).digest()


class PublicStranger(PublicKey):
    """Reads what anybody wrote."""


class Halves(Deflate):
    """Half precision is half the bytes."""

    def encode(self, payload, header):
        return super().encode(payload[: len(payload) // 2], header) + bytes(len(payload) - len(payload) // 2)


MUTANTS = {
    "test_payloads_come_back_bit_for_bit": [Halves],
    "test_what_was_encoded_is_a_payload_too": [
        broken(
            "TrustsTheFirstByte",
            Deflate,
            encode=lambda self, payload, header: (
                payload if bytes(payload[:2]) == b"\x01x" else Deflate.encode(self, payload, header)
            ),
        )
    ],
    "test_flags_and_growth_are_small_whole_numbers_and_constant": [broken("WideFlags", Deflate, flags=2**16)],
    "test_flags_name_this_codec_and_no_other": [
        broken("FlagsOfNothingDone", Deflate, flags=0),
        broken("FlagsOfZstd", Deflate, flags=1),
    ],
    "test_what_was_encoded_stays_as_it_is": [ReturnsItsBuffer],
    "test_nothing_grows_beyond_the_bound": [broken("UnderstatedGrowth", Deflate, max_growth_bytes=0)],
    "test_payloads_and_headers_are_not_changed": [WritesIntoThePayload],
    "test_nothing_is_left_of_earlier_payloads": [KeepsADictionary],
    "test_one_codec_serves_many_threads": [SharesABuffer],
    "test_other_lengths_are_refused": [IgnoresTheRest, RaisesWhatZlibRaises, SaysEvicted],
    "test_whatever_comes_from_outside_stays_within_out": [WritesBeyond],
}

test_suite_fails_what_is_broken, _ = proofs(KVCodecConformance, MUTANTS)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (IgnoresTheHeader, "test_an_object_in_anothers_place_is_refused"),
        (ChecksHalf, "test_whatever_comes_from_outside_stays_within_out"),
        (Deflate, "test_whatever_comes_from_outside_stays_within_out"),
    ],
)
def test_suite_fails_a_codec_that_authenticates_too_little(failures_of, mutant, test):
    assert failures_of(Authenticated, mutant, only=test)


def test_suite_fails_a_codec_whose_key_is_no_secret(failures_of):
    class Public(Authenticated):
        def make_stranger(self):
            return PublicStranger()

    assert failures_of(Public, PublicKey) == {"test_what_authenticates_reads_no_object_of_another_key"}


def test_suite_of_a_codec_that_authenticates_asks_for_a_stranger():
    class Strangerless(KVCodecConformance):
        authenticates = True

    with pytest.raises(NotImplementedError, match="make_stranger"):
        Strangerless().make_stranger()


def test_payloads_are_of_many_kinds_and_the_same_each_time():
    cases = dict(payloads())
    assert cases == dict(payloads())
    assert {len(payload) % 4 for payload in cases.values()} == {0, 1, 2, 3}
    assert b"" in cases.values()
