"""Expressions that two graphs compute for a batch of static size.

    tf.reshape(x, [tf.shape(x)[0], 4])  =  tf.reshape(x, [8, 4])    of 8 examples

Each operation is made again in a graph where the batch has its static size, so that
TensorFlow infers shapes, and values that depend on sizes alone. Tensors with equal
numbers are the same computation: of the same type and attributes, from equal inputs.
"""

import collections
import functools
import hashlib
import inspect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.computations import settings_of
from estimator_accum.graph.functions import functions_by_attribute, graphs_called
from estimator_accum.graph.internals import (
    create_like,
    is_stateful,
    python_function_of,
    static_value,
)
from estimator_accum.graph.lists import (
    OF_LISTS,
    common_shape,
    is_same_shape,
    list_shape,
)
from estimator_accum.graph.names import (
    BRANCHES,
    CALLERS,
    CALLS,
    CONTROL_FLOW_V1,
    FED,
    LOOPS,
    PYTHON,
    READERS,
    SHAPES,
    VARIABLES,
    WRITERS_OF_TABLES,
)
from estimator_accum.graph.walks import data_ancestors, in_order, origin_of, walk
from estimator_accum.graph.writers import is_reference, writes

_MOST_NUMBERS = 1_000  # of a value that is computed here
_SIMPLE = (bool, bytes, complex, float, int, str)
# Operations whose result has the elements of the first input, in their order, if it has
# as many.
_KEEPING = {
    "BroadcastTo",
    "ExpandDims",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Tile",
}
_REDUCTIONS = {"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"}
_KEEPING |= _REDUCTIONS
# Those of whose inputs the order does not matter, such as gradients that are added.
_OF_ANY_ORDER = {"Add", "AddN", "AddV2", "Mul"}
_FILLS = {"ZerosLike": 0, "OnesLike": 1}
_SAME = {"EnsureShape", "Identity"}
# Attributes that only claim a shape, which the tensors have; one is an input as well.
_CLAIMS = {"element_shape", "num_elements", "output_shapes"}
# Attributes that no other call of the same code has.
_OF_ONE_GRAPH = {"seed", "seed2", "shared_name"}


class _Copy(NamedTuple):
    """A tensor for a batch of static size.

    Attributes:
        tensor: The tensor of the graph where the batch has that size.
        number: The number of its expression.
        value: Its value; None if it depends on more than sizes, or is large.
    """

    tensor: tf.Tensor
    number: int
    value: np.ndarray | None = None

    @property
    def shape(self) -> tuple | None:
        return _sizes(self.tensor.shape)


class Numbers:
    """Numbers of expressions, the same in all graphs that share them."""

    def __init__(self):
        self._numbers = {}

    def of(self, *key) -> int:
        """Returns the number of an expression that a key describes."""
        return self._numbers.setdefault(key, len(self._numbers))


