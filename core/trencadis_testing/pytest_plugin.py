"""Fixtures and the options of the suites; pytest finds them through the entry point ``trencadis`` of ``pytest11``.

pytest imports this module in every run on a machine that has Trencadís installed, so it imports nothing of it: each
fixture does, when a test asks for it, and the option when it is used.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trencadis.clock import SimulatedClock
    from trencadis.registry import Registry
    from trencadis_testing.fakes import FakeBackend

__all__ = [
    "fake_backend",
    "kv_connector_options",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "simulated_clock",
    "trencadis_registry",
]

_OPTION = "trencadis_conform"
_KV_OPTION = "trencadis_kv_connector"
_KV_TARGET = "kv_connector_target"
_MOST_CAUSES = 8
_SHORT = ("scheduling", "eviction")
"""Nouns with an option of their own. The others' names are too common: another plugin may have an option ``--backend``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("trencadis")
    group.addoption(
        "--trencadis-conform",
        dest=_OPTION,
        action="append",
        default=[],
        metavar="NOUN=TARGET[,KEY=VALUE...]",
        help="run a noun's conformance suite against package.module:Class or an installed component; may be repeated. "
        "KEY=VALUE: an option of the component, or suite.ATTRIBUTE=VALUE. Without paths nothing else is collected.",
    )
    for noun in _SHORT:
        group.addoption(
            f"--{noun}",
            dest=_OPTION,
            action="append",
            type=f"{noun}={{}}".format,
            metavar="TARGET[,KEY=VALUE...]",
            help=f"the same as --trencadis-conform {noun}=TARGET",
        )
    group.addoption(
        "--kv-connector",
        dest=_KV_OPTION,
        action="append",
        default=[],
        metavar="TARGET[,KEY=VALUE...]",
        help="run the KV connector suites against it: those of the collected modules that take the fixture "
        f"{_KV_TARGET}; where there are none, the same as --trencadis-conform kv_connector=TARGET",
    )
    group.addoption(
        "--trencadis-all-histories",
        dest="trencadis_all_histories",
        action="store_true",
        help="run all random histories of the scheduling suite, half a minute or more for each policy, and not only the first few",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect nothing else if the command line names no path."""
    if (
        config.getoption(_OPTION) or config.getoption(_KV_OPTION)
    ) and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the suites that were asked for, before ``-k`` and its like choose."""
    values = [*config.getoption(_OPTION)]
    if not any(_KV_TARGET in getattr(item, "fixturenames", ()) for item in items):
        values += [f"kv_connector={value}" for value in config.getoption(_KV_OPTION)]
    if values:
        from trencadis_testing.conform import items_of

        items.extend(items_of(session, values))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run suites of KV connectors against what the option names, else against their own ``targets``."""
    if _KV_TARGET in metafunc.fixturenames:
        values = metafunc.config.getoption(_KV_OPTION) or getattr(metafunc.cls, "targets", ())
        metafunc.parametrize(_KV_TARGET, values)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a suite's test on one thread of torch; add the names that there are to an error for a member that a record does not have."""
    try:
        with _one_thread() if _is_of_suite(item) else contextlib.nullcontext():
            return (yield)
    except Exception as error:
        _list_members(error)
        raise


def _is_of_suite(item: pytest.Item) -> bool:
    bases = getattr(getattr(item, "cls", None), "__mro__", ())
    return any(base.__module__.startswith("trencadis_testing.") for base in bases)


@contextlib.contextmanager
def _one_thread() -> Generator[None, None, None]:
    """Keep torch, where it is loaded, to one thread: for the small tensors of a suite more take ten times as long on a busy machine."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _list_members(error: BaseException) -> None:
    """Add a note to each error, causes included, for a member of a record or a view that does not exist."""
    from trencadis.faults import members_for

    current: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if current is None:
            return
        members = members_for(current)
        if members:
            current.add_note(members)
        current = current.__cause__ or current.__context__


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a suite's failed test the rule that was broken, and the page that explains it."""
    report = yield
    if report.failed and report.when == "call":
        rule = _rule_of(item)
        if rule:
            report.sections.append(("Rule of the contract", rule))
    return report


def _rule_of(item: pytest.Item) -> str:
    """Return the rule that a conformance suite's test holds, and its page; empty for any other test."""
    name = getattr(item, "originalname", "")
    for base in getattr(getattr(item, "cls", None), "__mro__", ()):
        if name in vars(base):
            package, _, suite = base.__module__.rpartition(".")
            if package not in ("trencadis_testing", "trencadis_kv.testing"):
                return ""
            from trencadis.hookspecs import NOUNS

            nouns = sorted((*NOUNS, "kv_codec", "kv_policy", "stage"), key=len, reverse=True)
            noun = next((noun for noun in nouns if suite.startswith(noun)), "kv_connector")
            sentence = name.removeprefix("test_").replace("_", " ")
            return f"{sentence}: {inspect.getdoc(vars(base)[name])}\nSee docs/plugins/{noun}.md."
    return ""


@pytest.fixture
def kv_connector_options(kv_connector_target: str) -> dict[str, object]:
    """Options of the KV connector under test; override it to start a server, or to make a directory, for those that need one.

    Returns:
        Values by name, as in the connector's config table; those on the command line stand above them.
    """
    return {}


@pytest.fixture
def simulated_clock() -> SimulatedClock:
    """A clock at 0 s that moves only when told to."""
    from trencadis.clock import SimulatedClock

    return SimulatedClock()


@pytest.fixture
def trencadis_registry() -> Registry:
    """A registry that discovered nothing: no installed plugin, not even a built-in one, can change the test."""
    from trencadis.registry import Registry

    return Registry.discover(entry_points=())


@pytest.fixture
def fake_backend() -> FakeBackend:
    """A backend without a model: its tokens are a known function of what it was given."""
    from trencadis_testing.fakes import FakeBackend

    return FakeBackend()
