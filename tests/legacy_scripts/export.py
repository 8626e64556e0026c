"""export_saved_model, loaded by the loaders of both TensorFlows."""

import sys

import numpy as np
import tensorflow as tf

INPUTS = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]


def input_fn():
    data = ({"x": INPUTS}, 2 * INPUTS)
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(8)


columns = [tf.feature_column.numeric_column("x")]
estimator = tf.estimator.DNNRegressor([4], columns, model_dir=sys.argv[1])
estimator.train(input_fn, steps=20)
specification = tf.feature_column.make_parse_example_spec(columns)
folder = estimator.export_saved_model(
    sys.argv[1] + "/export",
    tf.estimator.export.build_parsing_serving_input_receiver_fn(specification),
).decode()

number = tf.train.Feature(float_list=tf.train.FloatList(value=[0.5]))
example = tf.train.Example(features=tf.train.Features(feature={"x": number}))
serialized = example.SerializeToString()
loaded = tf.saved_model.load(folder)
first = loaded.signatures["predict"](examples=tf.constant([serialized]))
first = first["predictions"].numpy()
with tf.compat.v1.Session(graph=tf.Graph()) as session:
    meta_graph = tf.compat.v1.saved_model.load(session, ["serve"], folder)
    signature = meta_graph.signature_def["predict"]
    second = session.run(
        signature.outputs["predictions"].name,
        {signature.inputs["examples"].name: [serialized]},
    )
predictions = estimator.predict(lambda: tf.data.Dataset.from_tensors({"x": [[0.5]]}))
third = next(predictions)["predictions"]
np.testing.assert_allclose(first, second, rtol=1e-6)
np.testing.assert_allclose(first[0], third, rtol=1e-6)
print("prediction", first)
