"""Training loops of TensorFlow 1: `slim.learning`, with its `create_train_op`."""

import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf

_USE_GLOBAL_STEP = 0  # the graph's, which is made if there is none


def create_train_op(
    total_loss,
    optimizer,
    global_step=_USE_GLOBAL_STEP,
    update_ops=None,
    variables_to_train=None,
    clip_gradient_norm=0,
    summarize_gradients=False,
    gate_gradients=tf.train.Optimizer.GATE_OP,
    aggregation_method=None,
    colocate_gradients_with_ops=False,
    gradient_multipliers=None,
    check_numerics=True,
):
    """Returns the loss as a Tensor that, when it is run, updates the variables.

    Args:
        total_loss: Scalar Tensor.
        optimizer: Optimizer of tf.train.
        global_step: Variable that counts updates; by default the graph's; None for none.
        update_ops: Operations to run before the loss; by default those of UPDATE_OPS.
        variables_to_train: Variables to train; by default all that can be.
        clip_gradient_norm: Largest norm of each gradient by itself; 0 clips none.
        summarize_gradients: Whether gradients and their norms get summaries.
        gate_gradients: As in `compute_gradients`.
        aggregation_method: As in `compute_gradients`.
        colocate_gradients_with_ops: As in `compute_gradients`.
        gradient_multipliers: Factors by variables or the names of their operations.
        check_numerics: Whether a loss that is NaN or infinite is an error.
    """
    arguments = locals()

    def transform_grads_fn(pairs: list) -> list:
        if gradient_multipliers:
            pairs = multiply_gradients(pairs, gradient_multipliers)
        return clip_gradient_norms(pairs, clip_gradient_norm) if clips else pairs

    clips = clip_gradient_norm > 0
    del arguments["clip_gradient_norm"], arguments["gradient_multipliers"]
    return create_transformed_train_op(
        transform_grads_fn=transform_grads_fn, **arguments
    )


def create_transformed_train_op(
    total_loss,
    optimizer,
    global_step=_USE_GLOBAL_STEP,
    update_ops=None,
    variables_to_train=None,
    transform_grads_fn=None,
    summarize_gradients=False,
    gate_gradients=tf.train.Optimizer.GATE_OP,
    aggregation_method=None,
    colocate_gradients_with_ops=False,
    check_numerics=True,
):
    """`create_train_op` of `tf.contrib.training`.

    Args:
        transform_grads_fn: Function of the (gradient, variable) pairs that returns such
            pairs; None changes nothing. The others are as above.
    """
    if global_step is _USE_GLOBAL_STEP:
        global_step = tf.train.get_or_create_global_step()
    if update_ops is None:
        update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    if update_ops:
        with tf.control_dependencies(list(dict.fromkeys(update_ops))):
            total_loss = tf.identity(total_loss, "control_dependency")
    pairs = optimizer.compute_gradients(
        total_loss,
        variables_to_train or tf.trainable_variables(),
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
        colocate_gradients_with_ops=colocate_gradients_with_ops,
    )
    if transform_grads_fn:
        pairs = transform_grads_fn(pairs)
    if summarize_gradients:
        with tf.name_scope("summarize_grads"):
            add_gradients_summaries(pairs)
    updates = optimizer.apply_gradients(pairs, global_step=global_step)
    with tf.name_scope("train_op"):
        if check_numerics:
            total_loss = tf.check_numerics(total_loss, "LossTensor is inf or nan")
        with tf.control_dependencies([updates]):
            train_op = tf.identity(total_loss, "control_dependency")
    tf.add_to_collection(tf.GraphKeys.TRAIN_OP, train_op)
    return train_op


def clip_gradient_norms(gradients_to_variables, max_norm) -> list:
    """Clips each gradient of (gradient, variable) pairs by its own norm."""
    return [
        (with_values(g, lambda values: tf.clip_by_norm(values, max_norm)), v)
        for g, v in gradients_to_variables
    ]


def multiply_gradients(grads_and_vars, gradient_multipliers) -> list:
    """Multiplies gradients by factors.

    Args:
        grads_and_vars: (gradient, variable) pairs.
        gradient_multipliers: Factors by variables or the names of their operations.

    Raises:
        ValueError: If a variable with a factor has no gradient.
    """
    factors = {
        key.ref() if isinstance(key, tf.Variable) else key: factor
        for key, factor in gradient_multipliers.items()
    }
    pairs = []
    for gradient, variable in grads_and_vars:
        factor = factors.get(variable.ref(), factors.get(variable.op.name))
        if factor is not None:
            if gradient is None:
                raise ValueError(
                    "`gradient_multipliers` must be of variables with a gradient. "
                    f"Received: {variable.op.name}. Leave it out."
                )
            scaled = tf.cast(factor, gradient.dtype)
            gradient = with_values(gradient, lambda values, by=scaled: values * by)
        pairs.append((gradient, variable))
    return pairs


def add_gradients_summaries(grads_and_vars) -> list:
    """Makes a histogram and the norm of each gradient; returns the summaries."""
    summaries = []
    for gradient, variable in grads_and_vars:
        if gradient is not None:
            values = getattr(gradient, "values", gradient)
            name, norm = variable.op.name, tf.global_norm([values])
            summaries.append(tf.summary.histogram(f"{name}_gradient", values))
            summaries.append(tf.summary.scalar(f"{name}_gradient_norm", norm))
    return summaries


