"""A wheel brings its kernels, compiled for each instruction set of this kind of machine; without a compiler it brings none, in words.

    sources ▶ sets that each asks for ▶ compile side by side ▶ trencadis_torch/prebuilt/NAME-SET-KEY.so ▶ a wheel for this platform

``TRENCADIS_WHEEL_KERNELS`` names the sets that are wanted, with commas; ``none``: a wheel for any platform, which compiles at the first start.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "backends" / "trencadis_torch"
VARIABLE = "TRENCADIS_WHEEL_KERNELS"


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the kernels for a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries, and the platform's tag.

        Args:
            version: ``editable``: nothing is compiled, for the first start does it for the CPU that is there.
            build_data: Changed.

        Raises:
            RuntimeError: A set is asked for that does not exist, or a source cannot be compiled.
        """
        wanted = os.environ.get(VARIABLE, "")
        if version == "editable" or wanted == "none":
            return
        sets = _instruction_sets()
        compiler = sets.find_compiler()
        if compiler is None or not sys.platform.startswith("linux"):
            reason = "there is no C++ compiler here" if compiler is None else "libraries are built on Linux only"
            self.app.display_warning(
                f"The wheel has no compiled kernels: {reason}. They are compiled at the first start."
            )
            return
        self._room = tempfile.TemporaryDirectory(prefix="trencadis-kernels-")
        libraries = _compiled(sets, compiler, Path(self._room.name), wanted, self.app.display_info)
        if not libraries:
            self.app.display_warning(f"The wheel has no compiled kernels: none are written for {platform.machine()}.")
            return
        for library in libraries:
            build_data["force_include"][str(library)] = f"{PACKAGE.name}/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it."""
        if hasattr(self, "_room"):
            self._room.cleanup()


def _instruction_sets() -> Any:
    """Return the module, without the package around it, which needs what a build does not have."""
    spec = importlib.util.spec_from_file_location("instruction_sets", PACKAGE / "instruction_sets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compiled(sets: Any, compiler: str, room: Path, wanted: str, say: Any) -> list[Path]:
    """Compile each source for its sets; return the libraries."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = sorted(set(names) - set(sets.NAMES))
    if unknown:
        raise RuntimeError(
            f"{VARIABLE} = {wanted}: no such instruction set: {unknown[0]}. There are {', '.join(sets.NAMES)}."
        )
    jobs = []
    for source in sorted(PACKAGE.rglob("*.cpp")):
        texts = sets.texts_of(source)
        for one in sets.sets_for(texts, platform.machine()):
            if names and one not in [sets.narrowed(each, texts) for each in sets.SETS if each.name in names]:
                continue
            if sets.understands(compiler, one):
                jobs.append((source, one, room / sets.library_name(source, one, texts)))
            else:
                say(f"{source.name} is left out for {one.name}: {compiler} does not know it.")

    def build(job: tuple[Path, Any, Path]) -> Path:
        source, one, library = job
        compiled = library.with_suffix(".o")
        _run(sets.compile_command(compiler, source, compiled, options=one.all_options))
        _run(sets.link_command(compiler, compiled, library))
        say(f"{source.name} for {one.name}: {library.stat().st_size // 1024} KiB")
        return library

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build, jobs))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).splitlines()[-6:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{words}")
