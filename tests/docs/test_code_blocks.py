"""Every block of README and docs is run, loaded or parsed; those that talk to a server talk to a real one.

A block whose first line is a comment with a file name is that file, in the folder in which the other blocks of its page run.
A block of the language ``output`` is what the block before it prints on its standard output, see `support.doc_blocks.shows`.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from support.doc_blocks import BLOCKS, OUTPUT, PAGES, ROOT, STAND_INS, Block, blocks_in, parameters, shows

CHECKED = {"python", "sh", "toml", "json", "jsonl", "yaml", "ini"}
FREE = {"text", OUTPUT}
PACKAGING_TABLES = {"project", "build-system", "tool"}


def talks_to_a_server(block: Block) -> bool:
    return "127.0.0.1:800" in block.text


@pytest.fixture
def ready_text(request: pytest.FixtureRequest) -> Callable[[Block], str]:
    """Gives a block's text, with the addresses of the server if it talks to one; starts it if need be."""

    def text(block: Block) -> str:
        if not talks_to_a_server(block):
            return block.text
        server = request.getfixturevalue("doc_server")
        located: str = server.at_its_ports(block.text)
        return located

    return text


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("block", parameters("python"))
def test_python_block_runs(block: Block, page_folder, python_blocks, ready_text) -> None:
    result = python_blocks.run(ready_text(block), page_folder(block.page))
    assert result.returncode == 0, f"{result.output[-3000:]}\n{result.errors[-3000:]}"
    assert not block.output or shows(block.output, result.output), f"it prints:\n{result.output}"


