"""Every name that the plugin pages show exists: in code blocks, in ``Class.member`` and ``table.key``, and alone in code style."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from support.doc_blocks import BLOCKS, PAGES, ROOT
from support.nouns import ALL_NOUNS
from trencadis.config.settings import CORE_TABLES
from trencadis.registry import Registry

PLUGIN_PAGES = [page for page in PAGES if page.parent.name == "plugins"]
API = (
    *("trencadis", "trencadis.interfaces", "trencadis.records", "trencadis.errors", "trencadis.hookspecs"),
    *("trencadis.clock", "trencadis.engine.sequences", "trencadis.engine.stage", "trencadis.faults", "trencadis.files"),
    *("trencadis_testing", "trencadis_kv.interfaces", "trencadis_kv.testing.kv_codec"),
)
ROOMS = ("core", "plugins", "backends")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_MEMBER = re.compile(r"([A-Z]\w+)\.([a-z]\w*)(?:\(.*\))?")
_KEY = re.compile(r"([a-z]\w*)\.([a-z]\w*)(?: = .*)?")
_TABLE_KEY = re.compile(r"\[([a-z]\w*)\] ([a-z]\w*)(?: = .*)?")
_WORD = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_ALONE = re.compile(r"([a-z]\w*)(?:\(.*\))?")

ELSEWHERE = {"azure_conv", "ceil", "dist", "src", "system_fingerprint"}
"""Names that are not of our code: a public trace, mathematics, folders of a package, a field of OpenAI's API."""


@functools.cache
def api() -> dict[str, Any]:
    """Return what plugins may import, by name."""
    interfaces = importlib.import_module("trencadis.interfaces")
    modules = [*API, *(f"trencadis.interfaces.{info.name}" for info in pkgutil.iter_modules(interfaces.__path__))]
    found: dict[str, Any] = {}
    for name in modules:
        module = importlib.import_module(name)
        found |= {public: getattr(module, public) for public in getattr(module, "__all__", ())}
    return found


def members(kind: type) -> set[str]:
    """Return the names of a class: its fields as well."""
    fields = {field.name for field in attrs.fields(kind)} if attrs.has(kind) else set()
    annotated = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    return fields | set(dir(kind)) | annotated


@functools.cache
def keys() -> dict[str, set[str]]:
    """Return the keys of every table of the configuration with all plugins."""
    found: dict[str, set[str]] = {}
    for setting in Registry.discover().settings:
        found.setdefault(setting.table, set()).add(setting.key)
        table, _, below = setting.table.rpartition(".")
        if table:
            found.setdefault(table, set()).add(below)
    return found


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Return the names that a reader may meet: of the API, its members and arguments, of the test kit, and what the code compares texts with."""
    words = {*dir(builtins), *ALL_NOUNS, *keys(), *(key for of_table in keys().values() for key in of_table)}
    for name, value in api().items():
        words |= {name} | (members(value) if isinstance(value, type) else set())
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            words |= _words(ast.parse(file.read_text(encoding="utf-8")), is_kit="trencadis_testing" in file.parts)
    return frozenset(words)


def _words(tree: ast.Module, *, is_kit: bool) -> Iterator[str] | set[str]:
    """Return the literal texts of a module and its public functions and classes at the top; of the test kit all names."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORD.fullmatch(node.value):
            words.add(node.value)
        elif is_kit and isinstance(node, ast.FunctionDef):
            words |= {node.name, *(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))}
    return words | {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


# ------------------------------------------------------------------------------------------------------ in the text


def in_code_style(page: Path) -> Iterator[str]:
    """Yield what a page has in code style outside its blocks."""
    yield from _CODE.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))


def unknown_member(text: str) -> str:
    """Return what is wrong with ``Class.member``, ``table.key`` or ``[table] key``; empty: nothing, or it is none of them."""
    if found := _MEMBER.fullmatch(text):
        name, member = found.groups()
        kind = api().get(name)
        return f"{name} has no {member}" if isinstance(kind, type) and member not in members(kind) else ""
    if found := _TABLE_KEY.fullmatch(text) or _KEY.fullmatch(text):
        table, key = found.groups()
        is_table = table in CORE_TABLES or (text.startswith("[") and table in keys())
        is_capability = f"{table}.{key}" in words_of_the_code()
        return f"[{table}] has no {key}" if is_table and not is_capability and key not in keys().get(table, ()) else ""
    return ""


