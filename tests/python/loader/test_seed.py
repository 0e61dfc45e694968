"""A seed that nobody gave is drawn once for all ranks, recorded, and found again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import nostall
from nostall.errors import PeerError, UsageError

WORLD = 3


def drawing(image: np.ndarray, context: nostall.Context) -> np.ndarray:
    return context.numpy().integers(0, 2**31, 4)


def test_all_ranks_take_the_seed_that_rank_0_draws(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    offered: dict[int, bytes] = {}
    barrier = threading.Barrier(WORLD)

    def make(rank: int) -> nostall.DataLoader:
        def allgather(mine: bytes) -> list[bytes]:
            offered[rank] = mine
            barrier.wait(60)
            return [offered[r] for r in range(WORLD)]

        return nostall.DataLoader(
            folder, 4, epochs=1, seed=None, tiers=[], rank=rank, world_size=WORLD, peers=allgather
        )

    with ThreadPoolExecutor(WORLD) as pool:
        loaders = list(pool.map(make, range(WORLD)))
    drawn = int.from_bytes(offered[0], "little")
    assert len(set(offered.values())) == WORLD
    for loader in loaders:
        assert loader.seed == drawn
        assert loader.state_dict()["seed"] == drawn
        assert loader.stats().seed == drawn
        assert nostall.Stats.from_dict(loader.stats().to_dict()).seed == drawn
        assert f"seed={drawn}" in repr(loader)
        loader.close()
    known = nostall.DataLoader(
        folder, 4, epochs=1, seed=drawn, tiers=[], rank=0, world_size=WORLD, peers="off"
    )
    assert known.plan.fingerprint == loaders[0].plan.fingerprint


def test_a_loader_without_a_seed_continues_with_that_of_the_state(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)

    def make(seed: int | None) -> nostall.DataLoader:
        return nostall.DataLoader(
            folder,
            8,
            epochs=1,
            seed=seed,
            transforms=drawing,
            decode=False,
            tiers=[],
            output="numpy",
        )

    with make(None) as first:
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        rest = [values.tolist() for values, _ in batches]
    with make(None) as second:
        second.load_state_dict(state)
        assert second.seed == first.seed
        assert [values.tolist() for values, _ in second] == rest
    with make(first.seed ^ 1) as other, pytest.raises(UsageError, match="seed="):
        other.load_state_dict(state)


def test_ranks_that_nothing_connects_are_told_to_pass_a_seed(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)
    with pytest.raises(UsageError, match="pass seed="):
        nostall.DataLoader(folder, 4, seed=None, tiers=[], rank=0, world_size=2)


def test_ranks_that_do_not_agree_on_drawing_a_seed_are_told(image_folder: Path) -> None:
    folder = nostall.ImageFolder(image_folder, index=False)

    def make(peers: object) -> None:
        nostall.DataLoader(folder, 4, seed=None, tiers=[], rank=0, world_size=2, peers=peers)

    def alone(mine: bytes) -> list[bytes]:
        raise PeerError("rank 0 waited in vain for ranks [1]")

    with pytest.raises(PeerError, match=r"in vain for ranks \[1\]; .*seed=None on all of them"):
        make(alone)
    with pytest.raises(UsageError, match=r"ranks \[1\] have another: pass seed=None on all"):
        make(lambda mine: [mine, b"settings of a loader"])
