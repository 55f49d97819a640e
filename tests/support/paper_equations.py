"""The papers' equations in numpy, one iteration at a time: what every schedule must reproduce.

Nothing here is shared with the package. Each function takes x0 (n, d), `grad(X, t)` (all agents'
gradients at X for their t-th draw), `W(r)` (the matrix of round r), alpha, tau and the number of
rounds, and returns X at every round boundary: (rounds + 1, n, d). Histories are kept whole, so
that x^{t-tau} is written as it is printed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

A = NDArray[np.float64]
Grad = Callable[[A, int], A]
Mixing = Callable[[int], A]


def oldsgd(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    x, g = [x0], []
    for t in range(1, rounds * tau + 1):
        g.append(grad(x[t - 1], t - 1))
        if t % tau != 0:
            x.append(x[t - 1] - alpha * g[t - 1])
        else:
            steps = sum(g[k] for k in range(t - tau, t))
            x.append(W(t // tau - 1) @ x[t - tau] - alpha * steps)
    return np.array(x[::tau])


LINE = 32  # numbers that are never cut apart


def ranges(d: int, P: int) -> list[slice]:
    """P ranges of whole lines, the longer ones first."""
    lines = [list(part) for part in np.array_split(np.arange(-(-d // LINE)), P)]
    firsts = np.cumsum([0, *map(len, lines)]) * LINE
    return [slice(min(a, d), min(b, d)) for a, b in itertools.pairwise(firsts)]


def xoldsgd(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    fragments: int = 1,
    gamma: float = 0.1,
) -> A:
    P, parts = fragments, ranges(x0.shape[1], fragments)
    leaves = {k * tau // P: k for k in range(P)}
    lands = {(k + 1) * tau // P: k for k in range(P)}
    x, y, boundaries = x0, np.zeros_like(x0), [x0]
    for r in range(rounds):
        sent = {}
        for step in range(tau + 1):
            if step in lands:
                k = lands[step]
                e = (W(r) - np.eye(len(x0))) @ sent[k]
                x, y = x.copy(), y.copy()
                x[:, parts[k]] += e
                y[:, parts[k]] -= gamma * e
            if step == tau:
                break
            if step in leaves:
                sent[leaves[step]] = x[:, parts[leaves[step]]]
            x = x - alpha * grad(x, r * tau + step) - y / tau
        boundaries.append(x)
    return np.array(boundaries)


def dsgd_cta(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    assert tau == 1
    x = [x0]
    for t in range(rounds):
        x.append(W(t) @ x[t] - alpha * grad(x[t], t))
    return np.array(x)


def ldsgd(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    x = [x0]
    for t in range(1, rounds * tau + 1):
        step = x[t - 1] - alpha * grad(x[t - 1], t - 1)
        x.append(W(t // tau - 1) @ step if t % tau == 0 else step)
    return np.array(x[::tau])


def dsgd(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    assert tau == 1
    x = [x0]
    for t in range(rounds):
        x.append(W(t) @ (x[t] - alpha * grad(x[t], t)))
    return np.array(x)


def lsgd(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    x = [x0]
    for t in range(1, rounds * tau + 1):
        step = x[t - 1] - alpha * grad(x[t - 1], t - 1)
        x.append(mean(step) if t % tau == 0 else step)
    return np.array(x[::tau])


def kgt(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, eta_s: float = 1.0) -> A:
    eta_c, c, x = alpha, np.zeros_like(x0), [x0]
    for r in range(rounds):
        local = x[r]
        for k in range(tau):
            local = local - eta_c * (grad(local, r * tau + k) + c)
        z = (x[r] - local) / (tau * eta_c)
        c = c - z + W(r) @ z
        x.append(W(r) @ (x[r] - tau * eta_c * eta_s * z))
    return np.array(x)


def lugt(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, eta: float = 1.0) -> A:
    """The tracking variable is mixed with the W of the round that its gradient opens."""
    x, g = [x0], [grad(x0, 0)]
    y = [alpha * g[0]]
    for k in range(rounds * tau):
        synchronise = (k + 1) % tau == 0
        r = (k + 1) // tau
        x.append(x[k] - eta * y[k])
        if synchronise:
            x[k + 1] = W(r - 1) @ x[k + 1]
        g.append(grad(x[k + 1], k + 1))
        y.append(y[k] + alpha * g[k + 1] - alpha * g[k])
        if synchronise:
            y[k + 1] = W(r) @ y[k + 1]
    return np.array(x[::tau])


def led(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    beta: float | None = None,
) -> A:
    beta = 1 / tau if beta is None else beta
    y, x = np.zeros_like(x0), [x0]
    for r in range(rounds):
        phi = x[r]
        for k in range(tau):
            phi = phi - alpha * grad(phi, r * tau + k) - beta * y
        x.append(W(r) @ phi)
        y = y + phi - x[r + 1]
    return np.array(x)


def oled(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    beta: float | None = None,
) -> A:
    beta = 1 / tau if beta is None else beta
    y, x = np.zeros_like(x0), [x0]
    for r in range(rounds):
        phi = x[r]
        for k in range(tau):
            phi = phi - alpha * grad(phi, r * tau + k) - beta * y
        x.append(W(r) @ x[r] + (phi - x[r]))
        y = y + phi - x[r + 1]
    return np.array(x)


def olgt(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, eta: float = 1.0) -> A:
    """Where W changes from round to round and tau = 1, y is mixed by the W of the next round."""
    x, g = [x0], [grad(x0, 0)]
    y = [alpha * g[0]]
    for k in range(rounds * tau):
        old = k + 1 - tau
        if (k + 1) % tau != 0:
            x.append(x[k] - eta * y[k])
            g.append(grad(x[k + 1], k + 1))
            y.append(y[k] + alpha * g[k + 1] - alpha * g[k])
        else:
            r = (k + 1) // tau - 1
            x.append(W(r) @ x[old] - eta * sum(y[t] for t in range(old, k + 1)))
            g.append(grad(x[k + 1], k + 1))
            tracked = sum(g[t + 1] - g[t] for t in range(old, k + 1))
            y.append(W(r if tau > 1 else r + 1) @ y[old] + alpha * tracked)
    return np.array(x[::tau])


def cocod(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    x = [x0]
    for t in range(1, rounds * tau + 1):
        step = x[t - 1] - alpha * grad(x[t - 1], t - 1)
        x.append(mean(x[t - tau]) + (step - x[t - tau]) if t % tau == 0 else step)
    return np.array(x[::tau])


def overlap_local_sgd(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    a: float = 0.6,
    gamma: float = 0.7,
) -> A:
    x = [x0]
    z, v, on_its_way = mean(x0), np.zeros_like(x0), mean(x0)
    for t in range(1, rounds * tau + 1):
        step = x[t - 1] - alpha * grad(x[t - 1], t - 1)
        if t % tau == 0:
            v = gamma * v + (on_its_way - z)
            z = z + v
            step = (1 - a) * step + a * z
            on_its_way = mean(step)
        x.append(step)
    return np.array(x[::tau])


def co2(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    beta: float = 0.5,
    outer: float = 1.0,
    Lambda: float = 1.0,
    clip_m: float | None = None,
) -> A:
    x, m = [x0], np.zeros_like(x0)
    results = [x0]  # of "round -1"; results[r] are those of round r - 1
    for r in range(rounds):
        local = x[r]
        for k in range(tau):
            local = local - alpha * grad(local, r * tau + k)
        results.append(local)
        m = beta * m + (x[r] - mean(results[r])) / Lambda
        bounded = m if clip_m is None else np.minimum(np.maximum(m, -clip_m), clip_m)
        x.append(x[r] - outer * bounded)
    return np.array(x)


def diloco(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    outer: float = 0.7,
    outer_momentum: float = 0.9,
) -> A:
    """Nesterov as torch.optim.SGD has it."""
    theta, m = [x0], np.zeros_like(x0)
    for r in range(rounds):
        local = sgd_steps(theta[r], grad, alpha, r * tau, tau)
        outer_gradient = theta[r] - mean(local)
        m = outer_momentum * m + outer_gradient
        theta.append(theta[r] - outer * (outer_gradient + outer_momentum * m))
    return np.array(theta)


def eager_diloco(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    outer: float = 0.7,
    outer_momentum: float = 0.9,
) -> A:
    """The fresh own outer gradient, and the late ones of all others: each counts 1/n.

    The mean of the models comes with the first outer step.
    """
    n = len(x0)
    theta, m, late = [x0], np.zeros_like(x0), np.zeros_like(x0)
    for r in range(rounds):
        fresh = theta[r] - sgd_steps(theta[r], grad, alpha, r * tau, tau)
        eager = np.array(
            [(fresh[i] + sum(late[j] for j in range(n) if j != i)) / n for i in range(n)]
        )
        m = outer_momentum * m + eager
        start = mean(x0) if r == 0 else theta[r]
        theta.append(start - outer * (eager + outer_momentum * m))
        late = fresh
    return np.array(theta)


def moldsgd(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    outer: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
) -> A:
    """Of a round of OLDSGD, in fragments or not, the change is the outer gradient."""
    theta, m = [x0], np.zeros_like(x0)
    for r in range(rounds):
        shifted = (lambda X, t, r=r: grad(X, r * tau + t), lambda _, r=r: W(r))
        x = xoldsgd(theta[r], *shifted, alpha, tau, 1, fragments, 0.0)[-1]
        outer_gradient = theta[r] - x
        m = outer_momentum * m + outer_gradient
        theta.append(theta[r] - outer * (outer_gradient + outer_momentum * m))
    return np.array(theta)


def noloco(
    x0: A,
    grad: Grad,
    W: Mixing,
    alpha: float,
    tau: int,
    rounds: int,
    outer: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float | None = None,
) -> A:
    gamma = outer if pull is None else pull
    phi, m = [x0], np.zeros_like(x0)
    for r in range(rounds):
        delta = sgd_steps(phi[r], grad, alpha, r * tau, tau) - phi[r]
        m = outer_momentum * m + outer * (W(r) @ delta) - gamma * (phi[r] - W(r) @ phi[r])
        phi.append(phi[r] + m)
    return np.array(phi)


def dga(x0: A, grad: Grad, W: Mixing, alpha: float, tau: int, rounds: int, **_: Any) -> A:
    """Written with the gradients: at the end of a round, those of the round before are replaced by
    their mean, and at the end of the first one so are the models at the start."""
    x, g = [x0], []
    for t in range(1, rounds * tau + 1):
        g.append(grad(x[t - 1], t - 1))
        step = x[t - 1] - alpha * g[t - 1]
        if t == tau:
            step = step + mean(x0) - x0
        elif t % tau == 0:
            old = np.sum(g[t - 2 * tau : t - tau], axis=0)
            step = step - alpha * (mean(old) - old)
        x.append(step)
    return np.array(x[::tau])


def sgd_steps(x: A, grad: Grad, alpha: float, first: int, tau: int) -> A:
    for t in range(first, first + tau):
        x = x - alpha * grad(x, t)
    return x


def mean(X: A) -> A:
    return np.broadcast_to(X.mean(axis=0), X.shape)


ALL: dict[str, Callable[..., A]] = {
    f.__name__: f
    for f in (
        oldsgd, ldsgd, dsgd, dsgd_cta, kgt, lugt, led, lsgd, olgt, oled, cocod,
        overlap_local_sgd, co2, xoldsgd, dga, diloco, eager_diloco, noloco, moldsgd,
    )
}  # fmt: skip


def taus(name: str) -> tuple[int, ...]:
    return (1,) if name.startswith("dsgd") else (1, 2, 5)


class Quadratics:
    """f_i(x) = (x - b_i)^T A_i (x - b_i) / 2 with random A_i and minimisers b_i far apart, and a
    gradient noise that is a fixed function of the draw."""

    def __init__(self, n: int, d: int, seed: int = 0, noise: float = 0.0, spread: float = 1.0):
        random = np.random.default_rng(seed)
        B = random.standard_normal((n, d, d))
        eigenvalues, Q = random.uniform(0.5, 2.0, (n, d)), np.linalg.qr(B)[0]
        self.A = np.einsum("nij,nj,nkj->nik", Q, eigenvalues, Q)
        self.b = 3.0 * spread * random.standard_normal((n, d))
        self.x0 = random.standard_normal((n, d))
        self.minimiser = np.linalg.solve(self.A.sum(axis=0), np.einsum("nij,nj->i", self.A, self.b))
        self.noise, self.seed = noise, seed

    def grad(self, X: A, t: int) -> A:
        g: A = np.einsum("nij,nj->ni", self.A, X - self.b)
        if self.noise:
            random = np.random.default_rng((self.seed, t))
            g = g + self.noise * random.standard_normal(g.shape)
        return g

    def error(self, x: A) -> float:
        """Distance of a model, or the worst of several, from the minimiser of the mean."""
        return float(np.linalg.norm(x - self.minimiser, axis=-1).max())
