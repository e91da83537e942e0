"""Flag ``--rate`` of commands that send requests: requests per second."""

from __future__ import annotations

import argparse

__all__ = ["add_rate"]


def add_rate(parser: argparse._ActionsContainer, *, several: bool = False) -> None:
    """Add ``--rate`` (alias ``--rates``): None or a number, with ``several`` a list of numbers.

    Args:
        parser: Parser of the command, or a group in it.
        several: Whether the flag takes a list of rates.
    """
    flags = ("--rate", "--rates")
    if several:
        parser.add_argument(
            *flags,
            type=_rates,
            default=[],
            metavar="A,B,...",
            help="requests a second, each rate one comparison (default: the workload's)",
        )
        return
    parser.add_argument(*flags, type=_rate, metavar="R", help="requests a second (default: the workload's)")


def _rates(text: str) -> list[float]:
    """Return several rates.

    Raises:
        argparse.ArgumentTypeError: The text is not a list of rates.
    """
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is no rate. Write requests a second: 1,2,4') from None


def _rate(text: str) -> float:
    """Return one rate.

    Raises:
        argparse.ArgumentTypeError: The text is not one rate.
    """
    rates = _rates(text)
    if len(rates) != 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not one rate. trencadis compare takes several')
    return rates[0]