def test_a_wrong_python_block_would_be_found(python_blocks, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("SIX = 6")
    assert python_blocks.run("from beside import SIX\nassert SIX == 6, __name__\nprint(SIX)", tmp_path).output == "6\n"
    failed = python_blocks.run("SIX = 7\nassert SIX == 6, 'seven'", tmp_path)
    assert failed.returncode == 1
    assert "AssertionError: seven" in failed.errors
    assert python_blocks.run("raise SystemExit(3)", tmp_path).returncode == 3


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("block", parameters("sh"))
def test_commands_of_a_shell_block_work(block: Block, page_folder, shell, ready_text, request) -> None:
    result = shell(ready_text(block), page_folder(block.page))
    assert result.returncode == 0, f"{result.stdout[-1500:]}\n{result.stderr[-1500:]}"
    if block.output:
        printed = result.stdout
        if block.text.startswith("trencadis serve"):  # the server of the pages runs beside them
            printed = request.getfixturevalue("doc_server").printed()
        assert shows(block.output, printed), f"it prints:\n{printed}"


@pytest.mark.representatives(1000)
@pytest.mark.parametrize(
    ("output", "printed", "is_shown"),
    [
        ("12.5 ms  -3 %", "7 s    +81.25 %", True),
        ("a  b\n-  -----\n1  x", "a    b\n---  -----\n300  x", True),
        ("better: fcfs", "better: prefill_first", False),
        ("first\n…\nlast", "first\nsecond\nthird\nlast", True),
        ("first\n…\nlast", "first\nlast", True),
        ("first\nlast", "first\nsecond\nlast", False),
        ("first\n…", "second", False),
        ('{"id":"…","object":"x"}', '{"id":"abc","object":"x"}', True),
        ('{"id":"…","object":"x"}', '{"id":"abc","object":"y"}', False),
        ('{"id":"chat-…","n":1}', '{"id":"chat-5d7","n":2}', True),
    ],
)
def test_an_output_is_what_is_printed_but_for_numbers_and_what_is_left_out(
    output: str, printed: str, is_shown: bool
) -> None:
    assert shows(output, printed) is is_shown


def test_an_output_belongs_to_the_block_right_before_it() -> None:
    run, _, other, _ = blocks_in("```sh\na\n```\n\n```output\nA\n```\n```sh\nb\n```\nsaid\n```output\nB\n```\n", "page")
    assert (run.output, other.output) == ("A\n", "")


def test_every_output_follows_what_prints_it() -> None:
    shown = sum(block.language == OUTPUT for block in BLOCKS)
    assert shown == sum(bool(block.output) for block in BLOCKS if block.language in {"sh", "python"})


STARTS = ("trencadis generate", "trencadis serve", "curl", "trencadis compare", "from trencadis import")
FIRST_COMMANDS = {
    "README.md": STARTS,
    "docs/index.md": STARTS,
    "docs/learn/quickstart.md": (*STARTS[:3], "from trencadis import", "from openai"),
} | {str(page.relative_to(ROOT)): ("",) for page in (ROOT / "docs/gallery").glob("*.md") if page.stem != "index"}


def test_what_a_newcomer_types_first_has_its_output_below_it() -> None:
    for page, starts in FIRST_COMMANDS.items():
        blocks = [block for block in BLOCKS if block.page == page and block.language in {"sh", "python"}]
        for start in starts:
            first = next(block for block in blocks if block.text.startswith(start))
            assert first.output, f"{page}:{first.line}"


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("block", parameters("toml", others=pytest.mark.slow))
def test_toml_block_is_a_configuration_a_workload_events_drafts_a_device_sheet_or_a_part_of_pyproject(
    block: Block, tmp_path: Path
) -> None:
    from trencadis.registry.startup import load_with_plugins
    from trencadis_tools.simulation import load_drafts
    from trencadis_tools.simulation.events import read_events
    from trencadis_tools.simulation.step_times import read_sheet_file
    from trencadis_tools.workloads.workload_file import read_recipe

    path, tables = tmp_path / "config.toml", tomllib.loads(block.text).keys()
    path.write_text(block.text)
    if tables <= PACKAGING_TABLES:
        return
    if block.page == "docs/do/workloads.md":
        read_recipe(str(path))
    elif "event" in tables:
        assert read_events(path)
    elif block.text.startswith("# drafts.toml"):
        assert load_drafts(str(path))
    elif "flops" in tables:
        assert read_sheet_file(path)
    else:
        load_with_plugins(file=path, environ={})


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("block", parameters("json", "jsonl", "yaml", "ini", others=pytest.mark.slow))
def test_data_block_can_be_read(block: Block) -> None:
    if block.language == "yaml":
        yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
        yaml.safe_load(block.text)
    elif block.language == "ini":
        configparser.ConfigParser(interpolation=None).read_string(block.text)
    else:
        for text in block.text.splitlines() if block.language == "jsonl" else [block.text]:
            json.loads(text)


def test_every_block_has_a_language_that_is_checked() -> None:
    odd = [
        f"{block.page}:{block.line} {block.language!r}"
        for block in BLOCKS
        if block.language not in CHECKED | FREE and not block.language.startswith("{")
    ]
    assert not odd


def test_no_fence_escapes_the_reader() -> None:
    for page in PAGES:
        fences = page.read_text(encoding="utf-8").count("```")
        assert fences == 2 * sum(block.page == str(page.relative_to(ROOT)) for block in BLOCKS), page


def test_readme_sets_up_shows_the_main_job_and_tests() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("pip install -e .\n", "trencadis generate ", 'pip install -e ".[dev]" && pytest'):
        assert command in text
    assert len(text.splitlines()) <= 127, "the README is one screen of truth"


def test_config_of_the_readme_says_what_it_shows(tmp_path: Path) -> None:
    from trencadis.registry.startup import load_with_plugins

    (block,) = [block for block in BLOCKS if block.page == "README.md" and block.language == "toml"]
    path = tmp_path / "serve.toml"
    path.write_text(block.text)
    resolved, _ = load_with_plugins(file=path, environ={})
    assert resolved.config.bucketing.name == "exponential"
    assert resolved.config.backend.components["torch"].layout == "padded"


def test_a_wrong_command_would_be_found(shell, tmp_path: Path) -> None:
    assert "--port" in shell("trencadis serve --prot 8000", tmp_path).stderr
    assert shell("trencadis serve --prot 8000\ntrue", tmp_path).returncode == 2
    assert shell("trencadis serve --server.port 99999", tmp_path).returncode == 2
    assert shell("curl http://127.0.0.1:9/health", tmp_path).returncode != 0


@pytest.mark.nightly
def test_the_store_of_its_page_serves_by_import_path(page_folder) -> None:
    page = "docs/plugins/kv_connector.md"
    (command,) = [
        block.text for block in BLOCKS if block.page == page and "my_package.shelf:" in block.text.splitlines()[0]
    ]
    assert command.startswith("pytest --kv-connector=my_package.shelf:make_shelf,")
    words = [sys.executable, "-m", *command.split(), "-q", "-p", "no:cacheprovider", "-k", "taken_once"]
    run = subprocess.run(words, cwd=page_folder(page), capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def test_every_command_that_pages_show_is_run_or_has_a_stand_in() -> None:
    known = {*STAND_INS, "cat", "cd", "echo", "export", "ls", "mkdir", "sed"}
    first_words = {
        part.split()[0]
        for block in BLOCKS
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
        for part in line.split("#")[0].split("&&")
        if part.strip()
    }
    assert first_words <= known
