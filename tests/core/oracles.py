"""Optimizers on a dense float64 table, written from their published formulas.

Every row of the vocabulary is stored and visited at every step, so the dense meaning needs no
thought here: what the fused rules do with histories and series is done by a plain loop.
"""

import functools

import numpy as np


def batch_gradient(num_rows, dim, keys, grads):
    """Sums of equal keys, dense, and which rows the batch touches."""
    gradient = np.zeros((num_rows, dim))
    np.add.at(gradient, keys, np.asarray(grads, np.float64))
    touched = np.zeros(num_rows, bool)
    touched[keys] = True
    return gradient, touched


class Oracle:
    def __init__(self, rows, weight_decay=0.0, clip_value=0.0):
        self.w = np.array(rows, np.float64)
        self.weight_decay = weight_decay
        self.clip_value = clip_value

    def step(self, t, lr, keys, grads):
        g, touched = batch_gradient(*self.w.shape, keys, grads)
        if self.clip_value:
            g = np.clip(g, -self.clip_value, self.clip_value)
        self.w -= self.w * self.weight_decay * lr
        self.update(t, lr, g, touched)


class Sgd(Oracle):
    def update(self, t, lr, g, touched):
        self.w -= lr * g


class Momentum(Oracle):
    """Keras' SGD with momentum, or TF1's MomentumOptimizer."""

    def __init__(
        self, rows, momentum, nesterov=False, lazy=False, momentum_before_rate=False, **kwargs
    ):
        super().__init__(rows, **kwargs)
        self.momentum, self.nesterov, self.lazy = momentum, nesterov, lazy
        self.tf1 = momentum_before_rate
        self.v = np.zeros_like(self.w)

    def update(self, t, lr, g, touched):
        rows = touched if self.lazy else slice(None)
        mu, g, v, w = self.momentum, g[rows], self.v[rows], self.w[rows]
        if self.tf1:
            v = mu * v + g
            w = w - lr * (g + mu * v if self.nesterov else v)
        else:
            v = mu * v - lr * g
            w = w + (mu * v - lr * g if self.nesterov else v)
        self.v[rows], self.w[rows] = v, w


class Adagrad(Oracle):
    def __init__(self, rows, initial_accumulator, epsilon, **kwargs):
        super().__init__(rows, **kwargs)
        self.acc = np.full_like(self.w, initial_accumulator)
        self.epsilon = epsilon

    def update(self, t, lr, g, touched):
        self.acc += g**2
        self.w -= lr * g / np.sqrt(self.acc + self.epsilon)


class AdagradDecay(Oracle):
    """DeepRec's: a row decays at most once per update, and never below what it started from."""

    def __init__(self, rows, initial_accumulator, decay_steps, decay_rate, **kwargs):
        super().__init__(rows, **kwargs)
        self.initial, self.every, self.rate = initial_accumulator, decay_steps, decay_rate
        self.acc = np.full_like(self.w, initial_accumulator)
        self.decays = np.zeros(len(self.w), int)

    def update(self, t, lr, g, touched):
        for row in np.flatnonzero(touched):
            if t // self.every > self.decays[row]:
                self.acc[row] = np.maximum(self.acc[row] * self.rate, self.initial)
                self.decays[row] += 1
            self.acc[row] += g[row] ** 2
            self.w[row] -= lr * g[row] / np.sqrt(self.acc[row])


class Rmsprop(Oracle):
    """With momentum, of the rows in the batch."""

    def __init__(self, rows, beta_1, beta_2, epsilon, **kwargs):
        super().__init__(rows, **kwargs)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)

    def update(self, t, lr, g, touched):
        g, m, v = g[touched], self.m[touched], self.v[touched]
        v = self.beta_2 * v + (1 - self.beta_2) * g**2
        m = self.beta_1 * m + lr * g / np.sqrt(v + self.epsilon)
        self.m[touched], self.v[touched] = m, v
        self.w[touched] -= m


