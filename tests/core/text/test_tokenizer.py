from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.broken_tokenizers import panics_at_a_token, panics_at_texts
from support.tokenizer_zoo import zoo_tokenizer
from trencadis.errors import InvalidRequestError, ModelLoadError
from trencadis.text.model_path import resolve_model_path
from trencadis.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(resolve_model_path("demo"))


def test_demo_is_a_directory_of_this_package_and_other_paths_are_left_alone() -> None:
    assert (DEMO / "tokenizer.json").is_file()
    assert resolve_model_path("/models/tiny") == "/models/tiny"
    assert resolve_model_path("demo-other") == "demo-other"
    assert resolve_model_path("org/name") == "org/name"


@pytest.mark.parametrize(
    ("name", "layers", "vocabulary"),
    [("demo", 5, 4096), ("demo-draft", 2, 4096), ("demo-distilled", 2, 4096), ("demo-parallel", 2, 4097)],
)
def test_each_built_in_name_is_a_model_of_its_own(name: str, layers: int, vocabulary: int) -> None:
    place = Path(resolve_model_path(name))
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    assert (config["num_hidden_layers"], config["vocab_size"]) == (layers, vocabulary)
    assert (place / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()


def test_an_empty_prompt_is_refused_in_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt '' has no tokens"):
        tokenizer.encode("")


def test_special_tokens_may_be_left_out_of_a_prompt() -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    fast = Fast.from_file(str(DEMO / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    begins = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    plain = begins.encode("Hello", add_special_tokens=False)
    assert begins.encode("Hello") == (0, *plain)
    assert 0 not in plain


def test_the_chat_template_is_its_source_and_empty_if_there_is_none(tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    assert tokenizer.chat_template == (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
    bare = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    assert Tokenizer(bare).chat_template == ""
    bare.chat_template = {"default": "{{ messages }}", "tool_use": "x"}
    assert Tokenizer(bare).chat_template == "{{ messages }}"


def test_special_tokens_are_those_of_the_model_and_those_added_as_special(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.decode([0, 1], skip_special_tokens=True) == ""
    assert tokenizer.decode([0, 1]) == "<|end|><|user|>"


def test_token_ids_beyond_the_vocabulary_are_unknown_and_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.knows(4095)
    assert not tokenizer.knows(4096)
    assert tokenizer.decode([99_999]) == ""


def test_the_short_way_for_plain_tokenizer_files_gives_what_auto_tokenizer_gives(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    auto = Tokenizer(AutoTokenizer.from_pretrained(str(DEMO), local_files_only=True))
    text = "<|user|>Alice — 你好 1234\n\n  x<|end|>"
    assert auto.encode(text) == tokenizer.encode(text)
    assert auto.special_token_ids == tokenizer.special_token_ids


def test_a_directory_that_names_a_class_of_its_own_is_left_to_auto_tokenizer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    settings = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "GPT2TokenizerFast"}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("Alice was") == tokenizer.encode("Alice was")


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/no/such/directory", "no such directory"),
        ("./nowhere", "no such directory"),
        ("/no/model.gguf", "does not exist"),
    ],
)
def test_a_path_without_a_tokenizer_is_named(path: str, cause: str) -> None:
    with pytest.raises(ModelLoadError, match=cause) as caught:
        load_tokenizer(path)
    assert path in str(caught.value)


def test_a_broken_tokenizer_file_is_a_model_load_error(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.nightly
def test_loading_the_demo_tokenizer_imports_no_tensor_library() -> None:
    code = (
        "import sys; from trencadis.text import load_tokenizer; load_tokenizer('demo'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_directory_without_tokenizer_files_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer: tokenizer\.json is missing"):
        load_tokenizer(str(tmp_path))


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request_in_words(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(panics_at_texts(tmp_path))
    calls = (
        lambda: tokenizer.encode("Hello"),
        lambda: tokenizer.encode_literally("Hello"),
        lambda: tokenizer.encode_rendered("Hello"),
        lambda: tokenizer.opening,
    )
    for call in calls:
        with pytest.raises(InvalidRequestError, match="the tokenizer failed: PanicException: chunk size"):
            call()


def test_a_panic_while_tokens_are_decoded_is_an_error_in_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("x")
    broken = load_tokenizer(panics_at_a_token(tmp_path, "x"))
    assert broken.decode(tokenizer.encode("Hello")) == "Hello"
    with pytest.raises(InvalidRequestError, match="the tokenizer failed"):
        broken.decode([token])


def test_a_tokenizer_file_at_which_the_library_panics_cannot_be_loaded(tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", _panic)
    with pytest.raises(ModelLoadError, match="cannot be loaded: chunk size must be non-zero"):
        load_tokenizer(str(tmp_path / "demo"))


def _panic(*_: object, **__: object) -> None:
    from tokenizers import pre_tokenizers

    pre_tokenizers.FixedLength(0).pre_tokenize_str("a")


def test_an_interrupt_within_the_tokenizer_goes_through(tokenizer: Tokenizer, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer._hf), "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("Hello")


@pytest.mark.parametrize(
    ("name", "opening"),
    [("llama2", (1,)), ("gpt2", (0,)), ("llama3", (0,)), ("bert", (2,)), ("t5", ()), ("byt5", ()), ("demo", ())],
)
def test_the_special_tokens_with_which_a_prompt_begins_are_known(name: str, opening: tuple[int, ...]) -> None:
    tokenizer = load_tokenizer("demo") if name == "demo" else zoo_tokenizer(name)
    assert tokenizer.opening == opening
