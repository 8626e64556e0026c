"""Optimizers in float64 NumPy: the oracle of the tests.

Each is a class with `step(parameter, gradient) -> parameter`. Rules and defaults are
those of `tf.compat.v1.train`; AdamW is google-research/bert's, without bias correction;
LAMB and Adafactor are those of their papers.
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


class Lamb:
    def __init__(self, learning_rate, weight_decay=0.01):
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.m = self.v = 0.0
        self.updates = 0

    def step(self, parameter, gradient):
        self.updates += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m = self.m / (1 - 0.9**self.updates)
        v = self.v / (1 - 0.999**self.updates)
        update = m / (np.sqrt(v) + 1e-6) + self.weight_decay * parameter
        norms = np.linalg.norm(parameter), np.linalg.norm(update)
        ratio = norms[0] / norms[1] if self.weight_decay and all(norms) else 1.0
        return parameter - self.learning_rate * ratio * update


class Adafactor:
    def __init__(self, learning_rate):
        self.learning_rate = learning_rate
        self.row = self.column = self.v = 0.0
        self.updates = 0

    def step(self, parameter, gradient):
        self.updates += 1
        decay = 1 - self.updates**-0.8
        squares = gradient**2 + 1e-30
        self.v = decay * self.v + (1 - decay) * squares
        v = self.v
        if gradient.ndim == 2:
            self.row = decay * self.row + (1 - decay) * squares.mean(1)
            self.column = decay * self.column + (1 - decay) * squares.mean(0)
            v = np.outer(self.row, self.column) / self.row.mean()
        update = gradient / np.sqrt(v)
        update = update / max(1.0, np.sqrt(np.mean(update**2)))
        return parameter - self.learning_rate * update


def clip_by_global_norm(gradients, clip_norm):
    """Returns (clipped gradients, norm before clipping)."""
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients))
    factor = min(1.0, clip_norm / norm)
    return [gradient * factor for gradient in gradients], norm
