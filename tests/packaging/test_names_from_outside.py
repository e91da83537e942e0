"""A name, a class or bytes from outside reach an import, an evaluation or an unpickling in these modules alone, each for a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "plugins", "backends")

ALLOWED = """
import_attribute trencadis/registry/import_path.py: the operator's import path; the contract is checked before a call
import_attribute trencadis_plugins/sampling/elsewhere.py: the operator's list of processors; the class is checked
import_attribute trencadis_plugins/scheduling/shortest_first.py: the operator's predictor; it is a Python function
import_module trencadis/__init__.py: names of a table of ours
import_module trencadis/api.py: names of a table of ours
import_module trencadis/interfaces/component.py: import_attribute itself
import_module trencadis_testing/__init__.py: names of a table of ours
import_module trencadis_testing/conform.py: test suites, named on the command line of a test
import_module trencadis_testing/hash_seeds.py: test suites in a process of the test's own
import_module trencadis_gallery/__init__.py: components of a table of ours
import_module trencadis_plugins/scheduling/__init__.py: components of a table of ours
import_module trencadis_plugins/acceptance/__init__.py: components of a table of ours
import_module trencadis_plugins/draft_length/__init__.py: components of a table of ours
import_module trencadis_plugins/eviction/__init__.py: components of a table of ours
import_module trencadis_remote/router/__init__.py: components of a table of ours
import_module trencadis_plugins/speculation/__init__.py: components of a table of ours
import_module trencadis_kv/connectors/__init__.py: components of a table of ours
import_module trencadis_kv/connectors/lmcache/library.py: modules of LMCache, by a version that is looked up
import_module trencadis_kv/connectors/nixl/agent.py: packages of NIXL, of a table of ours
import_module trencadis_torch/light_imports.py: names of a table of ours
import_module trencadis_torch/preload.py: names of a table of ours
import_module trencadis_gaudi/checks/records.py: checks of a table of ours
import_module trencadis_gaudi/kernels.py: modules of the device's software, in a table of ours
import_module trencadis_tools/new_plugin/package.py: interfaces of nouns, of a table of ours
import_module trencadis_tools/lab.py: packages of the extra `lab`, in a table of ours
exec trencadis/engine/guard.py: a function written from the signature of a contract's method, which is code
eval trencadis/interfaces/laws.py: arguments that a law beside a contract's method names, which is code
pickle trencadis/registry/building.py: written and read by an engine and the ranks that it started itself
pickle trencadis_plugins/executor/ranks/executor.py: from ranks that the engine started itself
pickle trencadis_plugins/executor/ranks/server.py: from the engine that started the rank
pickle trencadis_plugins/executor/ranks/template.py: from the engine that started it, by standard input
pickle trencadis_plugins/executor/ranks/wire.py: between an engine and ranks that it started itself
pickle trencadis_testing/hash_seeds.py: between a test and a process that it started
getattr trencadis_testing/collective.py: types of a table of a test
getattr trencadis_plugins/executor/collectives/shared_memory.py: types of a table of ours
spec_from_file_location trencadis_testing/hash_seeds.py: the file of a test suite, in a process of the test's own
"""
"""Each call with its file, and why the name that it gets does not come from outside."""

LISTED = {tuple(line.partition(": ")[0].split()) for line in ALLOWED.split("\n") if line}
UNPICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
NEVER = {"eval", "exec", "__import__", "run_path", "spec_from_file_location", "import_from_string", "resolve_name"}

_MODULES_OF_NEVER = ("builtins", "runpy", "importlib.util", "pkgutil")


def found_in(source: str) -> Iterator[tuple[str, int]]:
    """Yield what could follow a name from outside, with its line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = (
            function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
        )
        literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
        if name == "import_attribute" or (name in ("import_module", "_import_module") and not literal):
            yield name.removeprefix("_"), node.lineno
        elif owner in UNPICKLING and name in ("load", "loads", "open", "Unpickler"):
            yield "pickle", node.lineno
        elif name in NEVER and (isinstance(function, ast.Name) or ast.unparse(function.value) in _MODULES_OF_NEVER):
            yield name, node.lineno
        elif owner == "yaml" and name in ("load", "load_all", "unsafe_load", "full_load"):
            yield "yaml", node.lineno
        elif (owner == "torch" and name == "load") or any(word.arg == "allow_pickle" for word in node.keywords):
            yield "pickle", node.lineno
        elif any(word.arg == "shell" and not _is_false(word.value) for word in node.keywords) or (owner, name) == (
            "os",
            "system",
        ):
            yield "shell", node.lineno
        elif name == "getattr" and _is_module(node.args[0]) and not isinstance(node.args[1], ast.Constant):
            yield "getattr", node.lineno


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_module(node: ast.expr) -> bool:
    """Return whether an expression is a library that has more than one means by a name of it."""
    modules = {"np", "np.random", "numpy", "numpy.random", "torch", "torch.nn"}
    return ast.unparse(node) in modules | {"builtins", "os", "sys", "operator", "itertools"}


def sources() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            yield file.relative_to(ROOT / room).as_posix(), file.read_text(encoding="utf-8")


def test_names_are_followed_in_the_listed_modules_alone() -> None:
    unlisted, used = [], set()
    for file, source in sources():
        for what, line in found_in(source):
            used.add((what, file))
            if (what, file) not in LISTED:
                unlisted.append(f"{file}:{line} {what}")
    assert unlisted == []
    assert used >= LISTED, "a reason for what is not there"


def test_unpicklers_are_subclassed_where_they_say_what_they_make() -> None:
    found = [file for file, source in sources() if "pickle.Unpickler)" in source]
    assert found == ["trencadis_gaudi/fp8/measurements.py"]


def test_each_way_is_seen_and_what_is_no_name_from_outside_is_not() -> None:
    for line, what in {
        "importlib.import_module(name)": "import_module",
        "import_attribute('os:system')": "import_attribute",
        "pickle.loads(data)": "pickle",
        "torch.load(file, weights_only=True)": "pickle",
        "np.load(file, allow_pickle=True)": "pickle",
        "eval(text)": "eval",
        "yaml.load(text, Loader)": "yaml",
        "subprocess.run(text, shell=True)": "shell",
        "os.system(text)": "shell",
        "getattr(np.random, state['x'])()": "getattr",
    }.items():
        assert [one for one, _ in found_in(line)] == [what], line
    for line in ("importlib.import_module('torch')", "model.eval()", "yaml.safe_load(text)", "json.loads(text)"):
        assert not list(found_in(line)), line
