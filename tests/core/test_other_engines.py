"""The table of other engines' names: what it says about ours is so."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import pytest

from docs_pages.configuration import built_in_settings
from trencadis.cli import chat_command, generate_command, run_command
from trencadis.cli.main import all_commands
from trencadis.other_engines import ENGINES, commands, counterparts, listed, parameters, sections
from trencadis.records import BeamSearchParams, SamplingParams
from trencadis.registry.manager import PluginLoader

ROOT = Path(__file__).parents[2]
ROWS = [row for section in sections() for row in section.rows]
MOST_TYPED = {
    "vllm": "--model --served-model-name --api-key --host --port --tensor-parallel-size --pipeline-parallel-size --dtype "
    "--data-parallel-size --gpu-memory-utilization --max-model-len --max-num-seqs --max-num-batched-tokens --quantization "
    "--kv-cache-dtype --enable-prefix-caching --enable-chunked-prefill --enforce-eager --trust-remote-code --tokenizer --seed "
    "--swap-space --cpu-offload-gb --load-format --download-dir --enable-lora --lora-modules --max-loras --chat-template "
    "--tool-call-parser --enable-auto-tool-choice --reasoning-parser --speculative-config --block-size --revision "
    "--disable-log-requests --kv-transfer-config --distributed-executor-backend --scheduling-policy --compilation-config",
    "sglang": "--model-path --model --tp --tp-size --dp --dp-size --pp-size --ep-size --mem-fraction-static --host --port --api-key "
    "--served-model-name --context-length --dtype --quantization --kv-cache-dtype --trust-remote-code --tokenizer-path --revision "
    "--max-running-requests --max-total-tokens --chunked-prefill-size --max-prefill-tokens --schedule-policy --page-size --device "
    "--schedule-conservativeness --disable-radix-cache --disable-cuda-graph --cuda-graph-max-bs --enable-torch-compile "
    "--attention-backend --random-seed --log-level --chat-template --reasoning-parser --tool-call-parser --enable-metrics "
    "--speculative-algorithm --speculative-draft-model-path --enable-lora --lora-paths --nnodes --node-rank --is-embedding",
    "llama": "-m --model -c --ctx-size -p --prompt -n --n-predict -ngl --n-gpu-layers -t --threads -b --batch-size -ub --ubatch-size "
    "-np --parallel -hf --hf-repo -fa --flash-attn --host --port --api-key -a --alias --temp --repeat-penalty -s -f -sys -cnv -i "
    "-ctk -ctv --mlock --no-mmap -sm -ts -mg -md --draft-max --lora --mmproj --jinja --chat-template --embedding --metrics -cb "
    "--numa --no-warmup --grammar -r",
}


def test_the_flags_that_people_type_are_in_the_table() -> None:
    known = {engine: {flag for row in ROWS for flag in row.flags.get(engine, ())} for engine in ENGINES}
    missing = {engine: set(flags.split()) - known[engine] for engine, flags in MOST_TYPED.items()}
    assert missing == {"vllm": set(), "sglang": set(), "llama": set()}
    assert all(len(flags.split()) >= 30 for flags in MOST_TYPED.values())


def test_every_setting_in_the_table_exists() -> None:
    paths = [path for row in ROWS for path in row.settings]
    assert len(paths) > 60
    assert [path for path in paths if built_in_settings().get(path) is None] == []


def test_every_setting_and_command_that_a_note_names_exists() -> None:
    notes = [row.note for row in ROWS] + [one.note for one in commands().values()]
    codes = [code for note in notes for code in re.findall(r"`([^`]+)`", note)]
    paths = [code.partition(" = ")[0] for code in codes if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+( = .*)?", code)]
    assert len(paths) > 10
    assert [path for path in paths if built_in_settings().get(path) is None] == ["usage.prompt_tokens_details"]
    named = {code.split()[1] for code in codes if code.startswith("trencadis ")}
    assert named <= set(all_commands(PluginLoader.of_installed()).commands)


def test_every_flag_of_ours_in_the_table_is_one_of_the_commands_that_generate() -> None:
    flags = set()
    for module in (generate_command, run_command, chat_command):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        flags |= {flag for action in parser._actions for flag in action.option_strings}
    assert [row.flag for row in ROWS if row.flag and row.flag not in flags] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_no_flag_of_an_engine_has_two_meanings(engine: str) -> None:
    flags = Counter(flag for row in ROWS for flag in row.flags.get(engine, ()))
    assert [flag for flag, count in flags.items() if count > 1] == []
    assert all(re.fullmatch(r"--?[a-zA-Z][\w-]*", flag) for flag in flags)


def test_what_has_no_counterpart_says_why() -> None:
    assert [row.flags for row in ROWS if not row.settings and not row.flag and not row.note] == []
    assert [one.theirs for one in commands().values() if not one.ours and not one.note] == []


def test_pages_that_the_documentation_links_to_exist() -> None:
    links = [link for row in ROWS for link in re.findall(r"\]\(([^)#]+)", row.more)]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_commands_of_ours_in_the_table_exist() -> None:
    known = all_commands(PluginLoader.of_installed()).commands
    assert {one.ours.removeprefix("trencadis ") for one in commands().values() if one.ours} <= set(known)
    assert not set(commands()) & set(known)


def test_other_names_of_parameters_name_ours() -> None:
    ours = {*SamplingParams.__annotations__, *BeamSearchParams.__annotations__}
    assert set(parameters().values()) <= ours
    assert not set(parameters()) & set(SamplingParams.__annotations__)


@pytest.mark.parametrize("name", ["--tensor-parallel-size", "--tensor_parallel_size", "tensor_parallel_size"])
def test_a_name_is_found_however_it_is_spelt(name: str) -> None:
    (found,) = counterparts(name)
    assert found.settings == ("parallel.tensor",)
    assert found.engines("--tensor-parallel-size") == ["vLLM", "SGLang"]


def test_a_value_gets_our_unit() -> None:
    (found,) = counterparts("--swap-space")
    assert [found.scaled(value) for value in ("4", 0.5, "much")] == [4 * 2**30, 2**29, "much"]


@pytest.mark.parametrize(("names", "text"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")])
def test_names_are_listed_as_in_a_sentence(names: list[str], text: str) -> None:
    assert listed(names) == text
