# TensorFlow 2.15, the last one with tf.estimator, for GPUs; pip must not replace it.
FROM tensorflow/tensorflow:2.15.0-gpu

WORKDIR /estimator-accum
COPY pyproject.toml setup.py README.md LICENSE ./
COPY estimator_accum estimator_accum
COPY bert_finetune bert_finetune
COPY housing_example housing_example
RUN python -m pip install --no-cache-dir '.[bert,plot]' tensorflow-estimator==2.15.0

# Not in the package, and started from this folder.
COPY distributed distributed
COPY examples examples
COPY scripts scripts

RUN useradd --create-home trainer
USER trainer
ENTRYPOINT ["estimator-accum"]