class Expressions:
    """Expressions of a graph.

    Args:
        numbers: The numbers, shared with another graph.
        parts: Pairs (tensor of the graph, its shape) of a batch.
    """

    def __init__(self, numbers: Numbers, parts: Iterable[tuple]):
        self._numbers, self._graph = numbers, tf.Graph()
        self._places, self._path, self._written = {}, (), []
        self._unread = []  # the ends of TensorFlow 1's loops
        self._before = {}  # number and shape by that of a reshaped result
        parts = list(parts)
        self._examples = {shape.as_list()[0] for _, shape in parts if shape.rank}
        with self._graph.as_default():
            self._copies = {
                tensor.ref(): self._input(tensor, shape, "part", i)
                for i, (tensor, shape) in enumerate(parts)
            }

    def numbers_of(
        self, tensors: Iterable[tf.Tensor], operations: Iterable[tf.Operation]
    ) -> list[int]:
        """Returns numbers of expressions, and those of all that operations write.

        Args:
            tensors: Tensors.
            operations: Operations that run.
        """
        with self._graph.as_default():
            results = self._read(tensors, self._copies, 0)
            self._write(operations, self._copies, 0)
            for tensor in self._unread:  # grows
                results += self._read([tensor], self._copies, 0)
        return [*(copy.number for copy in results), *sorted(self._written)]

    def _read(self, tensors: Iterable, copies: dict, depth: int) -> list[_Copy]:
        """Returns copies of tensors.

        Args:
            tensors: Tensors of a graph, or of a function's.
            copies: Copies so far by references to the tensors of that graph.
            depth: The number of loops around it.
        """

        def before(operation: tf.Operation) -> list[tf.Operation]:
            if all(tensor.ref() in copies for tensor in operation.outputs):
                return []
            return [tensor.op for tensor in _inputs_of(operation)]

        tensors = list(tensors)
        for operation in in_order([tensor.op for tensor in tensors], before):
            if any(tensor.ref() not in copies for tensor in operation.outputs):
                inputs = [copies[t.ref()] for t in _inputs_of(operation)]
                results = self._computed(operation, inputs, depth)
                for tensor, copy in zip(operation.outputs, results, strict=True):
                    copies.setdefault(tensor.ref(), copy)
        return [copies[tensor.ref()] for tensor in tensors]

    def _write(self, operations: Iterable, copies: dict, depth: int) -> None:
        """Adds the numbers of all that operations write."""
        for operation in operations:
            fills = WRITERS_OF_TABLES.match(operation.type) is not None
            fills |= operation.type.startswith("InitializeTable")
            if writes(operation) or fills:
                inputs = self._read(operation.inputs, copies, depth)
                self._written.append(self._number(operation, inputs))
            elif operation.type in CALLERS:
                inputs = self._read(operation.inputs, copies, depth)
                if not operation.outputs:
                    self._computed(operation, inputs, depth)
                self._read(operation.outputs, copies, depth)

    def _computed(
        self, operation: tf.Operation, inputs: list[_Copy], depth: int
    ) -> list[_Copy]:
        """Returns the results of an operation."""
        if operation.type in CALLS:
            (function,) = graphs_called(operation)
            return self._called(operation, function, inputs, depth)
        if operation.type in BRANCHES:
            return self._branched(operation, inputs, depth)
        if operation.type in LOOPS:
            return self._looped(operation, inputs, depth)
        if operation.type in FED or operation.type in VARIABLES:
            return self._begun(operation, inputs)
        tensors = self._made(operation, inputs)
        if tensors is None:
            return self._opaque(operation, inputs, self._number(operation, inputs))
        results = [self._simplified(operation, inputs, tensor) for tensor in tensors]
        if None not in results:
            return results
        number = self._number(operation, inputs)
        return [
            copy or _Copy(tensor, self._numbers.of("result", number, i))
            for i, (copy, tensor) in enumerate(zip(results, tensors, strict=True))
        ]

    def _number(self, operation: tf.Operation, inputs: list[_Copy]) -> int:
        """Returns the number of an operation with inputs."""
        kind, settings = operation.type, dict(settings_of(operation))
        if any(functions_by_attribute(operation)):
            return self._numbers.of(object())  # which no other one equals
        is_of_loop = kind == "Merge" and len(inputs) < len(operation.inputs)
        is_ordered = is_of_loop or _is_ordered(operation)
        order = self._place(operation) if is_ordered else None
        left_out = _CLAIMS if order is None else {*_CLAIMS, *_OF_ONE_GRAPH}
        if kind in {*PYTHON, "PyFuncStateless"}:
            settings["token"] = _code_of(python_function_of(operation))
        settings = {pair for pair in settings.items() if pair[0] not in left_out}
        names = _names_of_inputs(operation)
        numbers = [
            copy.number
            for copy, name in zip(inputs, names, strict=False)
            if name != "element_shape"
        ]
        if kind in _OF_ANY_ORDER and operation.outputs[0].dtype != tf.string:
            numbers.sort()
        return self._numbers.of(kind, frozenset(settings), order, *numbers)

    def _place(self, operation: tf.Operation) -> tuple:
        """Returns the place of an operation among those of its type, as they were made.

        Of a function's, it begins with the places of the calls.
        """
        graph = operation.graph
        if graph not in self._places:
            numbers, places = collections.Counter(), {}
            for other in graph.get_operations():
                numbers[other.type] += 1
                places[other] = numbers[other.type]
            self._places[graph] = places
        return (*self._path, self._places[graph][operation])

    def _made(self, operation: tf.Operation, inputs: list) -> list[tf.Tensor] | None:
        """Returns an operation's outputs in the graph of static size; None if unknown."""
        tensors = [*operation.inputs, *operation.outputs]
        if (
            operation.type in CONTROL_FLOW_V1
            or any(functions_by_attribute(operation))
            or any(map(is_reference, tensors))
        ):
            return None
        if operation.type == "Const":
            (output,) = operation.outputs
            if (output.shape.num_elements() or 0) > _MOST_NUMBERS:
                return [tf.compat.v1.placeholder(output.dtype, output.shape)]
        is_sum = operation.type == "AddN" and tensors[0].dtype == tf.variant
        if operation.type in OF_LISTS or is_sum:
            (output,), tensors = operation.outputs, [copy.tensor for copy in inputs]
            value = inputs[1].value if operation.type == "TensorListReserve" else None
            shape = list_shape(operation, tensors, value, self._of_both(output.shape))
            return [tf.compat.v1.placeholder(output.dtype, shape)]
        copy = create_like(operation, self._graph, [copy.tensor for copy in inputs])
        outputs = list(copy.outputs)
        for output, tensor in zip(operation.outputs, outputs, strict=True):
            if output.dtype != tf.variant:  # see list_shape
                tensor.set_shape(self._of_both(output.shape))
            keys = inputs[1].tensor if operation.type == "LookupTableFindV2" else None
            if keys is not None and keys.shape.rank == tensor.shape.rank:
                tensor.set_shape(keys.shape)  # the copy's table does not tell it
        return outputs

    def _of_both(self, shape: tf.TensorShape) -> tf.TensorShape:
        """Returns a shape without sizes of which one is that of None in the other graph."""
        if shape.rank is None:
            return shape
        sizes = [None if n in self._examples else n for n in shape.as_list()]
        return tf.TensorShape(sizes)

    def _simplified(
        self, operation: tf.Operation, inputs: list[_Copy], tensor: tf.Tensor
    ) -> _Copy | None:
        """Returns a result that is a value, or that an input has already."""
        kind, shape = operation.type, tensor.shape
        if kind == "Const":
            return self._constant(tf.get_static_value(operation.outputs[0]), tensor)
        if shape.is_fully_defined() and tensor.dtype != tf.variant:
            if kind in _FILLS:
                is_text = tensor.dtype == tf.string
                value = np.array(_FILLS[kind], tensor.dtype.as_numpy_dtype)
                return self._full(np.array(b"") if is_text else value, tensor)
            if kind == "Fill" and inputs[1].value is not None:
                return self._full(inputs[1].value, tensor)
        value = _value(operation, inputs, tensor)
        if value is not None:
            with self._graph.as_default():
                return self._constant(value, tf.constant(value, tensor.dtype))
        source = inputs[0] if kind in _SAME else None
        if source is None and shape.is_fully_defined():
            source = self._kept(operation, inputs, tensor)
        if source is None and shape.is_fully_defined() and inputs and inputs[0].shape:
            if kind in ("BroadcastTo", "Tile"):
                return self._broadcast(inputs[0], tensor)
            if kind in _REDUCTIONS and inputs[1].value is not None:
                return self._reduced(operation, *inputs, tensor)
        if source is None or kind in _SAME or shape == source.tensor.shape:
            return source
        return self._reshaped(source.number, source.shape, tensor)

    def _reshaped(self, number: int, sizes: tuple, tensor: tf.Tensor) -> _Copy:
        """Returns a result that has the elements of another one.

        Args:
            number: The number of the other one.
            sizes: Its sizes.
            tensor: The result.
        """
        before, first = self._before.get(number, (number, sizes))
        if _sizes(tensor.shape) == first:
            return _Copy(tensor, before)
        number = self._numbers.of("reshape", before, _sizes(tensor.shape))
        self._before[number] = before, first
        return _Copy(tensor, number)

    def _broadcast(self, copy: _Copy, tensor: tf.Tensor) -> _Copy | None:
        """Returns a result that repeats a tensor along axes of size one."""
        sizes = _sizes(tensor.shape)
        first = (1,) * (len(sizes) - len(copy.shape)) + copy.shape
        if any(m not in (1, n) for m, n in zip(first, sizes, strict=True)):
            return None
        before, _ = self._before.get(copy.number, (copy.number, None))
        return _Copy(tensor, self._numbers.of("broadcast", before, first, sizes))

    def _reduced(
        self, operation: tf.Operation, copy: _Copy, axes: _Copy, tensor: tf.Tensor
    ) -> _Copy | None:
        """Returns a result that combines elements along axes, some of size one.

        Gradients are added up along those in one graph alone.
        """
        sizes = copy.shape
        along = sorted(int(axis) % len(sizes) for axis in axes.value.ravel())
        longer = [axis for axis in along if sizes[axis] != 1]
        if longer == along:
            return None
        axes = self._constant(np.array(longer, axes.value.dtype), axes.tensor)
        if operation.get_attr("keep_dims"):
            rest = [1 if axis in longer else n for axis, n in enumerate(sizes)]
        else:
            rest = [n for axis, n in enumerate(sizes) if axis not in longer]
        number = self._numbers.of("result", self._number(operation, [copy, axes]), 0)
        return self._reshaped(number, tuple(rest), tensor)

    def _kept(
        self, operation: tf.Operation, inputs: list[_Copy], tensor: tf.Tensor
    ) -> _Copy | None:
        """Returns the input whose elements a result has in their order; None if none."""
        kind, shape = operation.type, tensor.shape
        if kind == "Mul":  # by ones, where weights may have to be broadcast
            pairs = (inputs, inputs[::-1])
            pairs = [pair for pair in pairs if pair[0].tensor.shape == shape]
            return next((x for x, other in pairs if self._is_of_ones(other)), None)
        keeps = kind in _KEEPING
        if kind == "StridedSlice":
            strides = inputs[3].value
            keeps = strides is not None and (strides == 1).all()
        if kind == "Transpose" and (order := inputs[1].value) is not None:
            sizes = inputs[0].tensor.shape.as_list()
            moved = [axis for axis in order if sizes[axis] != 1]
            keeps = moved == sorted(moved)
        number = inputs[0].tensor.shape.num_elements() if keeps else None
        return inputs[0] if number == shape.num_elements() else None

    def _constant(self, value, tensor: tf.Tensor) -> _Copy:
        """Returns a constant, which fills a shape if its elements are the same."""
        value = np.asarray(value)
        is_small = value.size <= _MOST_NUMBERS
        kept = value if is_small else None
        if value.size and (value == value.flat[0]).all():
            return _Copy(tensor, self._filled(value.flat[0], value.shape), kept)
        number = self._numbers.of(
            "value", tensor.dtype, value.shape, hashlib.sha256(_bytes(value)).digest()
        )
        return _Copy(tensor, number, kept)

    def _full(self, value: np.ndarray, tensor: tf.Tensor) -> _Copy:
        """Returns a tensor that has one value at all places."""
        shape = _sizes(tensor.shape)
        if 0 < tensor.shape.num_elements() <= _MOST_NUMBERS:
            value = np.full(shape, value)
            return self._constant(value, tf.constant(value, tensor.dtype))
        return _Copy(tensor, self._filled(value, shape))

    def _filled(self, value, shape: tuple) -> int:
        value = np.asarray(value)
        return self._numbers.of("filled", shape, str(value.dtype), _bytes(value))

    def _is_of_ones(self, copy: _Copy) -> bool:
        one = np.array(1, copy.tensor.dtype.base_dtype.as_numpy_dtype)
        return copy.shape is not None and copy.number == self._filled(one, copy.shape)

    def _input(self, tensor: tf.Tensor, shape, *key) -> _Copy:
        copy = tf.compat.v1.placeholder(tensor.dtype.base_dtype, shape)
        return _Copy(copy, self._numbers.of(*key))

    def _begun(self, operation: tf.Operation, inputs: list[_Copy]) -> list[_Copy]:
        """Returns a tensor that is fed, or a variable."""
        settings = settings_of(operation)
        defaults = (copy.number for copy in inputs)
        number = self._numbers.of("begins", operation.name, settings, *defaults)
        tensors = operation.type == "VarHandleOp" and self._made(operation, [])
        if tensors:
            return [_Copy(tensors[0], number)]
        return self._opaque(operation, inputs, number)

    def _opaque(
        self, operation: tf.Operation, inputs: list[_Copy], number: int
    ) -> list[_Copy]:
        """Returns results of which only the shapes are known.

        A loop of TensorFlow 1 has those of the graph itself, its branches the same as
        the values that they pass on.
        """
        shapes = [tensor.shape for tensor in operation.outputs]
        if len(inputs) < len(operation.inputs):  # of a loop, whose last is read later
            self._unread += list(operation.inputs)[len(inputs) :]
        elif operation.type == "Switch":
            shapes = [inputs[0].tensor.shape] * 2
        elif operation.type == "Merge":
            first, *others = [copy.tensor.shape for copy in inputs]
            shapes[0] = first.most_specific_common_supertype(others)
        pairs = zip(operation.outputs, shapes, strict=True)
        return [
            self._input(tensor, shape, "result", number, i)
            for i, (tensor, shape) in enumerate(pairs)
        ]

    def _called(
        self,
        operation: tf.Operation,
        function: tf.Graph,
        arguments: list[_Copy],
        depth: int,
    ) -> list[_Copy]:
        """Returns the results of a function, which an operation calls, for arguments."""
        references = (tensor.ref() for tensor in function.inputs)
        copies = dict(zip(references, arguments, strict=True))
        path, self._path = self._path, (operation.type, *self._place(operation))
        results = self._read(function.outputs, copies, depth)
        self._write(function.get_operations(), copies, depth)
        self._path = path
        return results

    def _branched(self, operation: tf.Operation, inputs: list, depth: int) -> list:
        index, *arguments = inputs
        branches, results = [], []
        for i, function in enumerate(graphs_called(operation)):
            begin = len(self._written)
            branches.append(self._called(operation, function, arguments, depth))
            self._note_condition(begin, index.number, i)
        for output, copies in zip(operation.outputs, zip(*branches)):
            shapes = {copy.shape for copy in copies}
            shape = shapes.pop() if len(shapes) == 1 else None
            numbers = (copy.number for copy in copies)
            key = operation.type in ("If", "StatelessIf"), index.number, *numbers
            if shape is None and output.dtype != tf.variant:
                shape = output.shape
            results.append(self._input(output, shape, "branch", *key))
        return results

    def _note_condition(self, begin: int, *key) -> None:
        """Gives writes since `begin` the condition of their branch or loop as well."""
        self._written[begin:] = [
            self._numbers.of("under", *key, number) for number in self._written[begin:]
        ]

    def _looped(self, operation: tf.Operation, inputs: list, depth: int) -> list:
        body, condition = graphs_called(operation)
        pairs = zip(body.inputs, body.outputs, strict=True)
        are_kept = [origin_of(end, ("Identity",)) is begin for begin, end in pairs]
        changed = [i for i, is_kept in enumerate(are_kept) if not is_kept]
        shapes = {i: inputs[i].tensor.shape for i in changed}
        begin, arguments = len(self._written), list(inputs)
        while True:  # until no round changes a shape
            del self._written[begin:]
            for place, i in enumerate(changed):
                key = "argument", depth, place
                arguments[i] = self._input(operation.inputs[i], shapes[i], *key)
            results = self._called(operation, body, arguments, depth + 1)
            common = {
                i: common_shape(arguments[i].tensor, results[i].tensor.shape)
                for i in changed
            }
            if all(is_same_shape(common[i], shapes[i]) for i in changed):
                break
            shapes = common
        (going,) = self._called(operation, condition, arguments, depth + 1)
        needed = _needed_by_each(body, condition, changed)
        copies = list(inputs)
        for place, i in enumerate(changed):
            tensor, parts = operation.outputs[i], sorted(needed[i])
            parts = [(j, inputs[j].number, results[j].number) for j in parts]
            key = "loop", going.number, place, *parts
            copies[i] = self._input(tensor, shapes[i], *key)
        all_parts = [(inputs[i].number, results[i].number) for i in changed]
        self._note_condition(begin, going.number, *all_parts)
        return copies


