"""Types of operations, by what they do."""

import re

import tensorflow as tf

# Values that a session gets from outside, under this name and no copy's.
FED = {"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}
VARIABLES = {"VarHandleOp", "Variable", "VariableV2"}
# Operations that take a variable's handle and leave the variable as it is.
READERS = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd"),
    *("VarIsInitializedOp", "VariableShape"),
}
# Operations that call functions of the graph: once, one of several, again and again.
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
LOOPS = {"While", "StatelessWhile"}

# What draws from a state of its own: what takes its place, and the names of its inputs.
STATELESS = {
    "RandomUniform": (tf.random.stateless_uniform, ["shape"]),
    "RandomUniformInt": (tf.random.stateless_uniform, ["shape", "minval", "maxval"]),
    "RandomStandardNormal": (tf.random.stateless_normal, ["shape"]),
    "TruncatedNormal": (tf.random.stateless_truncated_normal, ["shape"]),
    "Multinomial": (tf.random.stateless_categorical, ["logits", "num_samples"]),
}
# These, and what draws from a seed.
DRAWS = {
    *STATELESS,
    *("StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomNormal"),
    *("StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessMultinomial"),
    *("StatelessTruncatedNormalV2", "StatelessRandomUniformInt"),
    "StatelessRandomUniformIntV2",
}
# Those whose first input is the shape.
SHAPED_DRAWS = DRAWS - {"Multinomial", "StatelessMultinomial"}


def is_draw(operation: tf.Operation) -> bool:
    """Returns whether `operation` draws random numbers with a state of its own."""
    return operation.type in STATELESS


def moves_generator(kind: str) -> bool:
    """Returns whether operations of a type write the state of a tf.random.Generator."""
    return re.match(r"Rng|Stateful(?!Partitioned)", kind) is not None
