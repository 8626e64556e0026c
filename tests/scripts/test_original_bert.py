"""The benchmark's restatement of google-research/bert computes the same as ours."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import modeling
from bert_finetune.optimization import AdamWeightDecayOptimizer
from scripts.benchmarks import original_bert

v1 = tf.compat.v1
_SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32}
_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2}
_RANGE = {"max_position_embeddings": 8, "initializer_range": 0.5}  # attention matters
_CONFIG = modeling.BertConfig(**_SIZES, **_RANGE)


def test_restated_encoder_has_the_loss_and_gradients_of_ours():
    rng = np.random.default_rng(0)
    is_token = np.arange(7) < [[7], [3], [5]]
    arrays = rng.integers(0, 30, is_token.shape) * is_token, is_token
    arrays = (*arrays, rng.integers(0, 2, is_token.shape))
    with tf.Graph().as_default():
        ids, mask, segments = (tf.constant(a, tf.int32) for a in arrays)
        labels = tf.constant([0, 1, 1])
        pooled = modeling.encode(_CONFIG, ids, mask, segments, is_training=False).pooled
        logits = modeling.classifier_logits(pooled, 2, is_training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        ours = tf.reduce_mean(losses)
        names = {variable.name for variable in v1.trainable_variables()}
        with v1.variable_scope(v1.get_variable_scope(), reuse=True):
            restated = original_bert.classification_loss(
                _CONFIG, ids, mask, segments, labels, is_training=False
            )
        variables = v1.trainable_variables()
        assert {variable.name for variable in variables} == names
        gradients = [
            [tf.convert_to_tensor(g) for g in tf.gradients(loss, variables)]
            for loss in (ours, restated)
        ]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            found = session.run([(ours, gradients[0]), (restated, gradients[1])])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_restated_optimizer_updates_as_ours():
    def trained(make_optimizer):
        with tf.Graph().as_default(), v1.Session() as session:
            kernel = v1.get_variable("kernel", initializer=[[1.0, -2.0]])
            bias = v1.get_variable("bias", initializer=[0.5, 3.0])
            loss = tf.reduce_sum(tf.square(kernel)) + tf.reduce_sum(bias**3)
            pairs = list(zip(tf.gradients(loss, [kernel, bias]), [kernel, bias]))
            train_op = make_optimizer().apply_gradients(pairs)
            session.run(v1.global_variables_initializer())
            for _ in range(5):
                session.run(train_op)
            return session.run([kernel, bias])

    ours = trained(lambda: AdamWeightDecayOptimizer(original_bert._RATE))
    restated = trained(original_bert.AdamWeightDecay)
    for one, other in zip(ours, restated, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
