"""What torch and transformers import beside a plain decoder's code, left out of a process that is Trencadís' own.

    torch._dynamo              for decorators alone            ─▶ a placeholder; when anything else of it is asked for,
    sympy, symbolic_shapes     to see that sizes are numbers   ─▶ the real one is imported in its place
    torch.distributed.tensor   for models that transformers divides, which a process of one rank does not do: as in a torch without it
    scipy.optimize             for losses of object detection: as where it is not installed

Together they are half of the time that a start takes. In a process of a user's own code, which may train or compile, nothing is left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["Placeholder", "import_transformers", "placeholder_for_dynamo", "placeholder_for_sympy"]

_DYNAMO: Final = "torch._dynamo"
_WRAPPED: Final = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_ABSENT: Final = "is_scipy_available", "is_torch_distributed_available"
_MODULES: Final = "modeling_utils", "masking_utils", "modeling_layers", "models.auto.modeling_auto"


def import_transformers() -> None:
    """Import what every decoder's code imports of transformers; does nothing where that was imported already."""
    if "transformers.modeling_utils" in sys.modules:
        return
    placeholder_for_dynamo()
    placeholder_for_sympy()
    utils = importlib.import_module("transformers.utils")
    with _absent(utils, utils.import_utils):
        for name in _MODULES:
            importlib.import_module(f"transformers.{name}")
    _fill_no_meta_tensors(importlib.import_module("torch.nn.init"))


def _fill_no_meta_tensors(init: Any) -> None:
    """Leave tensors without memory as they are where weights are drawn: there is nothing to draw."""
    fill = init._no_grad_normal_

    def filled(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor if tensor.is_meta else fill(tensor, *arguments, **options)

    init._no_grad_normal_ = filled


@contextlib.contextmanager
def _absent(*modules: types.ModuleType) -> Iterator[None]:
    """Have transformers find some packages missing while it is imported."""
    before = [(module, name, getattr(module, name)) for module in modules for name in _ABSENT if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, _is_absent)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _is_absent() -> bool:
    return False


def placeholder_for_sympy() -> None:
    """Put placeholders in the places of ``sympy``, whose one class has no instances, and of what torch asks about symbols.

    Does nothing where these were imported already.
    """
    if "sympy" in sys.modules or _SYMBOLS in sys.modules:
        return
    Placeholder("sympy", {"Basic": type("Basic", (), {})}).take_place()
    answers: dict[str, Any] = {}
    one = Placeholder(_SYMBOLS, answers)
    answers |= {name: _plainly(name, answer, one) for name, answer in _OF_NUMBERS.items()}
    one.__dict__.update(answers)
    one.take_place()


def _plainly(name: str, answer: Callable[..., Any], one: Placeholder) -> Callable[..., Any]:
    """Return a function of numbers, which leaves anything else to the real one."""

    def asked(*values: Any) -> Any:
        return answer(*values) if all(map(_is_plain, values)) else getattr(one.become_real(), name)(*values)

    return asked


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, or made of numbers alone. Pure."""
    return type(value) in (bool, int, float) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))


def _equal(one: Any, other: Any) -> bool:
    return tuple(one) == tuple(other) if isinstance(one, (tuple, list)) else bool(one == other)


def _same(value: Any) -> Any:
    return value


_SYMBOLS: Final = "torch.fx.experimental.symbolic_shapes"
_OF_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    "expect_true": _same,
    "guard_or_false": _same,
    "guard_or_true": _same,
    "guarding_hint_or_throw": _same,
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "statically_known_true": bool,
    "sym_and": lambda *values: functools.reduce(operator.and_, values),
    "sym_eq": _equal,
    "sym_or": lambda *values: functools.reduce(operator.or_, values),
}
"""What functions about symbols answer for numbers. Source: ``torch/fx/experimental/symbolic_shapes.py``."""


def placeholder_for_dynamo() -> None:
    """Put a placeholder in the place of ``torch._dynamo``, which notes what it decorates; does nothing where that was imported already."""
    if _DYNAMO in sys.modules:
        return
    notes = _Notes()
    wrapped = types.ModuleType(_WRAPPED)
    one = Placeholder(_DYNAMO, notes.decorators, modules={_WRAPPED: wrapped}, then=notes.apply)

    def index() -> Any:
        one.become_real()
        return importlib.import_module(_WRAPPED).TransformGetItemToIndex()

    wrapped.TransformGetItemToIndex = index  # type: ignore[attr-defined]
    one.take_place()


class _Notes:
    """What decorators of ``torch._dynamo`` were given."""

    def __init__(self) -> None:
        self._given: list[tuple[str, Any]] = []
        self._disabled: list[Any] = []
        self.decorators: dict[str, Any] = {"disable": self._disable}
        for name in ("allow_in_graph", "assume_constant_result"):
            self.decorators[name] = self._noting(name)

    def _noting(self, name: str) -> Callable[[Any], Any]:
        def note(function: Any) -> Any:
            self._given.append((name, function))
            return function

        return note

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return the function as it is: as long as nothing compiles there is nothing to disable."""
        if function is None:
            return self._disable
        self._disabled.append(function)
        return function

    def apply(self, real: Any) -> None:
        """Give all to the real module."""
        for function in self._disabled:
            getattr(function, "__dict__", {}).pop("__dynamo_disable", None)  # torch keeps there what it was given
        for name, function in self._given:
            getattr(real, name)(function)


class Placeholder(types.ModuleType):
    """Has a few names of a package; anything else of it, and any of its modules, imports the package in its place.

    Args:
        name: The package, such as ``sympy``.
        given: Names that it answers without the package, with their values.
        modules: Placeholders for its modules.
        then: Called with the package once it is imported.
    """

    def __init__(
        self,
        name: str,
        given: Mapping[str, Any],
        *,
        modules: Mapping[str, types.ModuleType] = types.MappingProxyType({}),
        then: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._modules = {name: self, **modules}
        self._then = then
        self._finder = _Finder(name, self)
        self.__dict__.update(given)

    def take_place(self) -> None:
        """Let imports find it."""
        parent, _, last = self.__name__.rpartition(".")
        if parent and self.__name__ != _DYNAMO:  # torch finds that one by its name whenever it is asked for
            setattr(importlib.import_module(parent), last, self)
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)

    def become_real(self) -> Any:
        """Return the package, imported in the place of this one."""
        name = self.__name__
        if sys.modules.get(name) is self:
            sys.meta_path.remove(self._finder)
            for module in self._modules:
                del sys.modules[module]
            self._then(importlib.import_module(name))
        return sys.modules[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by those who look through all of them
            raise AttributeError(name)
        return getattr(self.become_real(), name)


class _Finder:
    """Imports the real package when one of its modules is asked for."""

    def __init__(self, name: str, one: Placeholder) -> None:
        self._prefix, self._one = f"{name}.", one

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return how a module of the package is loaded; None: it is of another one."""
        if not name.startswith(self._prefix):
            return None
        real = self._one.become_real()
        if name in sys.modules:
            return importlib.machinery.ModuleSpec(name, _Loaded(sys.modules[name]))  # type: ignore[arg-type]
        return importlib.machinery.PathFinder.find_spec(name, real.__path__)


class _Loaded:
    """Gives a module that the import of its package has loaded."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return it."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it as it is."""
        module.__spec__ = self._spec
