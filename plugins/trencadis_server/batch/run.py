"""Runs a batch from its files to its summary: engine, application, files, runner."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path

from trencadis import AsyncLLM
from trencadis.api import Config, Registry
from trencadis.console import track
from trencadis.errors import ConfigError
from trencadis_server.app import make_app
from trencadis_server.batch.files import OutputFile, count_lines, input_lines, read_output
from trencadis_server.batch.lines import OutputLine
from trencadis_server.batch.runner import BatchRunner, Summary
from trencadis_server.config import server_of, with_server
from trencadis_server.lifecycle.opening import make_context
from trencadis_server.lifecycle.supervisor import Supervisor

__all__ = ["run_batch"]


async def run_batch(
    config: Config, registry: Registry, *, input_file: Path, output_file: Path, error_file: Path | None = None
) -> Summary:
    """Answer every line of a file; lines that the output already answers are skipped.

    Args:
        config: Loaded configuration.
        registry: Registry of the plugins.
        input_file: File with lines of requests.
        output_file: File that gets a line for each; an existing file is continued, and a torn last line is cut off.
        error_file: File that gets the lines that failed, instead of the output; rewritten, so that a second run tries
            them again.

    Raises:
        ConfigError: A file cannot be used.
        TrencadisError: The engine cannot be opened, or has ended for good.
    """
    _check_files([input_file, output_file, *([error_file] if error_file else [])])
    num_lines = count_lines(input_file)
    done = read_output(output_file)
    # This server has no other clients, and every line belongs to the owner of the file.
    config = with_server(config, api_keys=())
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(OutputFile(output_file, num_bytes=done.num_bytes))
        errors = stack.enter_context(OutputFile(error_file)) if error_file else output

        def write(line: OutputLine) -> None:
            (output if line.is_ok else errors).write(line)

        supervisor = Supervisor(
            functools.partial(AsyncLLM.from_config, config, registry),
            max_restarts=server_of(config).max_engine_restarts,
            window_s=server_of(config).restart_window_s,
        )
        app = make_app(make_context(config, supervisor))

        async with _running(supervisor):
            with track("Batch", total=num_lines, unit="lines") as advance:
                runner = BatchRunner(
                    app,
                    input_lines(input_file),
                    done=done,
                    write=write,
                    num_workers=min(server_of(config).max_requests, config.engine.max_num_seqs),
                    advance=advance,
                )
                return await runner.run()


@contextlib.asynccontextmanager
async def _running(supervisor: Supervisor) -> AsyncIterator[None]:
    """Keep an engine open while the block runs."""
    engine = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(supervisor.is_serving.wait())
    try:
        await asyncio.wait({engine, ready}, return_when=asyncio.FIRST_COMPLETED)
        if engine.done():
            await engine
        yield
    finally:
        ready.cancel()
        await supervisor.close()
        await asyncio.gather(engine, return_exceptions=True)  # the runner has raised the end of the engine already


def _check_files(files: list[Path]) -> None:
    """Raise ConfigError if one file would be both read and written, or written twice."""
    names = [file.resolve() for file in files]
    for file, name in zip(files, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"{file}: is named twice.", hint="Input, output and errors are different files.")