def with_values(gradient, change):
    """Returns a gradient with changed values; None stays None."""
    if isinstance(gradient, tf.IndexedSlices):
        values = change(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient if gradient is None else change(gradient)


def train_step(sess, train_op, global_step, train_step_kwargs):
    """Runs the train op once; returns (loss, whether to stop).

    Args:
        sess: The session.
        train_op: The result of `create_train_op`.
        global_step: The global step, a Tensor.
        train_step_kwargs: Bool Tensors `should_log` and `should_stop`, if any.
    """
    since = time.time()
    loss, step = sess.run([train_op, global_step])
    secs = time.time() - since
    if "should_log" in train_step_kwargs and sess.run(train_step_kwargs["should_log"]):
        tf.logging.info("global step %d: loss = %.4f (%.3f sec/step)", step, loss, secs)
    if "should_stop" not in train_step_kwargs:
        return loss, False
    return loss, sess.run(train_step_kwargs["should_stop"])


def train(
    train_op,
    logdir,
    train_step_fn=train_step,
    train_step_kwargs=None,
    log_every_n_steps=1,
    graph=None,
    master="",
    is_chief=True,
    global_step=None,
    number_of_steps=None,
    init_op=None,
    init_feed_dict=None,
    local_init_op=None,
    init_fn=None,
    ready_op=None,
    summary_op=tf.train.Supervisor.USE_DEFAULT,
    save_summaries_secs=600,
    summary_writer=tf.train.Supervisor.USE_DEFAULT,
    startup_delay_steps=0,
    saver=None,
    save_interval_secs=600,
    sync_optimizer=None,
    session_config=None,
    session_wrapper=None,
    trace_every_n_steps=None,
    ignore_live_threads=False,
):
    """Runs the train op until `number_of_steps`, or until the data ends.

    Args:
        train_op: The result of `create_train_op`.
        logdir: Folder of checkpoints and summaries; None writes none.
        train_step_fn: As `train_step`.
        train_step_kwargs: Its fourth argument; None makes that of `train_step`.
        log_every_n_steps: Updates between two lines of the log; 0 for none.
        graph: The graph; by default the current one.
        global_step: The global step; by default the graph's.
        number_of_steps: Last value of the global step, above 0; None for no end.

    The others are those of `tf.train.Supervisor`. Training by several tasks
    (`master`, `is_chief`, `startup_delay_steps`, `sync_optimizer`), `session_wrapper`
    and `trace_every_n_steps` are refused.

    Returns:
        The last loss.

    Raises:
        ValueError: If an argument does not fit.
    """
    _check_arguments(train_op, number_of_steps)
    _check_alone(
        master=(master, ""),
        is_chief=(is_chief, True),
        startup_delay_steps=(startup_delay_steps, 0),
        sync_optimizer=(sync_optimizer, None),
        session_wrapper=(session_wrapper, None),
        trace_every_n_steps=(trace_every_n_steps, None),
    )
    graph = graph or tf.get_default_graph()
    with graph.as_default():
        if global_step is None:
            global_step = tf.train.get_or_create_global_step()
        if train_step_kwargs is None:
            train_step_kwargs = _kwargs(global_step, number_of_steps, log_every_n_steps)
        initializers = [tf.local_variables_initializer(), tf.tables_initializer()]
        supervisor = tf.train.Supervisor(
            graph=graph,
            logdir=logdir,
            init_op=init_op or tf.global_variables_initializer(),
            init_feed_dict=init_feed_dict,
            local_init_op=local_init_op or tf.group(*initializers),
            ready_op=ready_op or tf.report_uninitialized_variables(),
            summary_op=summary_op if logdir else None,
            summary_writer=summary_writer if logdir else None,
            global_step=global_step,
            saver=saver or tf.train.Saver(),
            save_summaries_secs=save_summaries_secs,
            save_model_secs=save_interval_secs,
            init_fn=init_fn,
        )
    with supervisor.managed_session(
        start_standard_services=False, config=session_config
    ) as session:
        if logdir:
            supervisor.start_standard_services(session)
        threads = supervisor.start_queue_runners(session)
        loss = _run_steps(
            supervisor,
            lambda: train_step_fn(session, train_op, global_step, train_step_kwargs),
        )
        if logdir:
            tf.logging.info("Finished training! Saving model to disk.")
            step = supervisor.global_step
            supervisor.saver.save(session, supervisor.save_path, global_step=step)
        supervisor.stop(
            threads, close_summary_writer=True, ignore_live_threads=ignore_live_threads
        )
    return loss


def _run_steps(supervisor, run_step: Callable[[], tuple]):
    """Runs steps until one of them, the supervisor or the data ends; returns the loss."""
    loss, should_stop = None, False
    try:
        while not should_stop and not supervisor.should_stop():
            loss, should_stop = run_step()
    except tf.errors.OutOfRangeError as error:
        tf.logging.info("Caught OutOfRangeError. Stopping Training. %s", error)
    return loss


def _check_arguments(train_op, number_of_steps) -> None:
    if train_op is None:
        raise ValueError(
            "`train_op` must be the result of create_train_op. Received: None. Pass it."
        )
    if number_of_steps is not None and number_of_steps <= 0:
        raise ValueError(
            "`number_of_steps` must be above 0, or None. Received: "
            f"{number_of_steps}. Leave it out to train until the data ends."
        )


def _check_alone(**arguments) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise ValueError(
                f"`{name}` of slim.learning.train must be left at its default: the "
                f"stand-in trains in one process. Received: {value!r}. Leave it out, or "
                "run the script on TensorFlow 1.15."
            )


def _kwargs(global_step, number_of_steps, log_every_n_steps) -> dict:
    """Returns the last argument of `train_step`."""
    with tf.name_scope("train_step"):
        stop, log = tf.constant(False), tf.constant(False)
        if number_of_steps:
            stop = tf.greater_equal(global_step, number_of_steps)
        if log_every_n_steps > 0:
            log = tf.equal(tf.mod(global_step, log_every_n_steps), 0)
        return {"should_stop": stop, "should_log": log}
