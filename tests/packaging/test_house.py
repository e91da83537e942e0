"""The counting functions of ``tools/house.py``, on small trees made up for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from house_source import (
    Feature,
    arrows_up,
    circles,
    feature_lines,
    fragments,
    import_graph,
    largest_class,
    num_lines,
    num_parameters,
    python_files,
)

Tree = Callable[[Mapping[str, str]], Path]


def _tool() -> Any:
    """Return ``tools/house.py`` as a module that is not called ``house``: plugins of other tests are."""
    path = Path(__file__).resolve().parents[2] / "tools" / "house.py"
    spec = importlib.util.spec_from_file_location("the_house_tool", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = _tool()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a folder of its own, and returns that."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_lines_and_files_are_counted_below_every_place_that_exists(tree: Tree):
    root = tree({"a/one.py": "1\n2\n", "a/b/two.py": "3\n", "a/notes.txt": "4\n", "c/three.py": ""})
    files = python_files(root / "a", root / "c", root / "nowhere")
    assert [file.name for file in files] == ["two.py", "one.py", "three.py"]
    assert num_lines(files) == 3


def test_an_import_leads_to_the_module_that_is_named_or_to_the_one_that_has_the_name(tree: Tree):
    root = tree(
        {
            "p/__init__.py": "",
            "p/a.py": "import os\nimport p.b\nfrom p import c\nfrom p.d import thing\nfrom . import e\nfrom .q import x\n",
            "p/b.py": "",
            "p/c.py": "",
            "p/d.py": "thing = 1",
            "p/e.py": "from q import other",
            "p/q/__init__.py": "x = 1",
            "p/q/r.py": "from ..b import y\nfrom . import x",
        }
    )
    graph = import_graph(root)
    assert graph["p.a"] == {"p.b", "p.c", "p.d", "p.e", "p.q"}
    assert graph["p.q.r"] == {"p.b", "p.q"}
    assert graph["p.e"] == set(), "another package, whatever its name"


def test_late_imports_and_those_for_type_checkers_count(tree: Tree):
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import b\ndef late():\n    from p import c\n"
    )
    root = tree({"p/__init__.py": "", "p/a.py": text, "p/b.py": "", "p/c.py": ""})
    assert import_graph(root)["p.a"] == {"p.b", "p.c"}


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({}, []),
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["a"]}, []),
        ({"a": ["b"], "b": ["a"]}, [["a", "b"]]),
        ({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a"]}, [["a", "b", "c"], ["d", "e"]]),
        ({"a": ["b", "elsewhere"], "b": ["c"], "c": ["b"]}, [["b", "c"]]),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, []),
    ],
)
def test_circles_are_strongly_connected_components(graph: Mapping[str, list[str]], found: list[list[str]]):
    assert circles(graph) == found


def test_a_long_chain_of_imports_needs_no_deep_stack():
    graph = {str(n): [str((n + 1) % 5000)] for n in range(5000)}
    assert [len(one) for one in circles(graph)] == [5000]


def test_an_arrow_climbs_where_a_room_imports_one_above_it():
    rooms = (("top",), ("left", "right"), ("low",))
    graph = {
        "x.e": ["x.e.top"],
        "x.e.top": ["x.e.low.one"],
        "x.e.left.a": ["x.e.right", "x.e.top"],
        "x.e.left.b": ["x.e.top"],
        "x.e.right": ["x.e.left.a"],
        "x.e.low.one": ["x.e.right", "x.other"],
        "x.other": ["x.e.top"],
    }
    assert arrows_up(graph, package="x.e", rooms=rooms) == [("left", "top"), ("low", "right")]


def test_a_room_without_a_place_in_the_order_is_an_error():
    with pytest.raises(ValueError, match=r"x\.e has rooms without a place in the order: attic"):
        arrows_up({"x.e.attic.a": [], "x.e.top": []}, package="x.e", rooms=(("top",),))


def test_lines_that_name_a_feature_count_outside_its_own_files(tree: Tree):
    root = tree(
        {
            "engine.py": "swap = 1\nother = 2\nuse(swap, swap)\n",
            "state.py": "other = 1\n",
            "cache/swapping.py": "swap\nswap\n",
            "cache/blocks.py": "# swapped out\n",
            "tenants.py": "tenant\n",
        }
    )
    features = {
        "swap": Feature("swap", ("cache/swapping.py",)),
        "tenants": Feature("tenant", ("tenants.py",)),
        "steady": Feature("other"),
    }
    assert feature_lines(root, features) == {"swap": (3, 2), "tenants": (0, 0), "steady": (2, 2)}


def test_fragments_are_counted_in_docstrings_alone(tree: Tree):
    root = tree(
        {
            "a.py": '''
"""A module.

