"""Questions that an operator asks an engine: tables of plain values, the same whether the engine is in this process or in another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.errors import InternalError, InvalidRequestError, TrencadisError

__all__ = ["answered"]

logger = logging.getLogger("trencadis.engine")

_OF_REPLICAS = frozenset({"replicas", "restart_replica", "route"})


def answered(
    question: str, arguments: Mapping[str, Any], answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]
) -> dict[str, Any]:
    """Return the answer to a question.

    Args:
        question: Such as ``scheduling``.
        arguments: Further parts of the question, by name.
        answers: Answers by question.

    Raises:
        InvalidRequestError: No such question.
        TrencadisError: An answer raised it; an ``InternalError`` stands for anything else.
    """
    answer = answers.get(question)
    if answer is None:
        if question in _OF_REPLICAS:
            raise InvalidRequestError("there is one engine only.", hint="Set parallel.data for several.")
        raise InvalidRequestError(f"there is no question {question!r}.")
    try:
        return answer(arguments)
    except TrencadisError:
        raise
    except Exception as error:  # a question must not end the engine
        logger.exception("The question %r could not be answered.", question)
        raise InternalError(f"{question} could not be answered: {type(error).__name__}: {error}.") from error
