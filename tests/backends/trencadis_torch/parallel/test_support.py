"""The table of what the backend's settings do among several ranks."""

from __future__ import annotations

import attrs
import pytest

from support.backends import tiny_encoders, tiny_models
from support.backends.rank_threads import make_groups
from support.backends.torch_backends import PLAN, make_torch
from trencadis.errors import BackendError, ConfigValueError
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver
from trencadis_torch.config import TorchConfig
from trencadis_torch.parallel.support import FEATURES, ONLY_EMBEDS

ASKING = {
    "compile": "buckets",
    "graphs": "checked",
    "layout": "padded",
    "attention": "sdpa",
    "quantization": "int8",
    "kv_dtype": "int8",
}
"""A value of each setting that asks for the feature."""


def test_a_model_that_only_embeds_is_refused_as_the_table_says(tmp_path, ranks):
    path = tiny_encoders.save_encoder("bert", tmp_path)

    def load(groups):
        backend = make_torch()
        backend.join(groups)
        backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())

    for error in ranks(lambda groups: groups, 2).errors(load):
        assert isinstance(error, BackendError)
        assert str(error).startswith(f"[parallel] 2 ranks: {path}: {ONLY_EMBEDS.refused['tensor']}.")


def test_every_row_is_of_a_setting_and_asked_for_by_other_values_than_the_default():
    fields = attrs.fields_dict(TorchConfig)
    for feature in FEATURES:
        if feature.setting:
            table, _, key = feature.setting.rpartition(".")
            assert table == "backend.torch"
            assert not feature.is_asked(fields[key].default)
            assert feature.is_asked(ASKING[key])


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.setting], ids=lambda one: one.setting)
def test_joining_others_is_refused_where_the_table_says_so_and_nowhere_else(feature):
    key = feature.setting.rpartition(".")[2]
    options = {"layout": "padded"} if "tensor" in feature.refused else {}
    backend = make_torch(**{**options, key: ASKING[key]})
    if "tensor" in feature.refused:
        with pytest.raises(
            ConfigValueError, match=rf'^\[backend\.torch\] {key} = "{ASKING[key]}" with \[parallel\] tensor = 2: '
        ) as caught:
            backend.join(make_groups(2)[0])
        assert feature.refused["tensor"] in str(caught.value)
        assert caught.value.hint == feature.remedy
    else:
        backend.join(make_groups(2)[0])
    backend.close()


def test_a_gguf_file_is_divided(tmp_path, model_path, ranked):
    pytest.importorskip("gguf")
    backend = ranked(make_torch, 2)
    backend.load(ModelSource(path=str(tiny_models.save_gguf(tmp_path))), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    prompt = tiny_models.prompt(19)
    assert BackendDriver(backend, PLAN).generate({0: prompt}, 6)[0] == tiny_models.greedy_reference(
        model_path("llama"), prompt, 6
    )
