# TensorFlow's own image for GPUs; pip must not replace its TensorFlow.
ARG TENSORFLOW=2.15.0
FROM tensorflow/tensorflow:${TENSORFLOW}-gpu

WORKDIR /estimator-accum
COPY pyproject.toml setup.py README.md LICENSE ./
COPY estimator_accum estimator_accum
COPY bert_finetune bert_finetune
COPY housing_example housing_example
# Keras 2 for TensorFlow 2.16 and later, of the same minor version.
ARG TF_KERAS
# hadolint ignore=DL3013 # this folder has no version
RUN python -m pip install --no-cache-dir '.[bert,plot]' tensorflow-estimator==2.15.0 \
    ${TF_KERAS:+"tf_keras==$TF_KERAS"}

# Not in the package, and started from this folder.
COPY distributed distributed
COPY examples examples
COPY scripts scripts

# A fixed number, so that `fsGroup` of a cluster can name it.
RUN useradd --create-home --uid=10001 trainer
USER 10001
ENTRYPOINT ["estimator-accum"]
