"""Count what can be read off source files: lines, imports between rooms and on circles, lines that name a feature, members, fragments.

All functions are pure but for reading files below the places that they are given, and work on any tree.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

__all__ = [
    "ENGINE_ROOMS",
    "FEATURES",
    "Feature",
    "arrows_up",
    "circles",
    "feature_lines",
    "fragments",
    "import_graph",
    "largest_class",
    "num_lines",
    "num_parameters",
    "python_files",
]

_CONTRACTS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]

ENGINE_ROOMS: tuple[tuple[str, ...], ...] = tuple(
    tuple(row.split(" : "))
    for row in next(one["layers"] for one in _CONTRACTS if one.get("containers") == ["trencadis.engine"])
)
"""Rooms of the engine, top to bottom, as the import contract has them: those of one row stand side by side."""


@attrs.frozen
class Feature:
    """What a configuration can leave out.

    Attributes:
        words: Regular expression; a line that matches names the feature.
        own: Beginnings of the paths, below the engine, of files that are the feature's own.
    """

    words: str
    own: tuple[str, ...] = ()


FEATURES: Mapping[str, Feature] = {
    "speculation": Feature(r"draft|speculat|\btree"),
    "KV transfer": Feature(
        r"transfers?\b|connector|first_tokens?\b|FirstToken|remote_prefill|remote_kv|layered|layerwise|[Ll]ookup"
        r"|loaded_blocks|num_loaded|handover",
    ),
    "swap": Feature(r"swap|host_block|hosted"),
    "partitions, pipeline": Feature(
        r"partition|pipelin|attention_ranks|may_run",
    ),
    "flight recorder, restore": Feature(
        r"recorder|flight_|flight record|key_frame|[Ff]ramed|\brestored?\b",
    ),
    "steady steps": Feature(r"steady|OpenStep|num_steps|_open\b|_opened|opens_steps|went_on|goes_on"),
    "LoRA places": Feature(r"adapter|lora", ("scheduling/adapters.py",)),
    "shadow, switch, explain": Feature(
        r"shadow|[Ss]witch(?!_o|es_off|ed[ _]off)|explain|decisions?\b|\bnotes\b|StepNotes",
    ),
    "tenants": Feature(r"tenant"),
    "preparation, embedding, deferred warm-up": Feature(
        r"preparation|compiling|[Ee]mbed|background|deferred|behind_step"
    ),
    "defragmenter": Feature(r"[Dd]efrag"),
}
"""Features of the engine."""

_FRAGMENT = re.compile(r"\s+\*{0,2}\w+(?:, \*{0,2}\w+)*: (?:Of|What|As|Its)\b")


def python_files(*places: Path) -> list[Path]:
    """Return the Python files below the places that exist."""
    return sorted(file for place in places for file in place.rglob("*.py"))


def num_lines(files: Iterable[Path]) -> int:
    """Return the number of lines of files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


# ------------------------------------------------------------------------------------------------------ imports


def import_graph(*roots: Path) -> dict[str, set[str]]:
    """Return what each module imports of the others, late imports and those for type checkers alone included.

    ``from a import b`` is an import of the module ``a.b`` if there is one, else of ``a``.

    Args:
        roots: Folders that hold top-level packages.
    """
    modules: dict[str, Path] = {}
    for root in roots:
        for file in python_files(root):
            parts = file.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: set(_imports(name, file, modules)) - {name} for name, file in modules.items()}


def _imports(name: str, file: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in modules or base in modules:
                    yield full if full in modules else base


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the circles of imports: strongly connected components of at least two modules, each sorted.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", SIAM Journal on Computing 1 (1972); without recursion.
    """
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in graph:
        if root in number:
            continue
        todo: list[tuple[str, Iterator[str]]] = [_visit(root, graph, number, low, stack)]
        while todo:
            name, others = todo[-1]
            for other in others:
                if other not in number:
                    todo.append(_visit(other, graph, number, low, stack))
                    break
                if other in stack:
                    low[name] = min(low[name], number[other])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[name])
                if low[name] == number[name]:
                    place = stack.index(name)
                    if len(stack) - place > 1:
                        found.append(sorted(stack[place:]))
                    del stack[place:]
    return sorted(found)


def _visit(
    name: str, graph: Mapping[str, Iterable[str]], number: dict[str, int], low: dict[str, int], stack: list[str]
) -> tuple[str, Iterator[str]]:
    number[name] = low[name] = len(number)
    stack.append(name)
    return name, iter([other for other in graph.get(name, ()) if other in graph])


def arrows_up(
    graph: Mapping[str, Iterable[str]], *, package: str, rooms: Sequence[Sequence[str]] = ENGINE_ROOMS
) -> list[tuple[str, str]]:
    """Return the pairs of rooms of a package of which the first imports the second, which stands above it, sorted.

    Args:
        graph: Of :func:`import_graph`.
        package: Such as ``trencadis.engine``: its modules and folders are the rooms.
        rooms: Their names, top to bottom.

    Raises:
        ValueError: A room has no place.
    """
    places = {name: place for place, row in enumerate(rooms) for name in row}
    prefix = f"{package}."
    own = {name: name.removeprefix(prefix).partition(".")[0] for name in graph if name.startswith(prefix)}
    unplaced = sorted(set(own.values()) - places.keys())
    if unplaced:
        raise ValueError(f"{package} has rooms without a place in the order: {', '.join(unplaced)}")
    pairs = {(own[name], own[other]) for name in own for other in graph[name] if other in own}
    return sorted((low, high) for low, high in pairs if places[high] < places[low])


# --------------------------------------------------------------------------------------------------------- text


def feature_lines(engine: Path, features: Mapping[str, Feature] = FEATURES) -> dict[str, tuple[int, int]]:
    """Return, by feature, how many lines of the engine name it outside its own files, and in how many files they are.

    Args:
        engine: The folder.
        features: By name.
    """
    texts = {
        file.relative_to(engine).as_posix(): file.read_text(encoding="utf-8").splitlines()
        for file in python_files(engine)
    }
    found = {}
    for name, feature in features.items():
        words = re.compile(feature.words)
        counts = [
            sum(words.search(line) is not None for line in lines)
            for path, lines in texts.items()
            if not path.startswith(feature.own or ("\0",))
        ]
        found[name] = sum(counts), sum(count > 0 for count in counts)
    return found


def fragments(files: Iterable[Path]) -> int:
    """Return how many lines of arguments and attributes in docstrings begin with a fragment: Of, What, As or Its."""
    count = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node, clean=False) or ""
                count += sum(_FRAGMENT.match(line) is not None for line in text.splitlines())
    return count


def largest_class(files: Iterable[Path]) -> tuple[int, str]:
    """Return the most members that a class has, functions that its body defines, and its name."""
    classes = [
        (sum(isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) for one in node.body), node.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    return max(classes, default=(0, ""))


def num_parameters(file: Path, *, function: str) -> int:
    """Return how many parameters a function has, ``self`` not counted; 0 if it is not there.

    Args:
        file: Where it is.
        function: Its name, or ``Class.name``.
    """
    owner, _, name = function.rpartition(".")
    scope: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    if owner:
        scope = next(
            (n for n in ast.walk(scope) if isinstance(n, ast.ClassDef) and n.name == owner), ast.Module([], [])
        )
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            given = node.args
            named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            return len([one for one in named if one != "self"]) + sum(
                one is not None for one in (given.vararg, given.kwarg)
            )
    return 0
