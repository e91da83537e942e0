"""The same files elsewhere are the same model; another fine-tune in a directory of the same name is another."""

from __future__ import annotations

import json
import shutil

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.backends import tiny_models
from trencadis.clock import SystemClock
from trencadis.records import ModelSource
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.loading.fingerprint import fingerprint, quantised_fingerprint
from trencadis_torch.loading.loader import find_model


def of(path, **options):
    return fingerprint(find_model(ModelSource(path=str(path), **options)))


@pytest.fixture
def model(model_path, tmp_path):
    return shutil.copytree(model_path("llama"), tmp_path / "model")


@pytest.fixture
def large(model):
    """Weights of 40 MB, so that most bytes are not read."""
    save_file({f"layer {i}": torch.full((1_000_000,), float(i)) for i in range(10)}, model / "model.safetensors")
    return model


def weights_changed(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_same_files_elsewhere_are_the_same_model(model, tmp_path):
    assert len(of(model)) == 32
    assert of(shutil.copytree(model, tmp_path / "elsewhere" / "other name")) == of(model)


def test_files_count_that_decide_something_and_code_where_it_runs(model):
    before, with_code = of(model), of(model, trust_remote_code=True)
    (model / "README.md").write_text("about it")
    (model / "modeling.py").write_text("x = 1")
    assert of(model) == before
    assert of(model, trust_remote_code=True) != with_code
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-4}))
    assert of(model) != before


@pytest.mark.parametrize("which", [0, 7])
def test_single_element_of_a_small_file_counts(model, which):
    before = of(model)

    def change(tensors):
        tensors[sorted(tensors)[which]].view(-1)[0] += 1

    weights_changed(model, change)
    assert of(model) != before


@pytest.mark.representatives(3)
@pytest.mark.parametrize("layer", range(10))
def test_one_tensor_of_a_large_file_that_was_trained_further_counts(large, layer):
    before = of(large)
    weights_changed(large, lambda tensors: tensors[f"layer {layer}"].mul_(1.001).add_(1e-3))
    assert of(large) != before


def test_small_tensors_of_a_large_file_count_although_no_sample_hits_them(large):
    weights_changed(large, lambda tensors: tensors.update(bias=torch.zeros(3)))
    before = of(large)
    weights_changed(large, lambda tensors: tensors["bias"].add_(1))
    assert of(large) != before


def test_large_file_is_read_in_part_only(large, monkeypatch):
    """At most header, 2 MiB of samples and 4 KiB of each of ten tensors."""
    file, read = large / "model.safetensors", []
    opened = type(file).open

    def counting(path, *args, **options):
        stream = opened(path, *args, **options)
        if path == file:
            raw = stream.read
            stream = _Counting(stream, raw, read)
        return stream

    monkeypatch.setattr(type(file), "open", counting)
    of(large)
    assert 2 * 2**20 <= sum(read) < 2 * 2**20 + 100_000


class _Counting:
    def __init__(self, stream, read, log):
        self._stream, self._read, self._log = stream, read, log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()

    def seek(self, offset):
        return self._stream.seek(offset)

    def read(self, *args):
        data = self._read(*args)
        self._log.append(len(data))
        return data


def test_gguf_file_stands_for_itself(model, tmp_path):
    files = find_model(ModelSource(path=str(model)))
    for content in (b"GGUF one", b"GGUF two"):
        (tmp_path / f"{content[-3:].decode()}.gguf").write_bytes(content)
    one, two = (
        fingerprint(attrs.evolve(files, name=str(tmp_path), options={"gguf_file": f"{name}.gguf"}))
        for name in ("one", "two")
    )
    assert len({"", one, two}) == 3


def test_files_that_cannot_be_read_have_no_fingerprint_and_say_so(model, caplog):
    files = find_model(ModelSource(path=str(model)))
    (model / "config.json").unlink()
    assert fingerprint(files) == ""
    assert "no fingerprint" in caplog.text


def test_backend_tells_the_fingerprint(model, tmp_path):
    other = tiny_models.save_model("qwen3", tmp_path)

    def facts(path):
        backend = TorchBackend(TorchConfig(device="cpu"), clock=SystemClock())
        try:
            return backend.load(ModelSource(path=str(path)), sampler=None)
        finally:
            backend.close()

    assert facts(model).fingerprint == of(model)
    assert facts(other).fingerprint not in {"", of(model)}


def test_rounded_weights_have_a_digest_of_their_own():
    digests = {"ab" * 16, quantised_fingerprint("ab" * 16, "int8"), quantised_fingerprint("cd" * 16, "int8")}
    assert [len(digest) for digest in digests] == [32, 32, 32]
    assert quantised_fingerprint("ab" * 16, "int8") in digests
    assert quantised_fingerprint("", "int8") == ""
