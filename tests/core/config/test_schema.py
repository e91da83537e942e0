from __future__ import annotations

import copy
import pickle

import attrs
import pytest

from trencadis.config.schema import Config, ModelConfig


def test_config_is_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Config().engine.max_num_seqs = 3


def test_config_travels_to_another_process():
    assert pickle.loads(pickle.dumps(Config())) == Config() == copy.deepcopy(Config())


def test_dtype_outside_its_choices_is_refused():
    with pytest.raises(ValueError, match="dtype"):
        ModelConfig(dtype="int3")
