"""Exports a model to OpenVINO, fp32 weights (which it converts to bf16 when it loads them), int8, or int4 in groups of 32. Runs where optimum-intel and NNCF are installed."""

from __future__ import annotations

import sys


def make(source: str, target: str, precision: str) -> None:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantization = None
    if precision == "int8":
        quantization = OVWeightQuantizationConfig(bits=8, sym=True)
    elif precision == "int4":
        quantization = OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0, all_layers=True)
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, load_in_8bit=False, quantization_config=quantization, compile=False
    )
    model.save_pretrained(target)
    add_tokenizer(source, target)


def add_tokenizer(source: str, target: str) -> None:
    """Write the tokenizer that OpenVINO GenAI wants to find, though it encodes nothing here."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, f"{target}/openvino_tokenizer.xml")
    ov.save_model(decoder, f"{target}/openvino_detokenizer.xml")
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    make(*sys.argv[1:4])
