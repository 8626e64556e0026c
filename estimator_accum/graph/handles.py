"""Writes of a variable inside of the functions that get its handle."""

import collections
from collections.abc import Collection, Iterator

from estimator_accum.graph.functions import functions_of, nodes_of, producer_of
from estimator_accum.graph.names import BRANCHES, CALLERS, LOOPS, PASSING, READERS
from estimator_accum.graph.walks import walk


class Ways:
    """Ways from operations to the writes of a variable in their functions.

    Args:
        library: Definitions of functions by name.
        is_write: Function of a node that returns whether it may write a variable.
        readers: Types of operations that end no way.
    """

    def __init__(self, library: dict, is_write, readers: Collection[str] = READERS):
        self._library = library
        self._is_write = is_write
        self._readers = readers
        self._users = {}  # by function: the nodes that read each tensor

    def to_writes(self, node, place: int) -> Iterator[list]:
        """Yields the ways from an operation on.

        Args:
            node: Node of an operation that calls functions.
            place: Number of its input that is the variable's handle.

        Returns:
            Each way is (node, function that it calls) pairs, from `node` on, and a pair
            of the node that may write and None. Where a handle cannot be followed, each
            node that may write any variable ends a way.
        """
        return self._of(node, place, [])

    def _of(self, node, place: int, way: list):
        """Yields ways; returns the numbers of the node's results that are the handle.

        Args:
            node: A node that gets the handle.
            place: Number of its input that is the handle.
            way: The way to the node.
        """
        returned, names = set(), functions_of(node)
        if node.op in self._readers:
            return returned
        if not names and node.op not in self._library:
            yield [*way, (node, None)]
            return returned
        first = 1 if node.op in BRANCHES else 0
        for name in names if node.op in CALLERS else ():
            if name in self._library:
                function = self._library[name]
                inner = [*way, (node, function)]
                returned |= yield from self._in(function, place - first, inner)
        is_carried = node.op in LOOPS and returned == {place}
        if node.op not in CALLERS or (returned and not is_carried):
            yield from self._anywhere(node, way)
        return returned

    def _in(self, function, place: int, way: list):
        """Yields ways; returns the numbers of a function's results, as `_of` does."""
        argument = function.signature.input_arg[place].name
        returned, handles, waiting = set(), {argument}, [argument]
        users = self._users_in(function)
        while waiting:
            for node, i in users[waiting.pop()]:
                if node is None:
                    returned.add(i)
                    passed = set()
                elif node.op in PASSING:
                    passed = {node.name}
                else:
                    results = yield from self._of(node, i, way)
                    passed = {f"{node.name}:output:{result}" for result in results}
                waiting += sorted(passed - handles)
                handles |= passed
        return returned

    def _users_in(self, function) -> dict:
        """Returns (node, number of the input) pairs by the node or tensor that is read.

        For the function's results, (None, number of the result).
        """
        name = function.signature.name
        if name not in self._users:
            users = self._users[name] = collections.defaultdict(list)
            results = [function.ret[a.name] for a in function.signature.output_arg]
            reads = [(None, results), *((n, n.input) for n in function.node_def)]
            for node, inputs in reads:
                for i, read in enumerate(inputs):
                    for key in {producer_of(read), read}:
                        users[key].append((node, i))
        return self._users[name]

    def _anywhere(self, node, way: list) -> Iterator[list]:
        inside = nodes_of([*functions_of(node), node.op], self._library)
        writing = [inner for inner in inside if self._is_write(inner)]
        if writing:
            yield [*way, (node, None)]


def places_behind(way: list, is_varying) -> set[int] | None:
    """Returns the numbers of the inputs of a way's first node that decide its write.

    Args:
        way: A way of `Ways`.
        is_varying: Function of a node in a function that returns whether its results
            are not those of its inputs.

    Returns:
        None if such a node decides the write too.
    """
    inner, _ = way[-1]
    places = range(len(_values(inner)))  # also the handle, which a branch may choose
    for node, function in reversed(way[:-1]):
        nodes = {other.name: other for other in function.node_def}

        def producers(name: str, nodes=nodes) -> list[str]:
            return (
                [producer_of(r) for r in _values(nodes[name])] if name in nodes else []
            )

        needed = walk([producer_of(_values(inner)[i]) for i in places], producers)
        if any(is_varying(nodes[name]) for name in needed if name in nodes):
            return None
        first = 1 if node.op in BRANCHES else 0
        arguments = enumerate(function.signature.input_arg)
        places = {i + first for i, argument in arguments if argument.name in needed}
        if first:
            places.add(0)
        if node.op in LOOPS:
            places = set(range(len(_values(node))))
        inner = node
    return set(places)


def _values(node) -> list[str]:
    return [name for name in node.input if not name.startswith("^")]
