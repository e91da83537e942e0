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


def test_lines_files_and_lines_that_name_a_feature_outside_its_own_files_are_counted(tree: Tree):
    root = tree(
        {
            "engine.py": "swap = 1\nother = 2\nuse(swap, swap)\n",
            "cache/swapping.py": "swap\nswap\n",
            "cache/blocks.py": "# swapped out\n",
            "tenants.py": "tenant\n",
            "notes.txt": "swap\n",
        }
    )
    files = python_files(root / "cache", root / "tenants.py", root / "nowhere")
    assert [file.name for file in files][:2] == ["blocks.py", "swapping.py"]
    assert num_lines(python_files(root / "cache")) == 3
    features = {
        "swap": Feature("swap", ("cache/swapping.py",)),
        "tenants": Feature("tenant", ("tenants.py",)),
        "steady": Feature("other"),
    }
    assert feature_lines(root, features) == {"swap": (3, 2), "tenants": (0, 0), "steady": (1, 1)}


def test_an_import_leads_to_the_module_that_is_named_or_to_the_one_that_has_the_name_late_ones_too(tree: Tree):
    root = tree(
        {
            "p/__init__.py": "",
            "p/a.py": "import os\nimport p.b\nfrom p import c\nfrom p.d import thing\nfrom . import e\nfrom .q import x\n",
            "p/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import d\ndef late():\n    from p import c\n",
            "p/c.py": "",
            "p/d.py": "thing = 1",
            "p/e.py": "from q import other",  # another package, whatever its name
            "p/q/__init__.py": "x = 1",
            "p/q/r.py": "from ..b import y\nfrom . import x",
        }
    )  # fmt: skip
    graph = import_graph(root)
    assert graph["p.a"] == {"p.b", "p.c", "p.d", "p.e", "p.q"}
    assert (graph["p.b"], graph["p.q.r"], graph["p.e"]) == ({"p.c", "p.d"}, {"p.b", "p.q"}, set())


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, []),
        ({"a": ["a"], "b": ["a"]}, []),
        ({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a"]}, [["a", "b", "c"], ["d", "e"]]),
        ({"a": ["b", "elsewhere"], "b": ["c"], "c": ["b"]}, [["b", "c"]]),
        ({str(n): [str((n + 1) % 5000)] for n in range(5000)}, [sorted(map(str, range(5000)))]),  # no deep stack
    ],
)
def test_circles_are_strongly_connected_components(graph: Mapping[str, list[str]], found: list[list[str]]):
    assert [sorted(one) for one in circles(graph)] == found


def test_an_arrow_climbs_where_a_room_imports_one_above_it_and_every_room_has_a_place():
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
    with pytest.raises(ValueError, match=r"x\.e has rooms without a place in the order: attic"):
        arrows_up({"x.e.attic.a": [], "x.e.top": []}, package="x.e", rooms=(("top",),))


def test_fragments_are_counted_in_docstrings_alone(tree: Tree):
    lines = "        one, two: What they are.\n        **more: As given.\n        four: Offices are no fragment.\n"
    method = f'    async def f(self):\n        """F.\n\n        Args:\n{lines}        """\n'
    text = (
        f'"""A.\n\nArgs:\n{lines}"""\nx = """\n{lines}"""\nclass C:\n    """C.\n\n    Args:\n{lines}    """\n{method}'
    )
    assert fragments(python_files(tree({"a.py": text}))) == 6


def test_the_largest_class_has_most_functions_of_its_own_and_parameters_are_counted_without_self(tree: Tree):
    inner = "    class In:\n        def c(self): ...\n"
    root = tree(
        {
            "a.py": f"class A:\n    def __init__(self, a, /, b, *args, c=1, **more): ...\n    async def f(self): ...\n{inner}",
            "b.py": "class B:\n    def a(self):\n        def inner(): ...\n\ndef g(x, *, y): ...\n",
        }
    )
    assert largest_class(python_files(root)) == (2, "A")
    assert largest_class([]) == (0, "")
    asked = [("a.py", "A.__init__"), ("a.py", "A.f"), ("b.py", "g"), ("a.py", "A.nothing"), ("a.py", "Nobody.f")]
    assert [num_parameters(root / file, function=name) for file, name in asked] == [5, 0, 2, 0, 0]


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
    assert house.check([house.Row("figure", (2,), lambda one=one: (one,)) for one in found]) == status
    assert f"{found.count(3)} of {len(found)} rows are missed." in capsys.readouterr().out


def test_a_decode_step_is_traced_and_what_traced_nothing_has_no_figures():
    num_calls, num_modules = house.decode_step()
    assert num_calls > num_modules > 5
    calls = house.Calls()
    with calls.counting():
        sorted([2, 1], key=lambda one: one)  # no source of ours
    with pytest.raises(RuntimeError, match=r"nothing was traced: trencadis is imported from .*, not from "):
        calls.figures()


@pytest.mark.nightly
def test_every_row_has_a_limit_for_each_figure_and_the_quick_ones_are_measured():
    for row in house.rows():
        if not any(word in row.name for word in ("cases", "LLM.generate", "fragment")):
            found = row.measure()
            assert len(found) == len(row.limits), row.name
            assert row.limits == (0, 0, 0) or all(found), f"{row.name}: nothing is of no size"


def test_the_commands_that_run_tests_are_read_from_the_files_that_say_so():
    assert house.commands() == ["not nightly", "nightly"]
