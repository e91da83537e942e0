from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.factory import configure, open_frontend, open_local_frontend
from trencadis.config import Config
from trencadis.errors import ModelLoadError, UnknownKeyError
from trencadis.registry import Registry


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[model]\npath = "from-file"\ndtype = "float32"\n[engine]\nmax_num_seqs = 3\nseed = 4\n')
    config, _ = configure("from-argument", config_file=file, tables={"engine": {"max_num_seqs": 8}})
    assert (config.model.path, config.model.dtype) == ("from-argument", "float32")
    assert (config.engine.max_num_seqs, config.engine.seed) == (8, 4)


def test_the_model_may_be_given_as_its_whole_table() -> None:
    config, _ = configure({"path": "demo", "max_model_len": 64}, config_file=None, tables={})
    assert (config.model.path, config.model.max_model_len) == ("demo", 64)


@pytest.mark.parametrize("tables", [{"engin": {"max_num_seqs": 8}}, {"engine": {"max_num_seq": 8}}])
def test_a_misspelt_table_or_key_is_named_with_a_suggestion(tables: dict[str, dict[str, int]]) -> None:
    with pytest.raises(UnknownKeyError, match="Did you mean"):
        configure("demo", config_file=None, tables=tables)


def test_a_wrong_tokenizer_path_is_known_before_any_weights_are_read(
    fake_house: Callable[..., tuple[Config, Registry]],
) -> None:
    def refuse() -> None:
        raise AssertionError("the engine was built first")

    config, registry = fake_house(policy=refuse)
    config = attrs.evolve(config, model=attrs.evolve(config.model, tokenizer="/no/such/place"))
    with pytest.raises(ModelLoadError, match="/no/such/place"):
        open_local_frontend(config, registry)


House = Callable[..., tuple[Config, Registry]]


@pytest.mark.parametrize("placement", ["auto", "thread"])
def test_auto_and_thread_are_this_process(fake_house: House, placement: str) -> None:
    config, registry = fake_house()
    config = attrs.evolve(config, engine=attrs.evolve(config.engine, placement=placement))
    frontend = open_frontend(config, registry)
    assert isinstance(frontend.engine, LocalEngineClient)
    frontend.close()


def test_what_only_another_process_needs_is_not_imported_for_this_one() -> None:
    code = (
        "import sys, trencadis.client.llm, trencadis.client.async_llm; print('trencadis_remote.process' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
