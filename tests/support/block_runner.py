"""Runs Python code in forks of a process that has imported what is slow to import: each as if it were alone in ``python -c``."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs

__all__ = ["BlockRunner", "Ran"]

TIMEOUT_S = 600.0

SERVER = """
import json, os, sys, traceback, types
from trencadis_torch.environment import set_environment
set_environment(os.environ, sys.modules)
import transformers, trencadis, trencadis_torch.backend
from transformers import AutoModelForCausalLM, AutoTokenizer
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(asked["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__builtins__ = __builtins__
    status = 0
    try:
        exec(compile(asked["text"], "<block>", "exec"), module.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


@attrs.frozen
class Ran:
    """How a block ended, and what it wrote."""

    returncode: int
    output: str


class BlockRunner:
    """The process that forks, started at the first block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, text: str, folder: Path) -> Ran:
        """Run code in a folder, from which it may import."""
        if self._process is None:
            command = [sys.executable, "-W", "error::SyntaxWarning", "-c", SERVER]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = self._process
        assert process.stdin is not None, "as it was opened"
        assert process.stdout is not None, "the same"
        with tempfile.NamedTemporaryFile("r") as log:
            process.stdin.write(json.dumps({"text": text, "folder": str(folder), "log": log.name}) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
            assert ready, f"no end after {TIMEOUT_S:.0f} s: {log.read()[-3000:]}"
            answer = process.stdout.readline()
            assert answer, f"the process that forks has ended with {process.wait()}"
            return Ran(int(answer), Path(log.name).read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
