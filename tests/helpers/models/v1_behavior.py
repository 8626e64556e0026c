"""A pytest plugin (`-p tests.helpers.models.v1_behavior`) that runs tests after `disable_v2_behavior()`."""

import tensorflow as tf

tf.compat.v1.disable_v2_behavior()
