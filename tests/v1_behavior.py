"""A pytest plugin (`-p v1_behavior`): tests run as after `disable_v2_behavior()`."""

import tensorflow as tf

tf.compat.v1.disable_v2_behavior()