def _is_ordered(operation: tf.Operation) -> bool:
    """Returns whether another operation with the same inputs computes something else."""
    is_read = operation.type in READERS or writes(operation)
    return is_stateful(operation.type) is not False and not is_read


def _names_of_inputs(operation: tf.Operation) -> list[str]:
    """Returns the names of inputs; none of those that are lists."""
    arguments = operation.op_def.input_arg
    if any(a.number_attr or a.type_list_attr for a in arguments):
        return [""] * len(operation.inputs)
    return [argument.name for argument in arguments]


def _code_of(value, within: tuple = ()):
    """Returns a key that equal values of Python have, and functions of equal code.

    Of anything else, which may have changed between two calls, it is a new object.

    Args:
        value: The value.
        within: The values that it is a part of; a function may hold itself.
    """
    if value is None or isinstance(value, _SIMPLE):
        return type(value), value
    outer = [i for i, other in enumerate(within) if value is other]
    if outer:
        return "again", *outer
    key = functools.partial(_code_of, within=(*within, value))
    if type(value) is np.ndarray or isinstance(value, np.generic):
        digest = hashlib.sha256(_bytes(np.asarray(value))).digest()
        return str(value.dtype), value.shape, digest
    if type(value) in (list, tuple):
        return (type(value), *map(key, value))
    if type(value) is dict:
        return (dict, *((key(k), key(v)) for k, v in value.items()))
    if isinstance(value, functools.partial):
        return functools.partial, *map(key, (value.func, value.args, value.keywords))
    if inspect.ismethod(value):
        owner = value.__self__
        if any(owner is other for other in within):
            return key(value.__func__), "again"
        key = functools.partial(_code_of, within=(*within, value, owner))
        of_owner = key(dict(vars(owner))) if hasattr(owner, "__dict__") else object()
        return key(value.__func__), type(owner), of_owner
    if not inspect.isfunction(value):
        return object()
    cells = [
        cell.cell_contents if _has_value(cell) else None
        for cell in value.__closure__ or ()
    ]
    parts = value.__defaults__, value.__kwdefaults__, cells
    return value.__code__, *map(key, parts)


