from __future__ import annotations

from typing import Any

import pytest

from docs_pages.configuration import built_in_settings
from trencadis import LLM
from trencadis.config import load_config
from trencadis.config.homes import where_it_belongs
from trencadis.errors import UnknownKeyError


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("max_num_seqs", 64, 'Write engine={"max_num_seqs": 64}.'),
        ("dtype", "float16", 'Write model={"path": "...", "dtype": "float16"}.'),
        ("tensor_parallel_size", 2, 'Here it is parallel={"tensor": 2} '),
        (
            "gpu_memory_utilization",
            0.9,
            'Here it is cache={"memory_fraction": 0.9} (a share of the memory that is left',
        ),
        ("enforce_eager", True, 'Here it is backend={"torch": {"compile": "off"}} '),
        ("disable_radix_cache", True, 'Here it is cache={"prefix_caching": False}.'),
        ("swap_space", 4, 'Here it is cache={"swap_bytes": 4294967296} '),
        ("ssl_keyfile", "k", "Here there is none: TLS is the proxy's."),
        ("tokenizer", "x", 'Here it is model={"path": "...", "tokenizer": "x"}.'),
        ("repeat_penalty", 1.1, "Here it is a sampling parameter, SamplingParams(repetition_penalty=1.1)."),
        ("max_num_sequences", 3, 'Did you mean engine={"max_num_seqs": 3}?'),
        ("temperature", 0.5, "It is a sampling parameter: SamplingParams(temperature=0.5)."),
    ],
)
def test_an_argument_of_python_is_answered_with_the_table_it_belongs_to(key: str, value: Any, sentence: str) -> None:
    assert sentence in where_it_belongs(key, value, built_in_settings(), in_python=True)


def test_a_key_in_several_tables_lists_them() -> None:
    said = where_it_belongs("max_draft_tokens", 3, built_in_settings(), in_python=True)
    assert said.startswith("It is a key of several tables.")
    assert 'speculation={"ngram": {"max_draft_tokens": 3}}' in said


def test_a_secret_is_not_repeated() -> None:
    assert "sk-1" not in where_it_belongs("api_key", "sk-1", built_in_settings(), in_python=True)


def test_what_is_like_nothing_is_not_answered() -> None:
    assert where_it_belongs("zebra", 1, built_in_settings(), in_python=True) == ""


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"max_num_seqs": 64}, 'max_num_seqs (from argument): no such key. Write engine={"max_num_seqs": 64}.'),
        ({"engine": {"tensor_parallel_size": 2}}, 'Here it is parallel={"tensor": 2} '),
        ({"engine": {"max_num_seq": 2}}, 'Did you mean "max_num_seqs"?'),
    ],
)
def test_a_tree_of_python_says_so(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        load_config(settings=built_in_settings(), environ={}, overrides=tree)
    assert said in str(caught.value)


def test_a_file_is_answered_in_its_own_form(tmp_path: Any) -> None:
    (tmp_path / "serve.toml").write_text("tensor_parallel_size = 2\n")
    with pytest.raises(UnknownKeyError, match=r"\[parallel\] tensor = 2"):
        load_config(settings=built_in_settings(), environ={}, file=tmp_path / "serve.toml")


def test_llm_says_it() -> None:
    with pytest.raises(UnknownKeyError, match=r'engine=\{"max_num_seqs": 64\}'):
        LLM("demo", max_num_seqs=64)
