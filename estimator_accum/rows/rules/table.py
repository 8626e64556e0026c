"""Table of the rules, by type of operation."""

from collections.abc import Callable

RULES: dict[str, Callable] = {}
# Rules that also take fixed and mixed inputs.
RULES_OF_ANY: dict[str, Callable] = {}
# Rules of lists of entries; they return None where the others hold.
RULES_OF_ENTRIES: dict[str, Callable] = {}
# Rules of row splits of lists of entries.
RULES_OF_SPLITS: dict[str, Callable] = {}
# Rules of what is computed from mixed tensors; they return None where it is mixed.
RULES_OF_MIXED: dict[str, Callable] = {}


def rule(*types: str, table: dict[str, Callable] = RULES):
    """Makes a function the rule of types of operations."""

    def register(function):
        if twice := table.keys() & set(types):
            raise ValueError(
                "A type of operation must have one rule. Received: "
                f"{', '.join(sorted(twice))} twice. Leave one of them out."
            )
        table.update(dict.fromkeys(types, function))
        return function

    return register
