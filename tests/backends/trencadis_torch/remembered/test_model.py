"""Models that were loaded once: a later backend maps them, and computes the same bits without modelling code of transformers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.backends import families, tiny_models
from support.devices import ON_CUDA
from trencadis.caches import cache_directory
from trencadis.clock import SystemClock
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler, BackendConformance
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.linear.decoder import attach, decoder_of, original_of
from trencadis_torch.linear.native import native
from trencadis_torch.loading.self_check import paged_logits
from trencadis_torch.remembered.model import RememberedModel, key_of
from trencadis_torch.remembered.store import ModelStore

pytestmark = pytest.mark.skipif(
    ON_CUDA or native() is None, reason="there is no C++ compiler on this machine, or tests run on another device"
)
TOKENS = [torch.tensor(tiny_models.prompt(length)) for length in (26, 13)]
FORMS = ({}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_dtype": "bfloat16"}, {"dtype": "bfloat16"})


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Models are kept here alone."""
    made = tmp_path / "cache"
    monkeypatch.setattr("trencadis_torch.backend.ModelStore", lambda: ModelStore(made))
    return made


def load(path, *, dtype="auto", **options):
    backend = TorchBackend(TorchConfig(device="cpu", num_threads=1, **options), clock=SystemClock())
    facts = backend.load(ModelSource(path=str(path), dtype=dtype, remember=True), sampler=ArgmaxSampler())
    return backend, facts


def is_recalled(backend):
    return isinstance(backend._model, RememberedModel)


def logits(backend, model=None):
    with torch.inference_mode():
        return torch.cat(paged_logits(model or backend._model, backend._layers, TOKENS, "ragged", backend._kernel))


@pytest.mark.representatives(6)
@pytest.mark.parametrize("kind", families.IN_ONE_CALL)
def test_every_family_in_one_call_is_remembered_with_its_bits(tmp_path, kind):
    path = families.save_family(kind, tmp_path)
    options = FORMS[families.IN_ONE_CALL.index(kind) % len(FORMS)]
    (first, facts), (second, again) = load(path, **options), load(path, **options)
    assert not is_recalled(first)
    assert is_recalled(second)
    assert again == facts
    assert second._replacement == first._replacement
    assert torch.equal(logits(second), logits(first))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "cohere2", "phi3"])
def test_the_modules_are_made_when_something_needs_them_with_the_same_weights(tmp_path, kind):
    path = families.save_family(kind, tmp_path)
    (first, _), (second, _) = load(path), load(path)
    texts = [np.array(tiny_models.prompt(length), np.int32) for length in (5, 30, 1)]
    assert np.array_equal(second.embed(texts), first.embed(texts))
    made, plain = original_of(second._model), first._model
    assert decoder_of(made) is decoder_of(second._model)
    for model in (made, plain):
        attach(model, None)
    assert torch.equal(logits(second, made), logits(first, plain))


class TestRecalled(BackendConformance):
    """All that a backend does, of a model that was recalled: drafts that branch and layers that wait are among it."""

    @pytest.fixture(autouse=True)
    def _model(self, model_path, directory):
        self.path = model_path("gemma3")
        self.source = ModelSource(path=str(self.path), remember=True)
        load(self.path)
        (self.key,) = directory.iterdir()
        self.used = (self.key / "record").stat().st_ino

    def make(self):
        assert (self.key / "record").stat().st_ino == self.used, "it was made anew"
        return TorchBackend(TorchConfig(device="cpu", num_threads=1), clock=SystemClock())

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


def _change_tensors(place):
    file = place / "tensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _change_record(place):
    file = place / "record"
    file.write_bytes(file.read_bytes().replace(b'"architecture"', b'"Architecture"'))


def _cut_tensors(place):
    file = place / "tensors"
    file.write_bytes(file.read_bytes()[:-1])


def _name_another_class(place):
    file = place / "record"
    text = file.read_bytes().partition(b"\n")[2].replace(b"FusedNorm", b"Popen")
    file.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def _open_to_others(place):
    place.chmod(0o777)


@pytest.mark.parametrize(
    "damage", [_change_tensors, _change_record, _cut_tensors, _name_another_class, _open_to_others]
)
def test_what_is_damaged_or_not_this_users_alone_is_made_again(model_path, directory, caplog, damage):
    path = model_path("llama")
    first, _ = load(path)
    (place,) = directory.iterdir()
    damage(place)
    again, _ = load(path)
    assert not is_recalled(again)
    assert "cannot be used, and is made again" in caplog.text
    assert torch.equal(logits(again), logits(first))
    assert is_recalled(load(path)[0])


def test_nobody_else_may_read_what_is_kept(model_path, directory):
    load(model_path("llama"))
    (place,) = directory.iterdir()
    assert place.stat().st_mode & 0o77 == 0
    assert all(file.stat().st_mode & 0o77 == 0 for file in place.iterdir())
    assert len(list(place.iterdir())) == 2


def _another_weight(path):
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _another_end(path):
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))


