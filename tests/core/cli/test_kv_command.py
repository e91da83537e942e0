from __future__ import annotations

import json
import os

import pytest

from support.kv.objects import Blocks, contents
from trencadis.cli import main as run_main
from trencadis_kv.store.object_directory import ObjectDirectory


@pytest.fixture
def blocks(tmp_path):
    made = Blocks(tmp_path / "store")
    for number in range(4):
        made.add(number)
    Blocks(tmp_path / "store", namespace="team", model="", described=False).add(1)
    return made


def run(*arguments: object) -> int:
    return run_main(["kv", *map(str, arguments)])


def test_show_lists_what_there_is(blocks, capsys):
    assert run("show", blocks.directory.root) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["namespace", "compatibility", "shard", "model", "blocks", "MiB", "used"]
    assert lines[1].startswith(f"default    {blocks.compat.hex()[:12]}   0.0.0-2  Tiny float32 fedcba987654  4")
    assert lines[2].startswith("team ")
    assert "not described" in lines[2]
    assert lines[-1] == "5 blocks, 0.0 MiB"
    assert run("show", blocks.directory.root, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["namespace"], first["compat"], first["num_objects"]) == ("default", blocks.compat.hex(), 4)
    assert (second["namespace"], second["model"], second["num_objects"]) == ("team", "", 1)


def test_verify_finds_what_is_broken_and_repair_deletes_it(blocks, capsys):
    root = blocks.directory.root
    assert run("verify", root) == 0
    out = capsys.readouterr().out
    assert out.startswith("5 blocks whole, 0 broken, ")
    assert out.endswith("; beside blocks, 1 descriptions of them whole\n")
    assert run("show", root) == 0
    assert "5 blocks, " in capsys.readouterr().out
    broken, foreign, *_ = blocks.payloads
    blocks.damage(broken)
    blocks.damage(foreign, 4)
    assert run("verify", root) == 1
    out = capsys.readouterr().out
    assert f"{broken}: The KV object is broken: the checksum differs." in out
    assert "3 blocks whole, 1 broken, 0 of them deleted, 1 of another format version" in out
    assert run("verify", root, "--repair", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {
        name: report[name] for name in ("num_whole", "num_descriptions", "num_broken", "num_deleted", "num_foreign")
    } == {
        "num_whole": 3,
        "num_descriptions": 1,
        "num_broken": 1,
        "num_deleted": 1,
        "num_foreign": 1,
    }
    assert [one["key"] for one in report["broken"]] == [broken]
    assert not blocks.directory.holds(broken)
    assert blocks.directory.holds(foreign)
    assert run("verify", root) == 0


def test_long_list_of_broken_blocks_is_cut(tmp_path, capsys):
    blocks = Blocks(tmp_path)
    for number in range(25):
        blocks.damage(blocks.add(number))
    assert run("verify", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    assert lines[20] == "… and 5 more; --json lists all"


def test_export_and_import_carry_blocks_over(blocks, tmp_path, capsys):
    file, copy = tmp_path / "out.safetensors", tmp_path / "copy"
    blocks.damage(next(iter(blocks.payloads)))
    assert run("export", blocks.directory.root, file) == 0
    assert "4 blocks exported, 0.0 MiB, 1 broken ones left out" in capsys.readouterr().out
    assert run("import", copy, file, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"num_objects": 4, "num_bytes": 4 * 512, "num_broken": 0}
    before = contents(blocks.directory)
    del before[next(iter(blocks.payloads))]
    assert contents(ObjectDirectory(copy)) == before
    assert run("import", copy, file, "--namespace", "guest") == 0
    assert run("export", copy, file, "--namespace", "guest", "--json") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "STORE"], "trencadis kv export needs a FILE"),
        (["import", "STORE"], "trencadis kv import needs a FILE"),
        (["show", "STORE", "out.safetensors"], "trencadis kv show takes no FILE, got out.safetensors"),
        (["show", "STORE", "--repair"], "--repair goes with verify"),
        (["verify", "STORE", "--namespace", "a"], "--namespace 'a'. It goes with export and import"),
        (["export", "STORE", "f", "--namespace", "../a"], "--namespace '../a'"),
        (["show", "NOWHERE"], "no such directory. Give [kv_connector.filesystem] path"),
        (["export", "NOWHERE", "f"], "no such directory"),
        (["export", "STORE", "missing/f"], "cannot be written: No such file or directory"),
        (["import", "STORE", "missing"], "cannot be read: No such file or directory"),
        (["burn", "STORE"], "burn"),
    ],
)
def test_mistakes_are_said_in_words(blocks, tmp_path, capsys, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"STORE": blocks.directory.root, "NOWHERE": tmp_path / "nowhere"}
    assert run(*(places.get(argument, argument) for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "nowhere").exists()


def test_directory_that_is_not_safe_is_refused_unless_others_are_trusted(blocks, capsys):
    blocks.directory.root.chmod(0o777)
    assert run("show", blocks.directory.root) == 2
    assert "every user may write to it (mode 0777)" in capsys.readouterr().err
    assert run("show", blocks.directory.root, "--trust-others") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_blocks_of_other_users_are_left_out_unless_they_are_trusted(blocks, capsys):
    for file in blocks.directory.root.rglob("*"):
        if file.is_file():
            os.chown(file, 12345, -1)
    assert run("show", blocks.directory.root, "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run("show", blocks.directory.root, "--json", "--trust-others") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
