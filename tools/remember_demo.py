"""Write what the package keeps of its models' tokenizers: `python tools/remember_demo.py`, after a file of such a model has changed.

Each is loaded by transformers and proven to be the one that is recalled, as on a user's machine.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from trencadis.text.model_path import resolve_model_path
from trencadis.text.remembered import SHIPPED, RememberedTokenizer

__all__ = ["shipped_files"]

MODELS = ("demo", "demo-draft", "demo-distilled", "demo-parallel")


def shipped_files() -> Mapping[str, bytes]:
    """Return the content of each file by name.

    Raises:
        ValueError: A tokenizer was not proven.
    """
    from transformers import AutoTokenizer

    files = {}
    for model in MODELS:
        place = Path(resolve_model_path(model))
        remembered = RememberedTokenizer(place, trust_remote_code=False)
        content = remembered.proven(AutoTokenizer.from_pretrained(str(place), local_files_only=True))
        if content is None:
            raise ValueError(f"the tokenizer of {model} is another one without transformers")
        files[remembered.key] = content
    return files


if __name__ == "__main__":
    written = shipped_files()
    shutil.rmtree(SHIPPED, ignore_errors=True)
    SHIPPED.mkdir()
    for name, content in written.items():
        (SHIPPED / name).write_bytes(content)
    sys.stdout.write(f"{SHIPPED}: {len(written)} files\n")
