"""Stand-ins of tf.contrib against results of TensorFlow 1.15.5.

The tables were printed by `python tests/helpers/models/contrib_layers.py`, and
`contrib_crf.py` and `contrib_learning.py` beside it on Python 3.7.16 with tensorflow
1.15.5 on 25 November 2026, on a CPU.
"""

import types

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.compat.v1 import _contrib
from tests.helpers.models import contrib_crf, contrib_layers, contrib_learning

RECORDED = {
    "apply_regularization": (
        ("w* x* get_regularization_penalty:0 regularization_losses 1"),
        "0.0213837 0.00855349 0.180119 -0.0285658",
    ),
    "avg_pool2d": (("AvgPool2D/AvgPool:0"), "-0.0108274 0"),
    "avg_pool2d, same": (("AvgPool2D/AvgPool:0"), "-0.341377 0"),
    "conv": (("Conv/weights Conv/biases Conv/Relu:0"), "12.608 0 -5.60345 -1.11786"),
    "conv with norm": (
        (
            "first/weights first/BatchNorm/gamma first/BatchNorm/beta "
            "first/BatchNorm/moving_mean- first/BatchNorm/moving_variance- "
            "Conv/weights Conv/BatchNorm/gamma Conv/BatchNorm/beta "
            "Conv/BatchNorm/moving_mean- Conv/BatchNorm/moving_variance- "
            "fully_connected/weights fully_connected/BatchNorm/beta "
            "fully_connected/BatchNorm/gamma "
            "fully_connected/BatchNorm/moving_mean- "
            "fully_connected/BatchNorm/moving_variance- fully_connected/Relu:0 "
            "ends 3 ours 3 regularization_losses 3 update_ops 6"
        ),
        "3.09652 0.251121 4.15405 -0.262178 0.107161 -7.73851 0.206344 -0.021382 -1.22455 3.15134 3.04532 -0.60432 5.09745 -0.315368 2.88945 0.276281 4.2121",
    ),
    "conv, rate": (
        ("Conv/weights Conv/biases Conv/BiasAdd:0"),
        "3.84762 0 -24.3862 3.65267",
    ),
    "conv, strides": (("s/weights s/biases s/Relu:0"), "3.32983 0 0.278702 4.432"),
    "dense": (
        ("fully_connected/weights fully_connected/biases fully_connected/Relu:0"),
        "1.39721 0 -4.1346 9.70476",
    ),
    "dense of images": (
        ("s/weights s/biases s/Tanh:0 regularization_losses 1"),
        "1.60835 0.00145345 0.445287 3.19666",
    ),
    "dense without biases": (
        ("fully_connected/weights- fully_connected/Relu:0"),
        "1.07265 0",
    ),
    "dropout": (("outputs:0"), "4.90826 0"),
    "dropout, no training": (("Dropout/Identity:0"), "3.39994 0"),
    "embeddings": (
        ("EmbedSequence/embeddings outputs:0 regularization_losses 1"),
        "2.36003 0.013885 3.18175",
    ),
    "l1": (("w* l1_regularizer:0"), "0.728203 0 1.16512"),
    "l1 and l2": (("w* l1_l2_regularizer:0"), "0.84355 0 1.49002"),
    "layer_norm": (
        ("LayerNorm/beta LayerNorm/gamma LayerNorm/batchnorm/add_1:0"),
        "24.0863 0 6.90158 111.925",
    ),
    "max_pool2d": (("MaxPool2D/MaxPool:0"), "43.3284 0"),
    "max_pool2d, same": (("MaxPool2D/MaxPool:0"), "229.571 0"),
    "norm": (
        (
            "BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- "
            "outputs:0 update_ops 2"
        ),
        "25.5214 0 6.90158 -0.142426 4.67829",
    ),
    "norm of rows": (
        (
            "BatchNorm/beta BatchNorm/gamma BatchNorm/moving_mean- "
            "BatchNorm/moving_variance- outputs:0 update_ops 2"
        ),
        "7.58486 0 12.6054 3.35226e-07 -0.939977 4.74654",
    ),
    "norm of rows, no training": (
        ("BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- outputs:0"),
        "6.90471 0 12.6054",
    ),
    "norm of rows, training is fed": (
        ("BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- outputs:0"),
        "7.20652 0 12.6054 0.139141 3.65447",
    ),
    "norm of rows, updates at once": (
        ("BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- outputs:0"),
        "7.20652 0 12.6054 0.139141 2.81401",
    ),
    "norm without a bias to 0": (
        (
            "BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- "
            "BatchNorm/BatchNorm/moving_mean/biased-* "
            "BatchNorm/BatchNorm/moving_mean/local_step-* outputs:0 update_ops 2"
        ),
        "25.5214 0 6.90158 0.0587339 3.29831 0.0440504 5",
    ),
    "norm, no training": (
        ("BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- outputs:0"),
        "121.298 0 52.0799",
    ),
    "norm, not fused": (
        (
            "BatchNorm/gamma BatchNorm/beta BatchNorm/moving_mean- "
            "BatchNorm/moving_variance- outputs:0 update_ops 2"
        ),
        "-20.5323 0 112.629 6.90158 -0.191494 3.27957",
    ),
    "norm, parameters": (
        (
            "BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- "
            "outputs:0 ours 2 regularization_losses 1 update_ops 2"
        ),
        "295.587 0.182682 7.54278 -0.142426 4.67829",
    ),
    "norm, training is fed": (
        (
            "BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- "
            "outputs:0 update_ops 2"
        ),
        "25.5214 0 6.90158 0.00834316 3.29831",
    ),
    "norm, updates at once": (
        ("BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- outputs:0"),
        "25.5214 0 6.90158 0.0461362 2.9524",
    ),
    "norm, weights": (
        (
            "BatchNorm/beta BatchNorm/moving_mean- BatchNorm/moving_variance- "
            "outputs:0 update_ops 2"
        ),
        "25.8771 0 6.90158 0.0228415 3.31843",
    ),
    "one_hot": (("OneHotEncoding/one_hot:0"), "6.77288 0"),
    "optimize_loss, Adam": (
        (
            "w/fully_connected/weights w/BatchNorm/beta w/BatchNorm/gamma "
            "w/BatchNorm/moving_mean- w/BatchNorm/moving_variance- global_step-* "
            "opt/beta1_power-* opt/beta2_power-* "
            "opt/w/fully_connected/weights/Adam-* "
            "opt/w/fully_connected/weights/Adam_1-* opt/w/BatchNorm/beta/Adam-* "
            "opt/w/BatchNorm/beta/Adam_1-* opt/w/BatchNorm/gamma/Adam-* "
            "opt/w/BatchNorm/gamma/Adam_1-* opt/control_dependency:0 "
            "regularization_losses 1 summaries 3 update_ops 2"
        ),
        "3.56701 0.00888883 -0.539216 -0.0281806 -4.80332 1.50542 -0.0729269 2.98884 -0.617379 2.08826 1.64025 2.49002 -1.96795 0.159988 0.00327867 0.000542146 -2.51824 0.104397",
    ),
    "optimize_loss, Momentum": (
        (
            "w/fully_connected/weights w/BatchNorm/beta w/BatchNorm/gamma "
            "w/BatchNorm/moving_mean- w/BatchNorm/moving_variance- global_step-* "
            "OptimizeLoss/learning_rate-* "
            "OptimizeLoss/w/fully_connected/weights/Momentum-* "
            "OptimizeLoss/w/BatchNorm/beta/Momentum-* "
            "OptimizeLoss/w/BatchNorm/gamma/Momentum-* "
            "OptimizeLoss/control_dependency_1:0 regularization_losses 1 "
            "summaries 10 update_ops 2"
        ),
        "3.56701 0.00465604 -5.69767 0.470286 -5.01828 0.974444 0.333458 2.28469 -0.616714 2.08547 7.5 -2.62591 0.0841059 -0.90682",
    ),
    "optimize_loss, SGD": (
        (
            "w/fully_connected/weights w/BatchNorm/beta w/BatchNorm/gamma "
            "w/BatchNorm/moving_mean- w/BatchNorm/moving_variance- global_step-* "
            "OptimizeLoss/learning_rate-* OptimizeLoss/control_dependency_1:0 "
            "regularization_losses 1 summaries 2 update_ops 2"
        ),
        "3.56701 0.0184972 0.17189 0.377455 -4.43243 1.91667 0.222565 3.51871 -0.616759 2.08881 7.5",
    ),
    "own normalizer": (
        ("fully_connected/weights fully_connected/biases fully_connected/Relu:0"),
        "0.0236494 0 -0.364745 0.250843",
    ),
    "repeat": (
        (
            "Repeat/convolution2d_1/weights Repeat/convolution2d_1/biases "
            "Repeat/convolution2d_2/weights Repeat/convolution2d_2/biases "
            "Repeat/convolution2d_2/Relu:0"
        ),
        "5.57906 0 -1.88743 0.172324 0.129328 0.0981311",
    ),
    "scaling": (("truncated_normal:0"), "7.94138 0"),
    "scaling, vector": (("random_uniform:0"), "1.37932 0"),
    "scope's regularizer": (
        (
            "outer/fully_connected/weights outer/fully_connected/biases "
            "outer/fully_connected/BiasAdd:0 regularization_losses 2"
        ),
        "0.419945 0.0106813 0.805905 14.4221",
    ),
    "shared dense": (
        ("both/weights both/biases add:0 regularization_losses 1"),
        "1.75685 0.0139512 0.678973 20",
    ),
    "softmax": (("outputs:0"), "90.1046 0"),
    "stack": (
        (
            "fc/fc_1/weights fc/fc_1/biases fc/fc_2/weights fc/fc_2/biases "
            "fc/fc_2/Tanh:0"
        ),
        "-2.69731 0 -0.15392 -0.610147 1.70781 11.6922",
    ),
    "sum": (("w* sum_regularizer:0"), "0.0461391 0 0.129959"),
    "unique embeddings": (
        ("EmbedSequence/embeddings outputs:0 regularization_losses 1"),
        "2.36003 0.013885 3.18175",
    ),
    "xavier": (("random_uniform:0"), "5.46275 0"),
    "xavier, normal": (("truncated_normal:0"), "6.05303 0"),
}
RECORDED_CRF = {
    "crf, 1 steps at last: best": "2 1.97556 1.99971 1.99519 1.83339",
    "crf, 1 steps at last: binary": "0 0 0 0 0",
    "crf, 1 steps at last: decoded": "0 0 2 2 1",
    "crf, 1 steps at last: gradient": "0.29938 -0.27938 -0.02 -0.55251 -0.01084 0.56335 -0.41878 0.98852 -0.56973 0 0 0 -0.02685 0.1375 -0.11065",
    "crf, 1 steps at last: likelihood": "-0.35579 -0.82862 -4.46681 0 -0.14792",
    "crf, 1 steps at last: multitag": "2.35579 1.74023 2.01967 2.21612 1.95409",
    "crf, 1 steps at last: norm": "2.35579 2.56885 2.56229 0 1.98131",
    "crf, 1 steps at last: of transitions": "0 0 0 0 0 0 0 0 0",
    "crf, 1 steps at last: score": "2 1.74023 -1.90451 0 1.83339",
    "crf, 1 steps at last: unary": "2 1.74023 -1.90451 0 1.83339",
    "crf, 1 steps: best": "2 1.97556 1.99971 1.99519 1.83339",
    "crf, 1 steps: binary": "0 0 0 0 0",
    "crf, 1 steps: decoded": "0 0 2 2 1",
    "crf, 1 steps: gradient": "0.29938 -0.27938 -0.02 -0.55251 -0.01084 0.56335 -0.41878 0.98852 -0.56973 0 0 0 -0.02685 0.1375 -0.11065",
    "crf, 1 steps: likelihood": "-0.35579 -0.82862 -4.46681 0 -0.14792",
    "crf, 1 steps: multitag": "2.35579 1.74023 2.01967 2.21612 1.95409",
    "crf, 1 steps: norm": "2.35579 2.56885 2.56229 0 1.98131",
    "crf, 1 steps: score": "2 1.74023 -1.90451 0 1.83339",
    "crf, 1 steps: unary": "2 1.74023 -1.90451 0 1.83339",
    "crf, 4 steps at last: best": "9.74111 4.0632 1.99971 1.99519 6.97259",
    "crf, 4 steps at last: binary": "1.22316 0.99061 0 0 0.44534",
    "crf, 4 steps at last: decoded": "0 1 1 1 0 1 0 0 2 0 0 0 2 0 0 0 1 1 1 0",
    "crf, 4 steps at last: gradient": "0.31579 -0.29461 -0.02117 -0.01647 -0.96684 0.98332 -0.00968 0.01647 -0.00679 -0.12505 0.13942 -0.01437 -0.53303 -0.01127 0.5443 -0.02171 0.04745 -0.02574 0 0 0 0 0 0 -0.41878 0.98852 -0.56973 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 -0.02477 0.13674 -0.11196 -0.008 0.04901 -0.04101 -0.00948 -0.88283 0.89231 0 0 0",
    "crf, 4 steps at last: likelihood": "-4.69054 -0.83312 -4.46681 0 -2.43421",
    "crf, 4 steps at last: multitag": "6.08789 3.94136 2.01967 0 5.03189",
    "crf, 4 steps at last: norm": "10.3217 4.7423 2.56229 0 7.29238",
    "crf, 4 steps at last: of transitions": "-0.02947 -1.22278 0.97607 -0.15215 -1.75619 0.83783 -0.00879 1.38165 -0.02618",
    "crf, 4 steps at last: score": "5.63115 3.90918 -1.90451 0 4.85818",
    "crf, 4 steps at last: unary": "4.40798 2.91857 -1.90451 0 4.41284",
    "crf, 4 steps: best": "9.74111 4.0632 1.99971 1.99519 6.97259",
    "crf, 4 steps: binary": "1.22316 0.99061 0 0 0.44534",
    "crf, 4 steps: decoded": "0 1 1 1 0 1 0 0 2 0 0 0 2 0 0 0 1 1 1 0",
    "crf, 4 steps: gradient": "0.31579 -0.29461 -0.02117 -0.01647 -0.96684 0.98332 -0.00968 0.01647 -0.00679 -0.12505 0.13942 -0.01437 -0.53303 -0.01127 0.5443 -0.02171 0.04745 -0.02574 0 0 0 0 0 0 -0.41878 0.98852 -0.56973 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 -0.02477 0.13674 -0.11196 -0.008 0.04901 -0.04101 -0.00948 -0.88283 0.89231 0 0 0",
    "crf, 4 steps: likelihood": "-4.69054 -0.83312 -4.46681 0 -2.43421",
    "crf, 4 steps: multitag": "6.08789 3.94136 2.01967 0 5.03189",
    "crf, 4 steps: norm": "10.3217 4.7423 2.56229 0 7.29238",
    "crf, 4 steps: of transitions": "-0.02947 -1.22278 0.97607 -0.15215 -1.75619 0.83783 -0.00879 1.38165 -0.02618",
    "crf, 4 steps: score": "5.63115 3.90918 -1.90451 0 4.85818",
    "crf, 4 steps: unary": "4.40798 2.91857 -1.90451 0 4.41284",
    "viterbi_decode": "0 1 1 1 9.74111",
}
RECORDED_LEARNING = {
    "clipped": (
        "train_op/control_dependency:0 in/weights in/BatchNorm/beta in/BatchNorm/moving_mean in/BatchNorm/moving_variance out/weights out/biases global_step in/weights/Momentum in/BatchNorm/beta/Momentum out/weights/Momentum out/biases/Momentum",
        "0.589754 0.573914 0.544879 1.79432 0.0793374 0.000182688 1.99559 1.32066 0.0561 3 0.334979 0.383252 0.383252 0.271",
    ),
    "multiplied": (
        "train_op/control_dependency:0 in/weights in/BatchNorm/beta in/BatchNorm/moving_mean in/BatchNorm/moving_variance out/weights out/biases global_step in/weights/Momentum in/BatchNorm/beta/Momentum out/weights/Momentum out/biases/Momentum summarize_grads/in/BatchNorm/beta_gradient summarize_grads/in/BatchNorm/beta_gradient_norm summarize_grads/in/weights_gradient summarize_grads/in/weights_gradient_norm summarize_grads/out/biases_gradient summarize_grads/out/biases_gradient_norm summarize_grads/out/weights_gradient summarize_grads/out/weights_gradient_norm",
        "0.589754 0.484702 0.343747 1.79572 0.214399 0.000182756 1.99559 0.72242 0.36915 3 0.282419 0.813042 2.67147 1.83294",
    ),
    "no step": (
        "train_op/control_dependency:0 in/weights in/BatchNorm/beta in/BatchNorm/moving_mean in/BatchNorm/moving_variance out/weights out/biases in/weights/Momentum in/BatchNorm/beta/Momentum out/weights/Momentum out/biases/Momentum",
        "0.589754 0.508876 0.38181 1.79493 0.25839 0.000182727 1.99559 1.0027 0.339224 0.30347 1.13082 1.76992 1.61083",
    ),
    "no updates": (
        "train_op/control_dependency:0 in/weights in/BatchNorm/beta in/BatchNorm/moving_mean in/BatchNorm/moving_variance out/weights out/biases global_step in/weights/Momentum in/BatchNorm/beta/Momentum out/weights/Momentum out/biases/Momentum",
        "0.589754 0.508876 0.38181 1.79493 0.25839 0 2 1.0027 0.339224 3 0.30347 1.13082 1.76992 1.61083",
    ),
    "plain": (
        "train_op/control_dependency:0 in/weights in/BatchNorm/beta in/BatchNorm/moving_mean in/BatchNorm/moving_variance out/weights out/biases global_step in/weights/Momentum in/BatchNorm/beta/Momentum out/weights/Momentum out/biases/Momentum",
        "0.589754 0.508876 0.38181 1.79493 0.25839 0.000182727 1.99559 1.0027 0.339224 3 0.30347 1.13082 1.76992 1.61083",
    ),
    "train": (
        "model.ckpt-3.index global_step in/BatchNorm/beta in/BatchNorm/moving_mean in/BatchNorm/moving_variance in/weights out/biases out/biases/Momentum out/weights out/weights/Momentum",
        "0.43042 3 0 0.000184854 1.99556 1.8 0.2805 1.355 1.00579 1.89151",
    ),
}