def _another_setting(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


@pytest.mark.parametrize("change", [_another_weight, _another_end, _another_setting])
def test_other_files_are_another_model(tmp_path, change):
    path = tiny_models.save_model("llama", tmp_path)
    first, facts = load(path)
    change(path)
    second, others = load(path)
    assert not is_recalled(second)
    assert others != facts or not torch.equal(logits(second), logits(first))


def test_the_key_is_of_all_that_decides_what_is_held(model_path, tmp_path, monkeypatch):
    source = ModelSource(path=str(model_path("llama")), remember=True)
    moved = shutil.copytree(model_path("llama"), tmp_path / "moved")
    plain = key_of(source, TorchConfig())
    assert key_of(attrs.evolve(source, path=str(moved)), TorchConfig(num_threads=3)) == plain
    others = [
        key_of(source, TorchConfig(quantization="int8")),
        key_of(source, TorchConfig(kv_dtype="bfloat16")),
        key_of(source, TorchConfig(layout="padded")),
        key_of(source, TorchConfig(check_model=False)),
        key_of(attrs.evolve(source, dtype="float32"), TorchConfig()),
    ]
    monkeypatch.setattr("trencadis_torch.remembered.model.cpu_key", lambda: "another")
    others.append(key_of(source, TorchConfig()))
    monkeypatch.setattr("trencadis_torch.remembered.model._own_text", lambda: "another")
    others.append(key_of(source, TorchConfig()))
    monkeypatch.setattr(torch, "__version__", "0.0")
    others.append(key_of(source, TorchConfig()))
    assert len({plain, *others}) == 1 + len(others)
    assert key_of(attrs.evolve(source, remember=False), TorchConfig()) == ""
    assert key_of(attrs.evolve(source, path=str(tmp_path / "nowhere")), TorchConfig()) == ""


def test_files_that_have_changed_since_the_start_are_refused_when_modules_are_needed(tmp_path):
    path = tiny_models.save_model("llama", tmp_path)
    load(path)
    recalled, _ = load(path)
    _another_weight(path)
    with pytest.raises(ModelLoadError, match="its files have changed since this start"):
        recalled.embed([np.ones(3, np.int32)])


def test_a_model_that_runs_layer_by_layer_is_loaded_each_time(model_path, directory, caplog):
    caplog.set_level(logging.INFO)
    load(model_path("gpt2"))
    second, _ = load(model_path("gpt2"))
    assert not is_recalled(second)
    assert "is not remembered: it does not run in one call" in caplog.text
    assert not directory.exists()


def test_what_was_used_longest_ago_goes_when_there_is_no_room(tmp_path, monkeypatch):
    kinds = ("llama", "gemma3", "qwen3")
    paths = {kind: tiny_models.save_model(kind, tmp_path) for kind in kinds}
    made = tmp_path / "few"
    sizes = {}
    for kind in kinds:
        one = tmp_path / "alone" / kind
        monkeypatch.setattr("trencadis_torch.backend.ModelStore", lambda one=one: ModelStore(one))
        load(paths[kind])
        sizes[kind] = sum(file.stat().st_size for place in one.iterdir() for file in place.iterdir())
    bound = sum(sizes.values()) - min(sizes.values()) // 2
    monkeypatch.setattr("trencadis_torch.backend.ModelStore", lambda: ModelStore(made, max_bytes=bound))
    for kind in kinds[:2]:
        load(paths[kind])
    for place in made.iterdir():
        os.utime(place, (1, 1))
    assert is_recalled(load(paths["llama"])[0])
    load(paths["qwen3"])
    assert [is_recalled(load(paths[kind])[0]) for kind in ("llama", "qwen3")] == [True, True]
    assert len(list(made.iterdir())) == 2
    monkeypatch.setattr("trencadis_torch.backend.ModelStore", lambda: ModelStore(made, max_bytes=100))
    assert not is_recalled(load(paths["gemma3"])[0])
    assert len(list(made.iterdir())) == 2


_CODE = """
import sys
from trencadis import LLM, SamplingParams
with LLM({"path": sys.argv[1], "tokenizer": "none"}, cache={"models": "on"}, backend={"torch": {"device": "cpu"}}) as llm:
    found = llm.generate([[5, 9, 11]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
print(list(found[0].outputs[0].token_ids))
print(sorted({name.split(".")[0] for name in sys.modules} & {"transformers", "scipy", "sympy"} | {"torch._dynamo"} & {*sys.modules}))
"""


def test_a_process_that_recalls_a_model_imports_nothing_of_transformers(model_path, tmp_path):
    kernels = tmp_path / "trencadis" / "native"
    kernels.parent.mkdir()
    kernels.symlink_to(cache_directory("native"))
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _CODE, str(model_path("llama"))],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert outputs[0][0] == outputs[1][0]
    assert "transformers" in outputs[0][1]
    assert outputs[1][1] == "[]"


def test_what_a_killed_process_has_begun_goes_after_a_day(model_path, directory):
    for name, age_s in (("making-old", 90_000), ("making-new", 60)):
        (directory / name).mkdir(parents=True, mode=0o700)
        (directory / name / "tensors").write_bytes(b"...")
        os.utime(directory / name, (time.time() - age_s,) * 2)
    directory.chmod(0o700)
    load(model_path("llama"))
    assert {place.name for place in directory.iterdir() if place.name.startswith("making-")} == {"making-new"}


def test_processes_that_remember_one_model_at_the_same_time_leave_it_whole(model_path, directory):
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda _: load(model_path("llama"))[0], range(4))]
    assert is_recalled(load(model_path("llama"))[0])
    assert len([*directory.iterdir()]) == 1
    assert all(torch.equal(logits(one), logits(made[0])) for one in made)


def test_a_model_of_the_hub_is_remembered_by_its_files_here(model_path, tmp_path, monkeypatch):
    commit = tmp_path / "models--some--model" / "snapshots" / "0123abc"
    shutil.copytree(model_path("llama"), commit)
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    here = ModelSource(path=str(commit), remember=True)
    assert key_of(attrs.evolve(here, path="some/model"), TorchConfig()) == key_of(here, TorchConfig())
    assert key_of(attrs.evolve(here, path="some/other"), TorchConfig()) == ""
