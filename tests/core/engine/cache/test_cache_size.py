from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from trencadis.config.schema import CacheConfig, Config, EngineConfig, ModelConfig
from trencadis.engine.cache.cache_size import longest_sequence, size_cache
from trencadis.errors import ConfigValueError, OutOfMemoryError
from trencadis.records import MemoryReport, ModelFacts

FACTS = ModelFacts(
    architecture="Fake",
    dtype="float32",
    vocab_size=9,
    max_model_len=64,
    eos_token_ids=(),
    num_parameters=0,
    weights_bytes=0,
    kv_bytes_per_token=10,
)


def config(max_model_len: int = 0, max_num_seqs: int = 100, **cache: Any) -> Config:
    return attrs.evolve(
        Config(),
        model=ModelConfig(max_model_len=max_model_len),
        engine=EngineConfig(max_num_seqs=max_num_seqs),
        cache=CacheConfig(**cache),
    )


def size(asked: Config, report: MemoryReport | None = None) -> tuple[int, int]:
    executor: Any = SimpleNamespace(memory=lambda **_: report)
    return size_cache(asked, FACTS, executor, block_size=4)


def free(num_bytes: int, **more: Any) -> MemoryReport:
    return MemoryReport(total_bytes=1 << 30, free_bytes=num_bytes, activation_bytes=0, **more)


def test_the_fraction_of_what_is_left_pays_for_blocks_of_so_many_bytes() -> None:
    """Half of (5000 - 200) bytes, 40 to a block."""
    report = attrs.evolve(free(5000), activation_bytes=200)
    assert size(config(memory_fraction=0.5), report) == (64, 60)


def test_a_cap_and_what_the_backend_itself_says_are_kept() -> None:
    assert size(config(memory_fraction=0.5, max_bytes=800), free(5000))[1] == 20
    assert size(config(memory_fraction=0.5), free(5000, cache_bytes=1200))[1] == 30


def test_without_prefix_caching_there_are_no_more_blocks_than_all_sequences_at_full_length_can_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        assert size(config(max_num_seqs=2, prefix_caching=False), free(8000)) == (64, 32)
    assert "Memory pays for 100; all sequences at full length need 32 (without prefix caching," in caplog.text


def test_with_prefix_caching_memory_decides_and_the_log_says_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        assert size(config(max_num_seqs=2), free(8000)) == (64, 100)
    assert "KV cache: 100 blocks of 4 tokens" in caplog.text
    assert "Memory pays for 100; all sequences at full length need 32 (those beyond keep prefixes)." in caplog.text


def test_where_memory_is_other_processes_too_a_larger_cache_is_bounded_and_what_is_needed_is_not() -> None:
    shared = free(1 << 20, shared_cache_bytes=2000)
    assert size(config(max_num_seqs=2), shared) == (64, 50)
    assert size(config(max_num_seqs=5), shared) == (64, 80)
    assert size(config(max_num_seqs=2, max_bytes=4000), shared) == (64, 100), "who names a number of bytes gets them"


def test_one_block_is_enough_where_one_sequence_needs_no_more() -> None:
    assert size(config(4, max_num_seqs=1, prefix_caching=False), free(8000)) == (4, 1)
    assert size(config(4, max_num_seqs=1, memory_fraction=1.0), free(40)) == (4, 1)
    with pytest.raises(OutOfMemoryError, match=r"pay for 0 blocks of .* Raise cache.max_bytes to at least 40\."):
        size(config(4, max_num_seqs=1, max_bytes=39), free(8000))


def test_a_cache_too_short_for_the_model_cuts_sequences_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        assert size(config(num_blocks=10)) == (40, 10)
    assert "holds 40 tokens: max_model_len is cut from 64" in caplog.text


def test_a_length_that_was_asked_for_is_never_cut() -> None:
    with pytest.raises(ConfigValueError, match=r"max_model_len = 50: the KV cache of 10 blocks holds 40 tokens"):
        size(config(50, num_blocks=10))
    assert size(config(40, num_blocks=10)) == (40, 10)


def test_less_than_two_blocks_are_no_cache() -> None:
    with pytest.raises(OutOfMemoryError, match="pay for 1 block of"):
        size(config(memory_fraction=1.0), free(79))


def test_the_hint_names_what_bounds_the_cache() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"^\[cache\] max_bytes = 10: .*0 blocks.* Raise cache.max_bytes to at least 80\.$"
    ):
        size(config(memory_fraction=1.0, max_bytes=10), free(5000))
    with pytest.raises(OutOfMemoryError, match=r"^0\.00 MiB .*Raise cache.memory_fraction"):
        size(config(memory_fraction=1.0, max_bytes=79), free(60))


def test_nobody_gets_longer_sequences_than_the_model_was_made_for() -> None:
    assert longest_sequence(config(), FACTS) == 64
    assert longest_sequence(config(30), FACTS) == 30
    with pytest.raises(ConfigValueError, match=r"max_model_len = 65: Fake was made for 64 tokens"):
        longest_sequence(config(65), FACTS)
