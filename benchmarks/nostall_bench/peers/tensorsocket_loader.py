"""TensorSocket: torch's DataLoader in a process of its own, whose batches training processes share.

It is made for several trainings on one machine. Here one consumes, so that the row shows what the way
through its sockets and shared memory costs. It never sends the last batch of an epoch, nor one that is
not full; only what arrived counts. Its sockets listen on all interfaces. As it proposes, eight batches
of the loader are one of the producer: with fewer than two it repeats the first batch without end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Iterator
from itertools import count
from typing import Any

from nostall_bench.peers import Job
from nostall_bench.peers.torch_loader import Files

REQUIRES = ("tensorsocket", "torch", "torchvision")
_TOGETHER = 8


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _produce(job: Job, ports: list[int]) -> None:
    import torch
    from tensorsocket import TensorProducer
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(
        Files(job, "tv"),  # type: ignore[arg-type]
        batch_size=job.batch_size // _TOGETHER,
        shuffle=True,
        generator=torch.Generator().manual_seed(job.seed),
        num_workers=job.threads,
        persistent_workers=True,
        drop_last=True,
    )
    data, acks, *hearts = ports
    producer = TensorProducer(
        loader, data, acks, heart_ports=(hearts[0], hearts[1]), producer_batch_size=_TOGETHER
    )
    for _ in count():
        for _ in producer:
            pass


def epochs(job: Job) -> Iterator[Iterator[int]]:
    """One consumer of a producer that goes on until it is ended."""
    from tensorsocket import TensorConsumer

    ports = _free_ports(4)
    context = multiprocessing.get_context("spawn")
    producer = context.Process(target=_produce, args=(job, ports))
    producer.start()
    try:
        data, acks, *hearts = ports
        consumer = TensorConsumer(
            data, acks, heart_ports=(hearts[0], hearts[1]), batch_size=job.batch_size
        )
        for _ in range(job.epochs):
            yield (len(labels) for _, labels in consumer)
    finally:
        producer.terminate()
