"""Two towers that find a query's document among those of the whole batch.

Trains with unsplit batches of 256, and in micro-batches of 16 with and without the
other micro-batches' documents as negatives.
"""

import numpy as np
import tensorflow as tf

from estimator_accum import (
    make_accumulating_train_op,
    microbatch_model_fn,
    whole_batch_loss,
)
from estimator_accum.compat import enable_estimator

enable_estimator()  # for TensorFlow 2.16 and later; does nothing on 2.15


def tower(words, name):
    same_start = tf.keras.initializers.GlorotUniform(seed=0)
    hidden = tf.keras.layers.Dense(64, "relu", True, same_start, name=f"{name}_1")(
        words
    )
    embedding = tf.keras.layers.Dense(16, None, True, same_start, name=f"{name}_2")(
        hidden
    )
    return tf.math.l2_normalize(embedding, 1)


def in_batch_negatives(embeddings):
    queries, documents = embeddings  # [examples, 16] each
    similarity = 10.0 * tf.matmul(queries, documents, transpose_b=True)
    labels = tf.range(tf.shape(queries)[0])  # the document on the diagonal
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=similarity)
    )


def model_fn(features, labels, mode, params):
    embeddings = (
        tower(features["query"], "query"),
        tower(features["document"], "document"),
    )
    if mode == tf.estimator.ModeKeys.PREDICT:
        predictions = {"query": embeddings[0], "document": embeddings[1]}
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    if params["whole"]:
        loss = whole_batch_loss(embeddings, in_batch_negatives)
    else:
        loss = in_batch_negatives(embeddings)
    optimizer = tf.compat.v1.train.AdamOptimizer(0.003)
    train_op = make_accumulating_train_op(loss, optimizer, 1)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def examples(number, seed):
    """Returns queries of a few words each of their document, which has 200 words."""
    random = np.random.default_rng(seed)
    topics = np.random.default_rng(0).normal(size=[20, 200])
    documents = random.normal(size=[number, 20]) @ topics > 6
    queries = documents & (random.random(documents.shape) < 0.3)
    return {"query": queries.astype("float32"), "document": documents.astype("float32")}


def train(micro_batches, whole):
    def input_fn():
        data = tf.data.Dataset.from_tensor_slices(examples(4096, seed=1))
        return data.repeat(4).batch(256)

    def test_input_fn():
        return tf.data.Dataset.from_tensor_slices(examples(1000, seed=2)).batch(1000)

    estimator = tf.estimator.Estimator(
        microbatch_model_fn(model_fn, micro_batches), params={"whole": whole}
    )
    estimator.train(input_fn)
    predictions = list(estimator.predict(test_input_fn))
    queries, documents = (
        np.stack([prediction[name] for prediction in predictions])
        for name in ("query", "document")
    )
    nearest = np.argmax(queries @ documents.T, axis=1)
    accuracy = np.mean(nearest == np.arange(len(nearest)))
    return accuracy, estimator.get_variable_value("query_1/kernel")


for name, micro_batches, whole in (
    ("256 unsplit", 1, True),
    ("16 x 16, negatives of the batch", 16, True),
    ("16 x 16, negatives of 16", 16, False),
):
    accuracy, weights = train(micro_batches, whole)
    if micro_batches == 1:
        unsplit = weights
    difference = np.abs(weights - unsplit).max()
    print(f"{name:<32} found {accuracy:.1%}, difference of a weight {difference:.1e}")
