"""The three interfaces of the rule in small train ops."""

import itertools

import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_windows,
    make_accumulating_train_op,
)

v1 = tf.compat.v1


def by_train_op(loss, optimizer, steps, **options):
    return make_accumulating_train_op(loss, optimizer, steps, **options)


def by_minimize(loss, optimizer, steps, **options):
    step = v1.train.get_or_create_global_step()
    return AccumulatingOptimizer(optimizer, steps, **options).minimize(loss, step)


def by_apply_gradients(loss, optimizer, steps, **options):
    """Applies gradients computed elsewhere, so that the loss is unknown."""
    pairs = optimizer.compute_gradients(loss)
    step = v1.train.get_or_create_global_step()
    ours = AccumulatingOptimizer(optimizer, steps, **options)
    return ours.apply_gradients(pairs, step)


ALL = [by_train_op, by_minimize, by_apply_gradients]


def fed_gradients(*values, dtype=tf.float32):
    """Creates variables with these initial values, and a loss with fed gradients.

    Returns:
        (placeholders of the gradients, variables, loss).
    """
    variables = [
        v1.get_variable(f"variable_{i}", initializer=tf.constant(value, dtype))
        for i, value in enumerate(values)
    ]
    gradients = [v1.placeholder(dtype, variable.shape) for variable in variables]
    pairs = zip(gradients, variables, strict=True)
    return gradients, variables, sum(tf.reduce_sum(g * v) for g, v in pairs)


def start_session(config=None):
    session = v1.Session(config=config)
    session.run(v1.global_variables_initializer())
    return session


def most_bytes_alive(session, fetch) -> int:
    """Returns the most bytes that tensors of one run take, beside those of variables."""
    metadata = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    session.run(fetch, options=options, run_metadata=metadata)
    changes = [
        (record.alloc_micros, record.alloc_bytes)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for record in memory.allocation_records
    ]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def after_each(train_op, feeds, fetches):
    """Returns the values of `fetches` after each micro-step."""
    values = []
    with start_session() as session:
        for feed in feeds:
            session.run(train_op, feed)
            values.append(session.run(fetches))
    return values


def sgd(rate=1.0):
    return v1.train.GradientDescentOptimizer(rate)


def apply_partial_window(session):
    """Applies the open window, as the hooks do when the data ends in mid-window."""
    window = get_windows()[0]
    if window.micro_steps is not None and session.run(window.micro_steps):
        session.run(window.update_step_after, {window.is_boundary: True})
