"""Checks of the numbers that the settings of several programs have."""

from collections.abc import Iterable
from typing import Any

from estimator_accum.programs.batches import AUTO

_REMEDIES = {"gradient_accumulation_steps": "Use 1 to turn accumulation off."}


def check_positive(settings: Any, fields: Iterable[str]) -> None:
    """Raises ValueError unless numbers are above 0, and at most 2**31 - 1 or 1e9.

    Args:
        settings: An object whose fields are flags of the same names.
        fields: Names of fields; None and `AUTO` are values that are always valid.
    """
    for field in fields:
        value = getattr(settings, field)
        if value is None or value == AUTO:
            continue
        most = 2**31 - 1 if isinstance(value, int) else 1e9
        if not 0 < value <= most:
            kind = "an integer >= 1" if isinstance(value, int) else "a number > 0"
            if value > most:
                kind += f" and <= {most:.10g}"
            remedy = _REMEDIES.get(field, "See --help for the usual value.")
            raise ValueError(f"`--{field}` must be {kind}. Received: {value}. {remedy}")


def check_seed(seed: int) -> None:
    """Raises ValueError unless TensorFlow and NumPy take the number as a seed."""
    if not 0 <= seed < 2**31:
        raise ValueError(
            f"`--seed` must be an integer >= 0 and < 2**31. Received: {seed}. Use 0."
        )
