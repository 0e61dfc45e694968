"""Data-parallel training by mpi4py: per layer an agreement of 8 bytes and the mean gradient.

nostall run --profile arrivals -- mpirun -n 4 python examples/mpi-training.py
nostall report arrivals -o arrivals.html -o calls.csv
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

SHAPES = [(784, 512), (512, 512), (512, 10)]


def train(steps: int) -> float:
    """The last step's error, averaged over the ranks."""
    world = MPI.COMM_WORLD
    draw = np.random.default_rng(world.rank)
    same = np.random.default_rng(0)
    weights = [same.standard_normal(shape).astype(np.float32) * 0.03 for shape in SHAPES]
    error = np.zeros(1)
    for _ in range(steps):
        images = draw.standard_normal((64, 784)).astype(np.float32)
        labels = (images[:, :10] > images[:, 10:20]).argmax(axis=1)
        layers = [images]
        for weight in weights[:-1]:
            layers.append(np.maximum(layers[-1] @ weight, 0))
        scores = layers[-1] @ weights[-1]
        wrong = scores - np.eye(10, dtype=np.float32)[labels]
        error[0] = float((wrong**2).mean())
        for i in reversed(range(len(weights))):
            gradient = layers[i].T @ wrong / len(images)
            wrong = (wrong @ weights[i].T) * (layers[i] > 0)
            ready = np.ones(1)
            world.Allreduce(MPI.IN_PLACE, ready)
            world.Allreduce(MPI.IN_PLACE, gradient)
            weights[i] -= 0.01 / world.size * gradient
    world.Allreduce(MPI.IN_PLACE, error)
    return float(error[0]) / world.size


if __name__ == "__main__":
    mean = train(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    if MPI.COMM_WORLD.rank == 0:
        print(f"mean squared error {mean:.4f}")
