"""Samplers without a static form and structured output, on a device that refuses to compile after its warm-up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.backends import gaudi_engines, tiny_models
from support.devices import cpu_only
from trencadis import StructuredOutput
from trencadis.records import FinishReason

WANTED = [
    StructuredOutput.regex("[a-z]{1,6}"),
    StructuredOutput.choice(["yes", "no"]),
    StructuredOutput.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "typical_p": 0.9, "xtc_probability": 0.5},
    {"mirostat_mode": 2, "mirostat_tau": 2.0, "logprobs": 3},
    {"temperature": 0.0, "no_repeat_ngram_size": 2, "bad_words_ids": ((5, 6), (7,))},
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "top_n_sigma": 1.5, "top_k": 20},
    {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "presence_penalty": 0.5},
    *({"structured": one, "temperature": temperature} for one in WANTED for temperature in (0.0, 1.0)),
)


@pytest.fixture
def letters_model(tmp_path: Path) -> Path:
    """A tiny model whose tokens are the ASCII characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = Path(tiny_models.save_model("llama", tmp_path))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda one: (not one.isascii(), one))
    names = ["<pad>", "<bos>", "<eos>", *letters][: tiny_models.VOCAB_SIZE]
    fast = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")}
    PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(str(path))
    return path


@pytest.fixture
def _environment_as_before() -> Iterator[None]:
    """What the interface to the vendor's software sets in the environment is taken back."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@cpu_only
@pytest.mark.slow
@pytest.mark.usefixtures("_environment_as_before")
def test_nothing_is_compiled_and_the_torch_backend_chooses_the_same(
    letters_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaudi_engines, "_KINDS", KINDS)
    texts: dict[str, dict[str, list[int]]] = {}
    for backend, options in (("gaudi", {"emulated_frozen": True}), ("torch", {"device": "cpu"})):
        engine = gaudi_engines.open_engine(letters_model, backend=backend, **options)
        served = gaudi_engines.serve(engine, 5, num_requests=32)
        assert {one.error for one in served.values()} <= {""}
        assert engine.totals.num_failed_steps == engine.totals.num_compilations == engine.totals.num_unprepared == 0
        engine.close()
        # An aborted request ends where it was.
        ended = {name: one for name, one in served.items() if one.finish_reason is not FinishReason.ABORT}
        texts[backend] = {name: one.token_ids.tolist() for name, one in ended.items()}
    assert texts["gaudi"] == texts["torch"]
    assert sum(2 in ids for ids in texts["torch"].values()) > 3