class RowWiseAdagrad(Oracle):
    def __init__(self, rows, initial_accumulator, epsilon, **kwargs):
        super().__init__(rows, **kwargs)
        self.acc = np.full((len(self.w), 1), initial_accumulator)
        self.epsilon = epsilon

    def update(self, t, lr, g, touched):
        self.acc += (g**2).mean(axis=1, keepdims=True)
        self.w -= lr * g / (np.sqrt(self.acc) + self.epsilon)


class Adam(Oracle):
    def __init__(
        self,
        rows,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        amsgrad=False,
        lazy=False,
        row_weight_decay=0.0,
        **kwargs,
    ):
        super().__init__(rows, **kwargs)
        self.row_weight_decay = row_weight_decay
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.amsgrad, self.lazy = amsgrad, lazy
        self.m, self.v, self.v_hat = (np.zeros_like(self.w) for _ in range(3))

    def update(self, t, lr, g, touched):
        rows = touched if self.lazy else slice(None)
        alpha = lr * np.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        self.m[rows] = self.beta_1 * self.m[rows] + (1 - self.beta_1) * g[rows]
        self.v[rows] = self.beta_2 * self.v[rows] + (1 - self.beta_2) * g[rows] ** 2
        self.v_hat[rows] = np.maximum(self.v_hat[rows], self.v[rows])
        v = self.v_hat if self.amsgrad else self.v
        self.w[rows] -= alpha * self.row_weight_decay * self.w[rows]
        self.w[rows] -= alpha * self.m[rows] / (np.sqrt(v[rows]) + self.epsilon)


class Ftrl(Oracle):
    """TF1's FtrlOptimizer on sparse gradients: only rows of the batch change."""

    def __init__(
        self,
        rows,
        initial_accumulator=0.1,
        l1=0.0,
        l2=0.0,
        l2_shrinkage=0.0,
        learning_rate_power=-0.5,
        beta=0.0,
        **kwargs,
    ):
        super().__init__(rows, **kwargs)
        self.n = np.full_like(self.w, initial_accumulator)
        self.z = np.zeros_like(self.w)
        self.l1, self.l2, self.l2_shrinkage = l1, l2, l2_shrinkage
        self.power, self.beta = learning_rate_power, beta

    def update(self, t, lr, g, touched):
        g, w, n, z = g[touched], self.w[touched], self.n[touched], self.z[touched]
        new_n = n + g**2
        sigma = (new_n**-self.power - n**-self.power) / lr
        z = z + g + 2 * self.l2_shrinkage * w - sigma * w
        quadratic = new_n**-self.power / lr + 2 * (self.l2 + self.beta / (2 * lr))
        w = np.where(np.abs(z) > self.l1, (np.sign(z) * self.l1 - z) / quadratic, 0.0)
        self.w[touched], self.n[touched], self.z[touched] = w, new_n, z


# Of each rule; a rule's options are the arguments of its oracle.
ORACLES = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "adagrad_decay": AdagradDecay,
    "rmsprop": Rmsprop,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "lazy_adam": functools.partial(Adam, lazy=True),
    "ftrl": Ftrl,
}


class Pair:
    """A table and the oracle of its rule, which take the same steps."""

    def __init__(self, core, rule, options, dim, num_rows, **table_options):
        self.core, self.rule, self.options = core, rule, options
        self.keys = np.arange(num_rows)
        self.table = core.Table(
            "t", dim, initializer="uniform", a=-0.5, b=0.5, seed=3, **table_options
        )
        self.oracle = ORACLES[rule](self.table.find(self.keys)[0], **options)

    def step(self, step, rate, keys, grads):
        rate = float(np.float32(rate))
        self.core.apply_gradients(self.table, self.rule, rate, step, keys, grads, **self.options)
        self.oracle.step(step, rate, keys, grads)

    def compare(self, tolerance=1e-5):
        found = self.table.find(self.keys)[0]
        np.testing.assert_allclose(found, self.oracle.w, atol=tolerance, rtol=0)