Attributes:
    one: Of the engine.
    two: The engine's.
"""

x = """
    three: Of no docstring.
"""


class C:
    """A class.

    Args:
        one, two: What they are.
        **more: As given.
        four: Offices are no fragment.
    """

    async def f(self):
        """Return.

        Args:
            one: Its name.
        """
'''
        }
    )
    assert fragments(python_files(root)) == 4


def test_the_largest_class_is_that_with_most_functions_of_its_own(tree: Tree):
    root = tree(
        {
            "a.py": "class A:\n    x = 1\n    def a(self): ...\n    async def b(self): ...\n    class In:\n        def c(self): ...\n",
            "b.py": "class B:\n    def a(self):\n        def inner(): ...\n\ndef free(): ...\n",
        }
    )
    assert largest_class(python_files(root)) == (2, "A")
    assert largest_class([]) == (0, "")


def test_parameters_are_counted_without_self(tree: Tree):
    root = tree(
        {
            "a.py": "class A:\n    def __init__(self, a, /, b, *args, c=1, **more): ...\n    def f(self): ...\n\ndef g(x, *, y): ...\n"
        }
    )
    file = root / "a.py"
    names = ("A.__init__", "A.f", "g", "A.nothing", "Nobody.f")
    assert [num_parameters(file, function=name) for name in names] == [5, 0, 2, 0, 0]


# --------------------------------------------------------------------------------------------------------- rows


def test_a_row_is_missed_by_one_figure_and_by_what_cannot_be_measured():
    def breaks() -> tuple[int, ...]:
        raise RuntimeError("nothing was traced")

    assert house.Row("a", (2, 3), lambda: (2, 3)).line()[1]
    line, is_kept = house.Row("a: x / y", (2, 3), lambda: (2, 4_000), lambda: "more").line()
    assert not is_kept
    assert line.split()[-6:] == ["4,000", "2", "/", "3", "missed", "more"]
    line, is_kept = house.Row("a", (2,), breaks).line()
    assert not is_kept
    assert line.endswith("missed  RuntimeError: nothing was traced")


@pytest.mark.parametrize(("found", "status"), [([1, 2], 0), ([1, 3], 1), ([], 1)])
def test_the_check_fails_if_a_row_is_missed_or_there_is_none(
    found: list[int], status: int, capsys: pytest.CaptureFixture[str]
):
    rows = [house.Row("figure", (2,), lambda one=one: (one,)) for one in found]
    assert house.check(rows) == status
    assert f"{found.count(3)} of {len(found)} rows are missed." in capsys.readouterr().out


def test_what_traced_nothing_has_no_figures():
    calls = house.Calls()
    with calls.counting():
        sorted([2, 1], key=lambda one: one)  # no source of ours
    with pytest.raises(RuntimeError, match=r"nothing was traced: trencadis is imported from .*, not from "):
        calls.figures()


def test_a_decode_step_is_traced():
    num_calls, num_modules = house.decode_step()
    assert num_calls > num_modules > 5


def test_every_row_has_a_limit_for_each_figure_and_the_quick_ones_are_measured():
    slow = ("cases", "LLM.generate", "fragment")
    for row in house.rows():
        if not any(word in row.name for word in slow):
            found = row.measure()
            assert len(found) == len(row.limits), row.name
            assert row.limits == (0, 0, 0) or all(found), f"{row.name}: nothing is of no size"


def test_the_commands_that_run_tests_are_read_from_the_files_that_say_so():
    assert house.commands() == ["not nightly", "nightly"]
