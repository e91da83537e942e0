"""Tokenizers that are loaded without transformers, against the same ones as transformers loads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remember_demo import MODELS, shipped_files
from support.broken_tokenizers import panics_at_texts
from support.gguf_writing import write_gguf
from support.tokenizer_zoo import LARGE, SPECIAL_TEXTS, TEXTS, ZOO, over_the_zoo
from trencadis.text import Detokenizer, load_tokenizer, resolve_model_path, vocabulary_of
from trencadis.text import remembered as module
from trencadis.text.remembered import SHIPPED, RememberedTokenizer
from trencadis.text.tokenizer import Tokenizer

DEMO = Path(resolve_model_path("demo"))
INEXACT = frozenset({"t5"})
"""With numbers that are others once they were written down and read."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trencadis" / "tokenizers"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the demo's tokenizer, not quite as the package has it."""
    place = tmp_path / "model"
    place.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, place)
    return place


def twice(place: Path | str) -> tuple[Tokenizer, Tokenizer]:
    """Return a tokenizer as transformers loads it, and as it is remembered."""
    first, second = (load_tokenizer(str(place), remembers=True) for _ in range(2))
    assert not first.is_remembered
    return first, second


def streamed(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=())
    return [*(detokenizer.add([one]) for one in ids), detokenizer.flush()]


def check_same(first: Tokenizer, second: Tokenizer) -> None:
    """Check that two tokenizers are the same in all that engine, server and plugins use of one."""
    for text in (*TEXTS.values(), *SPECIAL_TEXTS.values(), *(f"a {sign}b" for sign in first.control_tokens)):
        for adds in (True, False):
            ids = first.encode(text, add_special_tokens=adds, may_be_empty=True)
            assert second.encode(text, add_special_tokens=adds, may_be_empty=True) == ids, text
            for skips in (True, False):
                decoded = first.decode(ids, skip_special_tokens=skips)
                assert second.decode(ids, skip_special_tokens=skips) == decoded, text
            assert streamed(second, ids) == streamed(first, ids), text
        assert second.encode_literally(text) == first.encode_literally(text), text
    for name in (
        *(
            "vocab_size",
            "special_token_ids",
            "eos_token_id",
            "bos_token_id",
            "opening",
            "next_token",
        ),
        *("chat_template", "special_tokens", "control_tokens", "writes_chats", "byte_table"),
    ):
        assert getattr(second, name) == getattr(first, name), name
    for name, has_tools in (("", False), ("", True), ("tool_use", False), ("rag", False)):
        assert second.find_template(name, has_tools=has_tools) == first.find_template(name, has_tools=has_tools)
    assert (second.byte_fallback and second.byte_fallback.byte_of) == (
        first.byte_fallback and first.byte_fallback.byte_of
    )
    assert second.all_token_bytes() == first.all_token_bytes()
    assert [second.knows(one) for one in range(first.vocab_size + 2)] == [
        first.knows(one) for one in range(first.vocab_size + 2)
    ]
    assert vocabulary_of(second).tokens == vocabulary_of(first).tokens
    assert vocabulary_of(second).fault() == vocabulary_of(first).fault()


@over_the_zoo
def test_what_is_remembered_is_what_transformers_loads(name: str, tmp_path: Path, cache: Path) -> None:
    first, second = twice(ZOO[name].make(tmp_path / name))
    assert second.is_remembered == (not ZOO[name].is_slow and name not in INEXACT)
    assert len([*cache.glob("*")]) == second.is_remembered
    if second.is_remembered:
        check_same(first, second)


@pytest.mark.nightly
def test_a_large_one_is_remembered(tmp_path: Path) -> None:
    first, second = twice(LARGE["gemma_262k"].make(tmp_path / "large"))
    assert second.is_remembered
    check_same(first, second)


