from __future__ import annotations

import sys

import attrs
import numpy as np
import pytest

from trencadis.errors import ConfigValueError, TransferError
from trencadis.records import ModelFacts
from trencadis_kv.codecs.config import AesGcmConfig
from trencadis_kv.codecs.zstd import Zstd, item_bytes_of
from trencadis_kv.testing import KVCodecConformance

zstandard = pytest.importorskip("zstandard")


HEADER = bytes(128)


class TestZstd(KVCodecConformance):
    make = Zstd


class TestZstdOfHalves(KVCodecConformance):
    def make(self):
        return Zstd(level=-1, item_bytes=2)


def _size(values, **options):
    return len(Zstd(**options).encode(memoryview(values.tobytes()), HEADER)) / values.nbytes


@pytest.mark.parametrize(("dtype", "item_bytes", "most"), [(np.float32, 4, 0.9), (np.float16, 2, 0.92)])
def test_shuffled_floats_get_smaller_than_they_would_be_in_order(dtype, item_bytes, most):
    keys = (np.random.default_rng(0).normal(size=(64, 1024)) * 0.5).astype(dtype)
    assert _size(keys, item_bytes=item_bytes) < most
    assert _size(keys, item_bytes=item_bytes) < _size(keys, item_bytes=1)


def test_a_reader_need_not_know_the_size_of_an_element():
    payload = np.arange(1000, dtype=np.float64).tobytes()
    out = bytearray(len(payload))
    for width in (1, 2, 4, 8):
        data = Zstd(item_bytes=width).encode(memoryview(payload), HEADER)
        Zstd(item_bytes=2).decode(memoryview(data), HEADER, memoryview(out))
        assert out == payload


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 40])
def test_a_frame_that_claims_more_than_the_block_has_is_refused_before_memory_is_taken(claimed):
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    if claimed > 1 << 20:
        # magic, descriptor with a content size of 8 bytes in a single segment, then the size
        frame = bytearray(b"\x28\xb5\x2f\xfd" + b"\xe0" + claimed.to_bytes(8, "little") + bytes(16))
    with pytest.raises(TransferError, match=f"a frame of {claimed} bytes, 64 are expected") as error:
        Zstd().decode(memoryview(b"\1" + bytes(frame)), HEADER, memoryview(bytearray(64)))
    assert error.value.cause == "corrupt"


def test_a_frame_without_a_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
    with pytest.raises(TransferError, match="64 are expected"):
        Zstd().decode(memoryview(b"\1" + frame), HEADER, memoryview(bytearray(64)))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8), ("?", 4)])
def test_an_element_is_as_large_as_the_models_dtype_says(dtype, size):
    facts = ModelFacts(
        architecture="Any",
        dtype=dtype,
        vocab_size=1,
        max_model_len=1,
        eos_token_ids=(),
        num_parameters=0,
        weights_bytes=0,
        kv_bytes_per_token=1,
    )
    assert item_bytes_of(facts) == size
    assert item_bytes_of(None) == 4


def test_a_missing_package_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigValueError, match=r'pip install "trencadis\[zstd\]"'):
        Zstd()


def test_the_codec_within_is_a_component_that_the_plan_finds():
    assert attrs.fields(AesGcmConfig).inner.metadata["component"] == "kv_codec"
