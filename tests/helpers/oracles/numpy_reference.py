"""Optimizers in float64 NumPy: the oracle of the tests.

Each is a class with `step(parameter, gradient) -> parameter`. Rules and defaults are
those of `tf.compat.v1.train`; AdamW is google-research/bert's, without bias correction.
"""

import numpy as np


class SGD:
    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def step(self, parameter, gradient):
        return parameter - self.learning_rate * gradient


class Momentum:
    def __init__(self, learning_rate, momentum=0.9):
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.trace = 0.0

    def step(self, parameter, gradient):
        self.trace = self.momentum * self.trace + gradient
        return parameter - self.learning_rate * self.trace


class Adam:
    def __init__(self, learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.learning_rate = learning_rate
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.m = self.v = 0.0
        self.updates = 0

    def step(self, parameter, gradient):
        self.updates += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
        self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2
        correction = np.sqrt(1 - self.beta2**self.updates) / (
            1 - self.beta1**self.updates
        )
        rate = self.learning_rate * correction
        return parameter - rate * self.m / (np.sqrt(self.v) + self.epsilon)


class AdamW:
    def __init__(self, learning_rate, weight_decay=0.01, epsilon=1e-6):
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.epsilon = epsilon
        self.m = self.v = 0.0

    def step(self, parameter, gradient):
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        update = self.m / (np.sqrt(self.v) + self.epsilon)
        update = update + self.weight_decay * parameter
        return parameter - self.learning_rate * update


def clip_by_global_norm(gradients, clip_norm):
    """Returns (clipped gradients, norm before clipping)."""
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients))
    factor = min(1.0, clip_norm / norm)
    return [gradient * factor for gradient in gradients], norm