def _has_value(cell) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that is set later
        return False


def _sizes(shape: tf.TensorShape) -> tuple | None:
    """Returns the sizes of a shape; None if one is unknown."""
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def _inputs_of(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns an operation's inputs; those of a loop's begin are read last."""
    inputs = list(operation.inputs)
    if operation.type in ("Merge", "RefMerge"):
        ends = ("NextIteration", "RefNextIteration")
        return [tensor for tensor in inputs if tensor.op.type not in ends]
    return inputs


def _needed_by_each(body: tf.Graph, condition: tf.Graph, changed: list) -> dict:
    """Returns the variables of a loop that decide the result of each of its variables.

    Gradients may keep other values of a round for themselves.
    """
    places = {argument.op: i for i, argument in enumerate(body.inputs)}
    ends = {i: data_ancestors([body.outputs[i].op]) for i in changed}
    reads = {i: [places[op] for op in ends[i] if op in places] for i in changed}
    operations = data_ancestors([output.op for output in condition.outputs])
    going = [i for i, t in enumerate(condition.inputs) if t.op in operations]
    return {
        i: set(walk([i, *going], lambda j: reads.get(j, []))) & set(changed)
        for i in changed
    }


def _bytes(value: np.ndarray) -> bytes:
    return repr(value.tolist()).encode() if value.dtype == object else value.tobytes()


def _value(
    operation: tf.Operation, inputs: list[_Copy], tensor: tf.Tensor
) -> np.ndarray | None:
    """Returns a value that depends on sizes alone; None if it is unknown, or large."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return None
    number = tensor.shape.num_elements() or 0  # 0 as well if it depends on the value
    if number > _MOST_NUMBERS or is_stateful(operation.type) is not False:
        return None
    if operation.type == "ShapeN":
        sizes = inputs[tensor.value_index].shape
        dtype = tensor.dtype.as_numpy_dtype
        return None if sizes is None else np.array(sizes, dtype)
    if operation.type in SHAPES:
        return static_value(tensor)
    if inputs and all(copy.value is not None for copy in inputs):
        return static_value(tensor)
    if operation.type == "StridedSlice" and tensor.shape.rank == 0:
        vector, *_ = inputs  # one size of a shape, where others are unknown
        begin = inputs[1].value
        if vector.tensor.op.type == "Shape" and begin is not None and begin.size == 1:
            shape = vector.tensor.op.inputs[0].shape
            size = shape.as_list()[int(begin[0])] if shape.rank is not None else None
            if size is not None:
                return np.array(size, tensor.dtype.as_numpy_dtype)
    return None
