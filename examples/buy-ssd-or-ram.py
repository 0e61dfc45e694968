"""Should the next money go into memory or into SSDs? Answers it for one's own cluster and training.

Change the four tables below; all quantities are MB and MB/s, prices are per MB and node. The letters
are those of the performance model (docs/guide/simulate.md). `nostall calibrate` measures most of
them: `calibration = "file"` takes its place.

    python examples/buy-ssd-or-ram.py
"""

from __future__ import annotations

from nostall.simulate import cheapest, points_text, read_scenario, sweep

# %% The cluster as it is: four nodes, a small staging buffer, nothing to keep samples in.
CLUSTER = {
    "N": 4,
    "c": 100,  # what the network computes on a node
    "beta": 200,  # what one thread decodes and transforms
    "b_c": 10000,  # between nodes
    "b_fs": 2000,  # a node to the file system
    "t": {"1": 66, "2": 86, "3": 129, "4": 146},  # the file system, by the number of clients
    "names": ["staging", "RAM", "SSD"],
    "p": [2, 2, 2],
    "d": [1024, 0, 0],
    "r": [{"2": 21164}, {"2": 21164}, {"1": 66, "2": 86}],
}

# %% The training: here a tenth of the published scenario 3, so that the answer comes in seconds.
DATASET = {"samples": 30000, "distribution": "norm", "loc": 2.0, "scale": 0.2}
TRAINING = {"E": 5, "B": 100}

# %% What can be bought for each node, and for how much.
CHOICES = {"d.1": [0, 2560, 5120, 10240], "d.2": [0, 5120, 10240, 20480]}
PRICES = {"d.1": 0.005, "d.2": 0.0002}


def main() -> None:
    """Sweeps all choices and prints the cheapest one near the best that can be."""
    scenario = read_scenario(
        {
            "environment": CLUSTER,
            "dataset": DATASET,
            "training": TRAINING,
            "policies": ["hdmlp", "nostall"],
        }
    )
    points = sweep(scenario, [CHOICES], ["consistent"])
    print(points_text(points))
    best = min(p.read_once_bound for p in points)
    for policy in ("HDMLP", "nostall"):
        column = f"{policy}/consistent"
        for within in (0.02, 0.1, 0.25):
            found = cheapest(
                points, PRICES, scenario.environment.N, column=column, within=within, bound=best
            )
            if found is None:
                print(f"{policy}: nothing on the list comes within {within:.0%} of {best:.0f} s")
                continue
            point, price = found
            print(
                f"{policy}: within {within:.0%} of {best:.0f} s for {price:.0f}: RAM "
                f"{point.values['d.1']} MB, SSD {point.values['d.2']} MB a node "
                f"({point.seconds[column]:.0f} s)"
            )


if __name__ == "__main__":
    main()