def test_members_and_keys_that_a_page_names_exist() -> None:
    assert not [
        f"{page.relative_to(ROOT)}: {wrong}"
        for page in PAGES
        if page.parent.name != "decisions"  # which speak of the code as it was
        for text in in_code_style(page)
        if (wrong := unknown_member(text))
    ]


def test_a_name_alone_on_a_plugin_page_is_one_of_the_code() -> None:
    metrics = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    unknown = []
    for page in PLUGIN_PAGES:
        own = {word for block in BLOCKS if ROOT / block.page == page for word in re.findall(r"\w+", block.text)}
        known = words_of_the_code() | own | ELSEWHERE
        alone = {found.group(1) for code in in_code_style(page) if (found := _ALONE.fullmatch(code))}
        unknown += [f"{page.name}: {name}" for name in sorted(alone - known) if f"`{name}" not in metrics]
    assert not unknown


# ------------------------------------------------------------------------------------------------------- in the code


class Names(ast.NodeVisitor):
    """Collects what a block reads of a record or a view, and does not exist.

    A record is known by the annotation of an argument, or by the contract whose method is written.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._contract: type | None = None
        self._arguments: dict[str, type] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._contract
        bases = (api().get(base.id) for base in node.bases if isinstance(base, ast.Name))
        self._contract = next((base for base in bases if isinstance(base, type)), None)
        self.generic_visit(node)
        self._contract = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._arguments
        contract = getattr(getattr(self._contract, node.name, None), "__annotations__", {})
        self._arguments = before | {
            argument.arg: kind
            for argument in (*node.args.args, *node.args.kwonlyargs)
            if isinstance(kind := api().get(self._annotation(argument, contract)), type)
        }
        self.generic_visit(node)
        self._arguments = before

    @staticmethod
    def _annotation(argument: ast.arg, contract: dict[str, Any]) -> str:
        if argument.annotation is not None:
            return ast.unparse(argument.annotation)
        return str(contract.get(argument.arg, ""))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kind = self._arguments.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if kind is not None and node.attr not in members(kind):
            self.wrong.append(f"{kind.__name__} has no {node.attr}")
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and node.module.split(".")[0] in ("trencadis", "trencadis_testing"):
            module = importlib.import_module(node.module)
            self.wrong += [f"{node.module} has no {one.name}" for one in node.names if not hasattr(module, one.name)]

    def visit_Call(self, node: ast.Call) -> None:
        kind = api().get(node.func.id) if isinstance(node.func, ast.Name) else None
        if isinstance(kind, type) and attrs.has(kind):
            taken = set(inspect.signature(kind).parameters)
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            self.wrong += [f"{kind.__name__} takes no {name}" for name in sorted(given - taken)]
        self.generic_visit(node)


def unknown_names(code: str) -> list[str]:
    """Return what is wrong with the names of a block of Python. Pure."""
    names = Names()
    names.visit(ast.parse(code))
    return names.wrong


def test_records_and_views_have_what_blocks_read_of_them() -> None:
    assert not [
        f"{block.page}:{block.line}: {wrong}"
        for block in BLOCKS
        if block.language == "python" and not block.page.startswith("docs/decisions/")
        for wrong in unknown_names(block.text)
    ]


def test_a_wrong_name_would_be_found() -> None:
    for code, wrong in {
        "def order(view: SchedulerView): return view.arived": "SchedulerView has no arived",
        "class Mine(SchedulingPolicy):\n def order(self, view): return view.arived": "SchedulerView has no arived",
        "class Mine(SchedulingPolicy):\n def order(self, view): return view.arrival_s": "",
        "Lookup(ticket=3)": "Lookup takes no ticket",
        "from trencadis.interfaces import SchedulerVew": "trencadis.interfaces has no SchedulerVew",
    }.items():
        assert unknown_names(code) == [wrong] * bool(wrong)
    for text, wrong in {
        "SchedulerView.arrived": "SchedulerView has no arrived",
        "SchedulingPolicy.order(view)": "",
        "[kv_policy] fallback": "[kv_policy] has no fallback",
        "kv_connector.fallback": "[kv_connector] has no fallback",
        "[scheduling] fallback": "",
        "budget.kv_policy_ms": "",
    }.items():
        assert unknown_member(text) == wrong