def settings(**more: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    return change


def several_templates(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (model / "additional_chat_templates" / "rag.jinja").write_text("rag")


def cuts_and_fills(model: Path) -> None:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    file.write_text(json.dumps(content))


CHANGES = {
    "bos": settings(add_bos_token=True, bos_token="<|user|>"),
    "eos": settings(add_eos_token=True),
    "splits": settings(split_special_tokens=True),
    "splits and adds": settings(split_special_tokens=True, add_bos_token=True, bos_token="<|user|>"),
    "cleans up": settings(clean_up_tokenization_spaces=True, model_max_length=4),
    "class": settings(tokenizer_class="GPT2TokenizerFast", add_prefix_space=True),
    "other class": settings(tokenizer_class="Qwen2Tokenizer", pad_token="<pad>"),
    "extra": settings(extra_special_tokens={"image_token": "<image>"}, pad_token="Alice"),
    "templates": settings(chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]),
    "template files": several_templates,
    "cuts": cuts_and_fills,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_settings_beside_it_change_is_remembered(change: Callable[[Path], None], model: Path) -> None:
    change(model)
    first, second = twice(model)
    assert second.is_remembered
    check_same(first, second)


def test_a_tokenizer_that_the_directory_has_as_it_is_is_not_kept_a_second_time(model: Path, cache: Path) -> None:
    cuts_and_fills(model)
    _, second = twice(model)
    assert second.is_remembered
    assert sum(file.stat().st_size for file in cache.iterdir()) < 2000 < (model / "tokenizer.json").stat().st_size


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_file_is_another_tokenizer(change: Callable[[Path], None], model: Path) -> None:
    before = RememberedTokenizer(model, trust_remote_code=False).key
    change(model)
    assert RememberedTokenizer(model, trust_remote_code=False).key != before
    assert (
        RememberedTokenizer(model, trust_remote_code=True).key
        != RememberedTokenizer(model, trust_remote_code=False).key
    )


def test_weights_are_not_looked_at(model: Path) -> None:
    before = RememberedTokenizer(model, trust_remote_code=False).key
    (model / "model.safetensors").write_bytes(b"weights")
    assert RememberedTokenizer(model, trust_remote_code=False).key == before


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_another_version_of_a_package_proves_it_anew(
    package: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert twice(model)[1].is_remembered
    version = module.importlib.metadata.version
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "9" if name == package else version(name))
    assert not load_tokenizer(str(model), remembers=True).is_remembered


def test_nothing_is_remembered_unless_asked(model: Path, cache: Path) -> None:
    load_tokenizer(str(model))
    assert not cache.exists()
    twice(model)
    assert not load_tokenizer(str(model)).is_remembered


def test_what_is_damaged_is_proven_anew(model: Path, cache: Path) -> None:
    twice(model)
    (file,) = cache.iterdir()
    for content in (b"", b"x" * 100, file.read_bytes()[:-1]):
        file.write_bytes(content)
        assert twice(model)[1].is_remembered


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"x": 1}\n', b"[]\n{}", b"null\n\xff", b"1"])
def test_what_was_kept_and_is_no_tokenizer_is_none(content: bytes, model: Path) -> None:
    one = RememberedTokenizer(model, trust_remote_code=False)
    module.keep(one._place, content, max_bytes=2**20)
    assert one.recall() is None


@pytest.mark.parametrize("name", ["__call__", "_encode_plus", "get_vocab", "apply_chat_template"])
def test_a_class_that_does_more_than_its_rust_part_is_not_remembered(name: str, model: Path) -> None:
    hf = load_tokenizer(str(model))._hf
    one = RememberedTokenizer(model, trust_remote_code=False)
    assert one.proven(hf) is not None
    inherited = getattr(type(hf), name)
    hf.__class__ = type(
        "Own", (type(hf),), {name: lambda *args, **kwargs: inherited(*args, **kwargs), "__module__": "transformers.own"}
    )
    assert one.proven(hf) is None


def test_code_of_a_model_is_not_remembered(model: Path) -> None:
    hf = load_tokenizer(str(model))._hf
    hf.__class__ = type("Own", (type(hf),), {"__module__": "transformers_modules.own"})
    assert RememberedTokenizer(model, trust_remote_code=True).proven(hf) is None


def test_what_differs_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = load_tokenizer(str(model))._hf
    plain = module.PlainTokenizer.__call__
    own = lambda self, text, **way: {"input_ids": plain(self, text, **way)["input_ids"][:5]}  # noqa: E731
    monkeypatch.setattr(module.PlainTokenizer, "__call__", own)
    assert RememberedTokenizer(model, trust_remote_code=False).proven(hf) is None


def test_one_that_panics_is_loaded_by_transformers(tmp_path: Path, cache: Path) -> None:
    twice(panics_at_texts(tmp_path / "model"))
    assert not cache.exists()


@pytest.mark.parametrize("template", [{}, {"tokenizer.chat_template": "plain", "tokenizer.chat_template.rag": "x"}])
def test_a_gguf_files_own_is_remembered(template: dict[str, str], tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata=metadata | template)
    first, second = twice(path)
    assert second.is_remembered
    check_same(first, second)
    other = write_gguf(
        tmp_path / "b.gguf", "llama", metadata=metadata | template | {"tokenizer.ggml.add_bos_token": False}
    )
    assert not load_tokenizer(str(other), remembers=True).is_remembered


def test_the_package_brings_what_is_remembered_of_its_models(cache: Path) -> None:
    assert {file.name: file.read_bytes() for file in SHIPPED.iterdir()} == shipped_files(), (
        "python tools/remember_demo.py"
    )
    for name in MODELS:
        found = load_tokenizer(name, remembers=True)
        assert found.is_remembered
        check_same(load_tokenizer(name), found)
    assert not cache.exists()


def test_a_remembered_one_takes_neither_transformers_nor_torch() -> None:
    code = (
        "import sys; from trencadis.text import load_tokenizer; one = load_tokenizer('demo', remembers=True)\n"
        "assert one.is_remembered and one.decode(one.encode('A man')) == 'A man' and not one.writes_chats\n"
        "one.encode_literally('<|end|>'), one.all_token_bytes(), one.max_bytes_per_token, one.control_tokens\n"
        "print(*sorted({'transformers', 'torch', 'huggingface_hub', 'httpx', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_control_signs_are_spelt_out_for_one_thread_and_read_for_another(model: Path) -> None:
    _, tokenizer = twice(model)
    text = "<|user|>Who?<|end|>" * 20
    read, spelt = tokenizer.encode(text), tokenizer.encode_literally(text)
    assert read != spelt
    wrong: list[object] = []

    def encode(call: Callable[[str], tuple[int, ...]], expected: tuple[int, ...]) -> None:
        wrong.extend(ids for ids in (call(text) for _ in range(300)) if ids != expected)

    jobs = [(tokenizer.encode, read), (tokenizer.encode_literally, spelt)] * 2
    threads = [threading.Thread(target=encode, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
