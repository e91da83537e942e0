from __future__ import annotations

import importlib
import types

import attrs
import pytest

from trencadis.config import Config
from trencadis.config.schema import CacheConfig, EngineConfig, ModelConfig
from trencadis.records import ModelFacts
from trencadis_tools.doctor import memory
from trencadis_tools.doctor.memory import check_memory, free_host_bytes

MIB = 2**20
MODEL = ModelFacts(
    architecture="A",
    dtype="bfloat16",
    vocab_size=100,
    max_model_len=1024,
    eos_token_ids=(),
    num_parameters=0,
    weights_bytes=400 * MIB,
    kv_bytes_per_token=MIB // 16,
)


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    """A CUDA device with 1,000 MiB free."""
    cuda = types.SimpleNamespace(is_available=lambda: True, mem_get_info=lambda index: (1000 * MIB, 2000 * MIB))
    torch = types.SimpleNamespace(cuda=cuda)
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: torch if name == "torch" else real(name))


@pytest.fixture
def on_cpu(monkeypatch):
    """Takes the CUDA device away, and leaves so many MiB of the machine free."""

    def leave(num_mib):
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
        monkeypatch.setattr(importlib, "import_module", lambda name: torch)
        monkeypatch.setattr(memory, "free_host_bytes", lambda: num_mib * MIB)

    return leave


def test_what_fits_is_sound_and_says_for_how_many_sequences(found, told):
    check_memory(found, Config(), MODEL)
    # 600 MiB are left, half of them for the cache; one sequence of 1,024 tokens takes 64 MiB.
    assert told() == [
        (
            "ok",
            "about 400 MiB of weights and 300 MiB of KV cache in 1,000 MiB free of the first CUDA device: "
            "4 sequences of 1024 tokens",
        )
    ]


@pytest.mark.parametrize(("prefix_caching", "mib", "num_sequences"), [(False, 96, 3), (True, 300, 9)])
def test_cache_is_larger_than_every_sequence_at_full_length_can_use_only_to_keep_prefixes(
    found, told, prefix_caching, mib, num_sequences
):
    config = Config(
        engine=EngineConfig(max_num_seqs=3),
        model=ModelConfig(max_model_len=17),
        cache=CacheConfig(prefix_caching=prefix_caching),
    )
    check_memory(found, config, attrs.evolve(MODEL, kv_bytes_per_token=MIB))
    # Two blocks of 16 tokens for each of the three.
    assert f"and {mib} MiB of KV cache in" in told()[0][1]
    assert told()[0][1].endswith(f": {num_sequences} sequences of 17 tokens")


def test_on_a_cpu_what_is_stored_narrow_is_assumed_to_be_held_as_float32(found, told, on_cpu):
    on_cpu(1000)
    check_memory(found, Config(), attrs.evolve(MODEL, weights_bytes=100 * MIB))
    # Half of 800 MiB; one sequence takes 128 MiB.
    assert told() == [
        (
            "ok",
            "about 200 MiB of weights and 400 MiB of KV cache in 1,000 MiB free of this machine "
            "if bfloat16 is held as float32, as on most CPUs: 3 sequences of 1024 tokens",
        )
    ]


def test_on_a_cpu_keys_and_values_are_float32_where_weights_are_asked_for_in_bfloat16(found, told, on_cpu):
    on_cpu(1000)
    for stored in ("bfloat16", "float32"):
        kept = MIB // 16 if stored == "bfloat16" else MIB // 8
        model = attrs.evolve(MODEL, dtype=stored, kv_bytes_per_token=kept, weights_bytes=100 * MIB)
        check_memory(found, Config(model=ModelConfig(dtype="bfloat16")), model)
    # Half of what is free; one sequence takes 128 MiB.
    ends = "MiB of KV cache in 1,000 MiB free of this machine: 3 sequences of 1024 tokens"
    assert [message for _, message in told()] == [
        f"about 100 MiB of weights and 450 {ends}",
        f"about 50 MiB of weights and 475 {ends}",
    ]


def test_nothing_is_assumed_on_a_cpu_where_a_dtype_is_asked_for_or_stored_in_full(found, told, on_cpu):
    on_cpu(1000)
    check_memory(found, Config(model=ModelConfig(dtype="bfloat16")), MODEL)
    check_memory(found, Config(), attrs.evolve(MODEL, dtype="float32"))
    assert [message.startswith("about 400 MiB of weights and 300 MiB of KV cache in") for _, message in told()] == [
        True
    ] * 2
    assert not any("if " in message for _, message in told())


def test_weights_that_fit_only_as_they_are_stored_are_doubtful_on_a_cpu(found, told, on_cpu):
    on_cpu(600)
    check_memory(found, Config(), MODEL)
    check_memory(found, Config(), attrs.evolve(MODEL, weights_bytes=700 * MIB))
    assert [kind for kind, _ in told()] == ["warn", "fail"]
    assert "take about 800 MiB if bfloat16 is held as float32" in told()[0][1]


@pytest.mark.parametrize(
    ("config", "weights_mib", "kind", "words"),
    [
        ({}, 1200, "fail", "the weights take about 1,200 MiB, the first CUDA device has 1,000 MiB free"),
        ({"model": ModelConfig(dtype="float32")}, 600, "fail", "about 1,200 MiB"),
        (
            {"cache": CacheConfig(num_blocks=1000, block_size=16)},
            400,
            "fail",
            "num_blocks = 1000 takes about 1,000 MiB, beside the weights 600 MiB are free",
        ),
        ({"cache": CacheConfig(max_bytes=32 * MIB)}, 400, "warn", ""),
        ({"cache": CacheConfig(max_bytes=32 * MIB), "model": ModelConfig(max_model_len=512)}, 400, "ok", ""),
    ],
    ids=["weights", "weights in float32", "blocks", "the longest sequence", "a shorter one"],
)
@pytest.mark.representatives(5)
def test_what_does_not_fit_is_wrong_and_room_for_no_sequence_doubtful(found, told, config, weights_mib, kind, words):
    check_memory(found, Config(**config), attrs.evolve(MODEL, weights_bytes=weights_mib * MIB))
    assert told()[0][0] == kind
    assert words in told()[0][1]


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert free_host_bytes(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1024\n")
    assert free_host_bytes(tmp_path) == 3000 * 1024
    (group / "memory.max").write_text("2048\n")
    assert free_host_bytes(tmp_path) == 1024
