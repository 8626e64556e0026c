"""run_classifier.py on a machine that has two logical CPUs."""

import sys

import tensorflow as tf

from bert_finetune import run_classifier

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
run_classifier.main(sys.argv)
