"""Types of operations, by their effects."""

import re

import tensorflow as tf

from estimator_accum.graph.internals import has_own_seed

# Values that a session gets from outside, under this name and no copy's.
FED = {"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}
# Operations that take a micro-batch from an input pipeline or a queue.
TAKING_A_BATCH = re.compile(r".*IteratorGetNext|.*Dequeue|ReaderRead")
# Those that result in all tensors of one; a queue's have the size as second input.
BATCH_QUEUES = {"QueueDequeueManyV2", "QueueDequeueUpToV2"}
BATCHES = {"IteratorGetNext", *BATCH_QUEUES}

VARIABLES = {"VarHandleOp", "Variable", "VariableV2"}
# Operations that take a variable's handle and leave the variable as it is: for its
# value, or for something else.
READERS_OF_VALUE = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
READERS_OF_NO_VALUE = {"IsVariableInitialized", "VarIsInitializedOp", "VariableShape"}
READERS_OF_NO_VALUE |= {"DisableCopyOnRead"}
READERS = READERS_OF_VALUE | READERS_OF_NO_VALUE
# Operations with state that are the same for all micro-batches of an update.
SETTLED = {"StatelessRandomGetAlg", *VARIABLES, *READERS}
WRITERS = re.compile(r"Assign|Scatter|Apply|CountUpTo|SdcaShrink")
WRITERS_OF_TABLES = re.compile(r"LookupTable(Insert|Import|Remove)")
# Writers by which a variable, or a part, gets a value that does not depend on its own.
SETTERS = {
    *("Assign", "AssignVariableOp", "ScatterUpdate", "ResourceScatterUpdate"),
    *("ScatterNdUpdate", "ResourceScatterNdUpdate"),
    *("StridedSliceAssign", "ResourceStridedSliceAssign"),
}
# Operations that pass a handle on, or the memory of a reference variable.
PASSING = {"Identity", "Enter", "RefEnter", "Switch", "RefSwitch", "Merge", "RefMerge"}
PASSING |= {"DebugGradientRefIdentity", "RefExit", "RefIdentity", "RefNextIteration"}
MUTABLE_TABLES = {
    *("MutableHashTableV2", "MutableHashTableOfTensorsV2", "MutableDenseHashTableV2"),
}
LOOK_UPS = {"HashTableV2", "LookupTableFindV2", "LookupTableSizeV2"}  # in tables

# Operations that compute from a shape, not from values.
SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
# The same, and those whose results have the shape and no other value of their input.
OF_SHAPES = {*SHAPES, "OnesLike", "ZerosLike"}

# Operations whose results are sums of their inputs, or multiples of one of them.
SUMS = {"Add", "AddN", "AddV2", "Identity", "Neg", "Sub"}
PRODUCTS = {"Div", "Mul", "RealDiv"}
COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"}

# Operations that call functions of the graph: once, one of several, again and again.
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
LOOPS = {"While", "StatelessWhile"}
CALLERS = CALLS | BRANCHES | LOOPS
CONTROL_FLOW_V1 = {
    *("Enter", "Exit", "Merge", "NextIteration", "Switch", "LoopCond"),
    *("RefEnter", "RefExit", "RefMerge", "RefNextIteration", "RefSwitch"),
}

PYTHON = {"PyFunc", "EagerPyFunc"}
# Operations that show or check values, or call Python, which has no state in the graph.
SHOWING = {"Assert", "Print", "PrintV2", "LogMessage", "PyFuncStateless", *PYTHON}


def _gamma(shape, alpha, seed, dtype) -> tf.Tensor:
    whole = tf.concat([shape, tf.shape(alpha, shape.dtype)], 0)
    return tf.random.stateless_gamma(whole, seed, alpha, dtype=dtype)


def _poisson(shape, rate, seed, dtype) -> tf.Tensor:
    whole = tf.concat([shape, tf.shape(rate, shape.dtype)], 0)
    return tf.random.stateless_poisson(whole, seed, rate, dtype)


def _shuffle(value, seed, dtype) -> tf.Tensor:
    del dtype
    shape = tf.shape(value)[:1]
    numbers = tf.random.stateless_uniform(shape, seed, None, None, tf.int64)
    return tf.gather(value, tf.argsort(numbers))


# Operations that draw from a state of their own: the function that takes their place,
# and the names of its inputs.
STATELESS = {
    "RandomUniform": (tf.random.stateless_uniform, ["shape"]),
    "RandomUniformInt": (tf.random.stateless_uniform, ["shape", "minval", "maxval"]),
    "RandomStandardNormal": (tf.random.stateless_normal, ["shape"]),
    "TruncatedNormal": (tf.random.stateless_truncated_normal, ["shape"]),
    "Multinomial": (tf.random.stateless_categorical, ["logits", "num_samples"]),
    "RandomGamma": (_gamma, ["shape", "alpha"]),
    "RandomPoissonV2": (_poisson, ["shape", "rate"]),
    "RandomShuffle": (_shuffle, ["value"]),
}
# Draws for each number of a parameter: its type, and whether the shape is that of all.
DRAWS_OF_PARAMETERS = {
    **dict.fromkeys(("RandomGamma", "RandomPoissonV2"), False),
    **dict.fromkeys(("StatelessRandomGammaV2", "StatelessRandomGammaV3"), True),
    "StatelessRandomPoisson": True,
}
# These, and operations that draw from a seed.
DRAWS = {
    *STATELESS,
    *DRAWS_OF_PARAMETERS,
    *("StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomNormal"),
    *("StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessMultinomial"),
    *("StatelessTruncatedNormalV2", "StatelessRandomUniformInt"),
    "StatelessRandomUniformIntV2",
}
# Those whose first input is the shape.
SHAPED_DRAWS = DRAWS - {
    *DRAWS_OF_PARAMETERS,
    *("Multinomial", "StatelessMultinomial", "RandomShuffle"),
}
# Samplers that learn from the classes they have seen, too.
_LEARNING = {"LearnedUnigramCandidateSampler", "ThreadUnsafeUnigramCandidateSampler"}


def is_draw(operation: tf.Operation) -> bool:
    """Returns whether `operation` draws random numbers with a state of its own."""
    return draws_by_state(operation.type)


def draws_by_state(kind: str) -> bool:
    """Returns whether operations of a type draw from a state, and do nothing else."""
    return kind in STATELESS or (kind not in _LEARNING and has_own_seed(kind))


def draws_from_seed(kind: str) -> bool:
    """Returns whether operations of a type draw random numbers from a seed they get."""
    # Numbers of all bits are further seeds.
    others = r"If|While|Case|RandomGet|RandomUniformFullInt"
    return re.match(rf"Stateless(?!{others})", kind) is not None


def is_any_draw(operation: tf.Operation) -> bool:
    """Returns whether `operation` draws random numbers, from a state or a seed."""
    return is_draw(operation) or draws_from_seed(operation.type)


def moves_generator(kind: str) -> bool:
    """Returns whether operations of a type write the state of a tf.random.Generator."""
    return re.match(r"Rng|Stateful(?!Partitioned)", kind) is not None
