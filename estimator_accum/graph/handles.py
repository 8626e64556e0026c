"""Writes of a variable inside of the functions that get its handle."""

from collections.abc import Iterator

from estimator_accum.graph.functions import functions_of, nodes_of, producer_of
from estimator_accum.graph.names import BRANCHES, CALLERS, LOOPS, PASSING, READERS
from estimator_accum.graph.walks import walk


def writes_inside(node, place: int, library: dict, is_write) -> Iterator[list]:
    """Yields the ways from an operation to the writes of a variable in its functions.

    Args:
        node: Node of an operation that calls functions.
        place: Number of its input that is the variable's handle.
        library: Definitions of functions by name.
        is_write: Function of a node that returns whether it may write a variable.

    Returns:
        Each way is (node, function that it calls) pairs, from `node` on, and a pair of
        the node that may write and None. Where a handle cannot be followed, each node
        that may write any variable ends a way.
    """
    return _Ways(library, is_write).of(node, place, [])


class _Ways:
    def __init__(self, library: dict, is_write):
        self._library = library
        self._is_write = is_write
        self._seen = set()  # arguments of functions

    def of(self, node, place: int, way: list) -> Iterator[list]:
        if node.op in READERS:
            return
        names = functions_of(node)
        if not names and node.op not in self._library:
            yield [*way, (node, None)]
            return
        first = 1 if node.op in BRANCHES else 0
        for name in names if node.op in CALLERS else ():
            if name in self._library:
                function = self._library[name]
                yield from self._in(function, place - first, [*way, (node, function)])
        if node.op not in CALLERS:
            yield from self._anywhere(node, way)

    def _in(self, function, place: int, way: list) -> Iterator[list]:
        argument = function.signature.input_arg[place].name
        if (function.signature.name, argument) in self._seen:
            return
        self._seen.add((function.signature.name, argument))
        handles, caller = {argument}, way[-1][0]
        results = [function.ret[a.name] for a in function.signature.output_arg]
        waiting = [argument]
        while waiting:
            name = waiting.pop()
            places = [i for i, read in enumerate(results) if producer_of(read) == name]
            if places and not (caller.op in LOOPS and places == [place]):
                yield from self._anywhere(caller, way[:-1])
            for node in function.node_def:
                for i, read in enumerate(node.input):
                    if producer_of(read) != name:
                        continue
                    if node.op not in PASSING:
                        yield from self.of(node, i, way)
                    elif node.name not in handles:
                        handles.add(node.name)
                        waiting.append(node.name)

    def _anywhere(self, node, way: list) -> Iterator[list]:
        inside = nodes_of([*functions_of(node), node.op], self._library)
        writing = [inner for inner in inside if self._is_write(inner)]
        if writing:
            yield [*way, (node, None)]


def places_behind(way: list, is_varying) -> set[int] | None:
    """Returns the numbers of the inputs of a way's first node that decide its write.

    Args:
        way: A way of `writes_inside`.
        is_varying: Function of a node in a function that returns whether its results
            are not those of its inputs.

    Returns:
        None if such a node decides the write too.
    """
    inner, _ = way[-1]
    places = range(len(_values(inner)))
    if not functions_of(inner):
        places = places[1:]  # not the handle
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