@pytest.fixture(scope="module")
def stand_ins():
    names = _contrib._stand_ins()
    return {
        "tf": tf.compat.v1,
        "layers": types.SimpleNamespace(**names["layers"]),
        "framework": types.SimpleNamespace(**names["framework"]),
    }


@pytest.fixture
def modules():
    """Returns each module of `tf.contrib` by its name."""
    stand_ins = _contrib._stand_ins().items()
    return {name: types.SimpleNamespace(**names) for name, names in stand_ins}


@pytest.mark.parametrize("name", RECORDED)
def test_layer_is_that_of_tensorflow_1(name, stand_ins):
    names, numbers = RECORDED[name]
    numbers = [float(number) for number in numbers.split()]
    found_names, values = contrib_layers.record(name, **stand_ins)
    assert found_names == names
    np.testing.assert_allclose(values, numbers, rtol=2e-5, atol=2e-6)


def test_every_graph_was_recorded(stand_ins):
    assert contrib_layers.names(**stand_ins) == sorted(RECORDED)


def test_random_fields_are_those_of_tensorflow_1(modules):
    values = contrib_crf.record(tf.compat.v1, modules["crf"])
    assert values.keys() == RECORDED_CRF.keys()
    for name, numbers in RECORDED_CRF.items():
        expected = [float(number) for number in numbers.split()]
        np.testing.assert_allclose(values[name], expected, 2e-5, 2e-5, err_msg=name)


def test_slims_training_is_that_of_tensorflow_1(modules):
    arguments = tf.compat.v1, modules["slim"], modules["training"]
    values = contrib_learning.record(*arguments)
    assert values.keys() == RECORDED_LEARNING.keys()
    for case, (names, numbers) in RECORDED_LEARNING.items():
        assert values[case][0] == names
        expected = [float(number) for number in numbers.split()]
        np.testing.assert_allclose(values[case][1], expected, 2e-5, 2e-6, err_msg=case)


def test_slims_training_refuses_clusters(modules):
    with pytest.raises(ValueError, match=r"`is_chief` .* must .* Received: False\."):
        modules["slim"].learning.train(tf.zeros([]), None, is_chief=False)
    with pytest.raises(ValueError, match=r"`number_of_steps` must be above 0.* -1\."):
        modules["slim"].learning.train(tf.zeros([]), None, number_of_steps=-1)
