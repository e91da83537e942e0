from __future__ import annotations

import json

import pytest

from trencadis.cli.main import main
from trencadis_tools.commands import layout as layout_command

DEVICES = ("layout", "--devices", "8", "--memory", "96GiB")


@pytest.mark.representatives(1000)
@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("96GiB", 96 * 2**30),
        ("96 GB", 96 * 10**9),
        ("96gb", 96 * 10**9),
        ("96G", 96 * 10**9),
        ("96Gi", 96 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("0.5 MiB", 2**19),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("12345", 12345),
        ("12345B", 12345),
    ],
)
def test_memory_is_read_in_powers_of_ten_and_of_two(text, num_bytes):
    assert layout_command._memory(text) == num_bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--devices", "0", "--memory", "96GiB"), "'0' is no whole number from 1 to 1024"),
        (("--devices", "-1", "--memory", "96GiB"), "'-1' is no whole number"),
        (("--devices", "2000", "--memory", "96GiB"), "'2000' is no whole number from 1 to 1024"),
        (("--devices", "eight", "--memory", "96GiB"), "'eight' is no whole number"),
        (("--devices", "8", "--memory", "96 gibs"), "'96 gibs' is no size: write 96GiB"),
        (("--devices", "8", "--memory", "0GB"), "'0GB' is no size"),
        (("--devices", "8", "--memory=-96GB"), "'-96GB' is no size"),
        (("--devices", "8", "--memory", "i"), "'i' is no size"),
        (("--devices", "8"), "--memory"),
    ],
)
def test_flags_that_cannot_be_meant_are_errors(capsys, flags, message):
    assert main(["layout", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model.path", "/nowhere"), "/nowhere: there is no such directory"),
        (("--model.max-model-len", "9999"), "max_model_len = 9999: LlamaForCausalLM was made for 2048 tokens"),
        (("--backend.torch.tensor-plan", "gone.toml"), '[backend.torch] tensor_plan = "gone.toml": it cannot be read'),
    ],
)
def test_settings_that_contradict_the_model_are_errors(capsys, flags, message):
    assert main([*DEVICES, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_demo_model_is_laid_out(capsys):
    assert main([*DEVICES, "--model.dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("LlamaForCausalLM, float32: 17.14 MiB of weights. Devices: 8 of 96.00 GiB;")
    assert "not tensor 3, 5, 6, 7: 8 query heads and 4 KV heads go over 1, 2, 4, 8 ranks." in out
    assert "not pipeline 6, 7, 8: 5 layers make 1 to 5 stages." in out
    assert "not served" not in out
    assert "expert" not in out.partition("\n")[2].partition("\n")[2]
    assert "Proposed: data 8. One device is enough for a copy" in out
    assert out.endswith("Start it with: parallel.data = 8.\n")


def test_little_memory_needs_more_ranks_and_their_executor(capsys):
    assert main(["layout", "--devices", "3", "--memory", "9MB", "--model.max-model-len", "256"]) == 0
    out = capsys.readouterr().out
    assert "Proposed: tensor 2. A copy fits on 2 devices and on no fewer" in out
    assert "; 1 of the devices are left over.\n" in out
    assert out.endswith('Start it with: parallel.tensor = 2, executor.name = "processes".\n')
    assert main(["layout", "--devices", "8", "--memory", "1MB"]) == 0
    assert (
        "Nothing fits. There is most room with tensor 8: 1.15 MiB of weights on a device, 0 tokens"
        in capsys.readouterr().out
    )


def test_json_has_all_of_it(capsys):
    assert main([*DEVICES, "--json", "--engine.max-num-seqs", "4", "--cache.block-size", "32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["num_layers"] == 5
    assert report["limits"]["max_num_seqs"] == 4
    assert report["refused"]["tensor"]["3"] == "8 query heads and 4 KV heads go over 1, 2, 4, 8 ranks"
    one = next(one for one in report["layouts"] if (one["tensor"], one["pipeline"]) == (2, 1))
    assert one["decode"] == {"num_bytes": 11 * 4 * 256 * 2 + 4 * 4096 * 2 + 4 * 8, "num_messages": 13}
    assert one["num_tokens"] % 32 == 0
    assert [one["tensor"] for one in report["layouts"] if one["is_proposed"]] == [1]
