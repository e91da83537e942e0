"""Write the trained demo as Hugging Face directories and a model card.

Lives here: tokenizer, files on disk, the words of the card. Does not live here: training.
"""

import copy
import json
import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import END, SPECIAL_TOKENS
from demo.measure import HeldOut
from demo.training import MAX_POSITIONS, Trained

VOCABULARY = 4096
PROMPT = "The old man looked at the sea and"
CHAT_PROMPT = "Good morrow, sir. What news from the city?"
SAMPLE_TOKENS = 80
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Result:
    """One published model and its measures, taken from the weights as they were saved."""

    trained: Trained
    held_out: HeldOut
    held_out_bytes: int
    dtype: torch.dtype

    @property
    def bits_per_byte(self) -> float:
        """Held-out loss, bits per byte of UTF-8 text."""
        return self.held_out.nats / math.log(2) / max(1, self.held_out_bytes)


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; it adds no special token of its own to a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, dtype: torch.dtype) -> None:
    """Write one model directory, then put it in place at once: a reader never sees half of it."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    end_id = int(tokenizer.eos_token_id)
    stored = copy.deepcopy(model).to(dtype)
    stored.generation_config = GenerationConfig(eos_token_id=end_id, pad_token_id=end_id)
    stored.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    _use_settled_names(fresh / "tokenizer_config.json")
    for path in fresh.iterdir():
        # safetensors writes files only their owner can read; package data is for everyone.
        path.chmod(0o644)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _use_settled_names(path: Path) -> None:
    """Write names that transformers 4.x and 5.x both read; 5.x has new ones for the tokens of chat turns."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    # The last two say how the tokenizer was loaded, which is nobody's business later.
    for name in ("backend", "extra_special_tokens", "is_local", "local_files_only"):
        settings.pop(name, None)
    settings["additional_special_tokens"] = list(SPECIAL_TOKENS[1:])
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, ids: list[int], temperature: float) -> str:
    """Return the text of up to `SAMPLE_TOKENS` new tokens; temperature 0 is greedy."""
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    inputs = torch.tensor([ids])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=SAMPLE_TOKENS, **options)
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))


def write_card(
    path: Path, target: Result, draft: Result, *, agreement: float, tokenizer: PreTrainedTokenizerFast, command: str
) -> None:
    """Write the model card next to the two directories."""
    model = target.trained.model.eval()
    prompt = tokenizer.encode(PROMPT)
    turn = [{"role": "user", "content": CHAT_PROMPT}]
    chat = tokenizer.encode(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    text = CARD.format(
        rows="\n".join(_rows(target, draft)),
        agreement=f"{agreement:.1%}",
        command=command,
        prompt=PROMPT,
        greedy=_quote(PROMPT + sample(model, tokenizer, prompt, 0.0)),
        warm=_quote(PROMPT + sample(model, tokenizer, prompt, 0.8)),
        chat_prompt=CHAT_PROMPT,
        chat=_quote(sample(model, tokenizer, chat, 0.8)),
        vocabulary=len(tokenizer),
        tokens=target.held_out.tokens,
        bytes=target.held_out_bytes,
    )
    path.write_text(text, encoding="utf-8")


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() + "  " if line else ">" for line in text.split("\n"))


def _rows(target: Result, draft: Result) -> Iterable[str]:
    """Yield the lines of the card's table."""

    def line(name: str, values: Iterable[object]) -> str:
        return f"| {name} | " + " | ".join(map(str, values)) + " |"

    pair = (target, draft)
    configs = [result.trained.model.config for result in pair]
    yield line("hidden size", (c.hidden_size for c in configs))
    yield line("layers", (c.num_hidden_layers for c in configs))
    yield line("query heads / key-value heads", (f"{c.num_attention_heads} / {c.num_key_value_heads}" for c in configs))
    yield line("MLP size", (c.intermediate_size for c in configs))
    yield line("parameters", (f"{r.trained.model.num_parameters():,}" for r in pair))
    yield line("stored as", (str(r.dtype).removeprefix("torch.") for r in pair))
    yield line("training steps (best at)", (f"{r.trained.steps:,} ({r.trained.best_step:,})" for r in pair))
    yield line("training tokens", (f"{r.trained.tokens:,}" for r in pair))
    yield line("epochs", (r.trained.epochs for r in pair))
    yield line("training time, minutes", (f"{r.trained.seconds / 60:.1f}" for r in pair))
    yield line("held-out loss, nats per token", (f"{r.held_out.per_token:.4f}" for r in pair))
    yield line("held-out perplexity per token", (f"{math.exp(r.held_out.per_token):.1f}" for r in pair))
    yield line("held-out bits per byte", (f"{r.bits_per_byte:.4f}" for r in pair))


CARD = """# The demo model

Small Llama models that come with Trencadís, so that an engine can be started, tested and measured
without a download: `target/` writes English prose in the manner of its few books,
`draft/` is a smaller model with the same tokenizer that guesses ahead for it.
All are ordinary Hugging Face directories.

| | target | draft |
|---|---|---|
{rows}

Draft and target rank the same token first at {agreement} of the held-out positions.
The models share tied embeddings, default RoPE, a context of 2048 tokens
and a byte-level BPE tokenizer of {vocabulary} tokens.
Token 0, `<|end|>`, ends a passage, a document and a chat turn, and is the padding token;
`<|user|>`, `<|assistant|>` and `<|system|>` open a chat turn.
The tokenizer adds no token of its own to a prompt.

## Texts

| text | credit | terms |
|---|---|---|
| *Alice's Adventures in Wonderland* | Lewis Carroll; Project Gutenberg, through `google/snappy:testdata` | public domain |
| *As You Like It* | William Shakespeare; Project Gutenberg, through `google/snappy:testdata` | public domain |
| *Paradise Lost* | John Milton; Project Gutenberg, through `google/snappy:testdata` | public domain |
| *Workshop on Electronic Texts: Proceedings* | edited by James Daly, Library of Congress, 1992; Project Gutenberg #53, through `google/snappy:testdata` | public domain, as stated by Project Gutenberg |
| *Sonnets* | William Shakespeare; through `vllm:benchmarks/sonnet.txt` | public domain |
| plays, about a megabyte | William Shakespeare; through `karpathy/char-rnn:data/tinyshakespeare` | public domain |

Licence texts, title pages and the workshop's directory of participants were cut;
hard-wrapped prose was joined into paragraphs, verse kept its lines.
Prose was shown more often than verse, *Alice* most of all.
About 15 % of the training tokens are chats: one speech of a play is the user's turn, the reply the assistant's.

Held out: the last 5 % of the characters of each cleaned text ({tokens:,} tokens, {bytes:,} bytes).
Neither the tokenizer nor the models saw it, but the best weights were chosen by its loss,
so the numbers above are a little on the kind side.
It is measured in rows of 512 tokens, each text on its own, every token predicted once.

## Samples of the target

“{prompt}”, greedy:

{greedy}

The same at temperature 0.8:

{warm}

As a chat, “{chat_prompt}”, at temperature 0.8:

{chat}

## Limits

The models know nothing but the rhythm of these texts.
They do not answer questions, keep facts, count or follow instructions, and a chat is a speech from a play.
Most training rows were 256 or 512 tokens long, one in twenty filled the whole context.
The plays and *Paradise Lost* hold the prejudice and the violence of their time, and so may what is written here.
Use them to see an engine work, not for their words.

## Made with

```sh
{command}
```

The corpus is named in the table above.
A run that is limited by steps repeats on the same machine; another machine rounds otherwise
and ends with slightly other weights.
"""
