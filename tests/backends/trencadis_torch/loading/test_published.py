"""Models in the structure of published checkpoints, as the backend serves them without any option."""

from __future__ import annotations

import functools

import pytest
from torch import nn

from support.backends import families, tiny_models
from trencadis import LLM, SamplingParams
from trencadis.errors import ModelLoadError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def served(path, length, **backend):
    with LLM({"path": str(path), "tokenizer": "none"}, backend={"torch": {"num_threads": 1, **backend}}) as llm:
        return list(llm.generate([tiny_models.prompt(length)], GREEDY)[0].outputs[0].token_ids)


@pytest.mark.parametrize("kind", families.PUBLISHED)
def test_a_published_structure_has_the_tokens_of_transformers(tmp_path, kind):
    path = families.save_family(kind, tmp_path)
    assert served(path, 40) == tiny_models.greedy_reference(path, tiny_models.prompt(40), 12)


def test_a_model_that_packed_layers_do_not_reproduce_is_served_without_them(tmp_path, monkeypatch, caplog):
    from transformers import LlamaForCausalLM

    path = tiny_models.save_model("llama", tmp_path)
    expected = served(path, 20, pack="off")
    plain = LlamaForCausalLM.forward

    @functools.wraps(plain)
    def forward(self, *args, **options):
        result = plain(self, *args, **options)
        if not isinstance(self.lm_head, nn.Linear):
            result.logits = -result.logits
        return result

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert served(path, 20) == expected
    assert "differ from the model's own" in caplog.text
    assert "It is loaded again without packed layers." in caplog.text
    with pytest.raises(ModelLoadError, match="packed layers differ"):
        served(path, 20, quantization="int8")


def test_dynamic_rotary_embeddings_take_texts_of_the_stretched_length_and_are_the_same_for_each(tmp_path):
    """As with a base stretched beforehand, whatever the length of a text and of its neighbours."""
    model = tiny_models.make_model("llama")
    config = model.config
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model.save_pretrained(tmp_path / "dynamic")
    dim = config.hidden_size // config.num_attention_heads
    theta = 1e4 * (4.0 * 4.0 - 3.0) ** (dim / (dim - 2))
    config.max_position_embeddings = 256
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    model.save_pretrained(tmp_path / "stretched")
    for length in (20, 200):
        expected = tiny_models.greedy_reference(tmp_path / "stretched", tiny_models.prompt(length), 12)
        assert served(tmp_path / "dynamic", length) == expected


def test_no_progress_bar_is_printed_while_a_gguf_file_is_read(tmp_path, capfd):
    pytest.importorskip("gguf")
    served(tiny_models.save_gguf(tmp_path), 4)
    assert "it/s" not in capfd.readouterr().err
