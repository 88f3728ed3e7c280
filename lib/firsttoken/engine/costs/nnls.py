"""Least squares with coefficients that cannot be negative: a cost has no negative part (scipy stays optional)."""

from __future__ import annotations

import numpy as np


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 [k] that minimises ``|matrix x - target|``, for ``matrix`` [n, k] and ``target`` [n].

    The active set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23) on columns of length
    one; a column of zeros gets 0.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    columns, size = matrix / lengths, matrix.shape[1]
    x, free = np.zeros(size), np.zeros(size, dtype=bool)
    tolerance = 1e-10 * max(float(np.linalg.norm(target)), np.finfo(float).tiny)
    for _ in range(3 * size):  # a bound for rounding alone, which can free and bind the same column for ever
        gradient = np.where(free, -np.inf, columns.T @ (target - columns @ x))
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            wanted = np.zeros(size)
            wanted[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
            negative = np.flatnonzero(free & (wanted <= 0))
            if not len(negative):
                break
            shares = x[negative] / np.maximum(x[negative] - wanted[negative], np.finfo(float).tiny)
            x = np.maximum(x + shares.min() * (wanted - x), 0.0)
            free[negative[shares.argmin()]] = False
            x[~free] = 0.0
        x = wanted
    return x / lengths
