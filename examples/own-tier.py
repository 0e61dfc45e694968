"""A tier of your own: a template to copy.

    python examples/own-tier.py FOLDER

The tier of this example is memory of another process of this node: a dictionary behind a socket, as a
key-value store is. The ranks of the node and their worker processes reach it by its address. FOLDER is
a folder of images, one folder in it for each class.
"""

import multiprocessing.managers
import os
import sys
import threading

import nostall


class Server(multiprocessing.managers.BaseManager):
    """The process that has the memory. In a real job it is started before the training."""


class SocketTier(nostall.Tier):
    """Keeps samples in a dictionary of the process that listens at `address`."""

    def __init__(self, address, key, capacity):
        super().__init__(capacity)
        self.address, self.key = address, key
        self._here = threading.local()

    def _store(self):
        # A connection for each thread of each process: a forked child must not use its parent's.
        if getattr(self._here, "process", None) != os.getpid():
            client = Server(self.address, self.key)
            client.connect()
            self._here.store, self._here.process = client.store(), os.getpid()
        return self._here.store

    def put(self, key, data):
        self._store().update({key: data})

    def get(self, key):
        return self._store().get(key)

    def __getstate__(self):
        return {**self.__dict__, "_here": None}

    def __setstate__(self, state):
        self.__dict__.update(state, _here=threading.local())


# The process that serves has the dictionary, and clients know the name.
held = {}
Server.register("store", lambda: held, exposed=["get", "update"])


def main(folder):
    server = Server(None, b"a secret of the job")
    server.start()
    try:
        tier = SocketTier(server.address, b"a secret of the job", 64 << 20)
        nostall.testing.check_tier(tier, start_methods=["fork"])
        loader = nostall.DataLoader(
            nostall.ImageFolder(folder),
            batch_size=4,
            epochs=2,
            seed=0,
            tiers=[tier],
            output="numpy",
        )
        for epoch in loader.epochs():
            count = sum(len(labels) for _, labels in epoch)
            print(f"epoch {epoch.index}: {count} samples")
    finally:
        server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
