"""Numbers of running loaders for other tools: Prometheus, loggers of experiments, ``nostall top``.

    nostall.metrics.serve(9464)                       # http://127.0.0.1:9464/metrics
    interval = nostall.metrics.Interval(loader)       # what it did since the last call
    wandb.log(interval(), step=step)
    nostall.metrics.to_tensorboard(writer, loader.stats(), step)

Nothing listens unless `serve` is called, or ``NOSTALL_METRICS_PORT`` is set when a loader starts; it
listens on the loopback interface unless an address is given.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.base import _checks as checks
from nostall.base import _options as options
from nostall.base import _process as process
from nostall.errors import Error, IoError, UsageError
from nostall.observe import _values as values
from nostall.observe._held import Watch
from nostall.observe._stats import ORIGINS, EpochStats, Stats, add_up, subtract

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from nostall.observe._observed import Observed
    from nostall.observe._recorder import Recorder

__all__ = ["HELP", "Interval", "close", "measured", "scalars", "serve", "text", "to_tensorboard"]

VARIABLE = options.row("observe.metrics_port").variable
LIVE_SECONDS = 1.0
# The columns of memory grow to tens of kilobytes.
HELD_SECONDS = 10.0

# Connections at a time, each of which holds a thread and a descriptor of the training.
_CONNECTIONS = 16
# Seconds for which a client may say nothing, or take nothing of an answer.
_CLIENT_SECONDS = 10.0
# Until the next try, where a connection cannot be accepted.
_PAUSE_SECONDS = 0.5

_lock = threading.Lock()  # of the set, as one that grows cannot be gone through, and of the server
_loaders: weakref.WeakSet[Observed] = weakref.WeakSet()
_server: ThreadingHTTPServer | None = None
_refused = False  # the port of the environment: warned of once

# What each number is, by its name.
HELP = {
    "nostall_batches_total": "Batches handed out.",
    "nostall_samples_total": "Samples handed out, by origin.",
    "nostall_bytes_total": "Bytes by origin; what the source gave for a tier counts in both.",
    "nostall_stall_seconds_total": "Seconds that the consumer waited for batches.",
    "nostall_epoch_seconds_total": "Seconds in epochs, the consumer's own work included.",
    "nostall_decode_seconds_total": "CPU seconds of decoding.",
    "nostall_memory_bytes": (
        "Most memory seen, by pool; ram_tier and file_tier are the node's, of all its ranks together."
    ),
}


def add(loader: Observed) -> None:
    """Called by loaders that start: serves their numbers from now on."""
    global _refused
    try:
        with _lock:
            _loaders.add(loader)
            if _server is not None or _refused:
                return
            port = options.value("observe.metrics_port")
            # Each rank of the node listens on a port of its own.
            if port is not None:
                _serve(port + loader.world.local_rank)
    except (Error, OverflowError) as error:
        # A failure to observe never ends the training.
        _refused = True
        logging.getLogger("nostall").warning(
            "%s; training goes on without metrics: set %s to a free port", error, VARIABLE
        )


def _begin_anew() -> None:
    """In a forked child, which has none of its parent's loaders and no thread that serves."""
    global _lock, _loaders, _server, _refused
    _lock, _loaders, _refused = threading.Lock(), weakref.WeakSet(), False
    if _server is not None:
        _server.socket.close()
        _server = None


os.register_at_fork(after_in_child=_begin_anew)


def serve(port: int = 9464, address: str | None = None) -> int:
    """Serves the numbers of all loaders of this process to Prometheus.

    Args:
        port: a free one is chosen for 0.
        address: of the interface; if None, that of ``NOSTALL_METRICS_ADDRESS``, else the loopback's.

    Returns:
        The port.

    Raises:
        IoError: the port is taken, or not allowed, or the machine does not have the address.
        UsageError: they are served already, or the port is no number of one.
    """
    port = checks.whole("port", port, 0, 65535)
    with _lock:
        return _serve(port, address)


def _serve(port: int, address: str | None = None) -> int:
    global _server
    if _server is not None:
        raise UsageError(f"metrics are served already, on port {_server.server_port}")
    if address is None:
        address = options.value("observe.metrics_address")
    try:
        _server = _server_type()((address, port), _handler())
    except OSError as error:
        raise IoError(f"cannot serve metrics on {address} port {port}: {error.strerror}") from error
    threading.Thread(target=_server.serve_forever, name="nostall-metrics", daemon=True).start()
    return _server.server_port


def close() -> None:
    """Ends `serve`."""
    global _server, _refused
    with _lock:
        server, _server, _refused = _server, None, False
    if server is not None:
        server.shutdown()
        server.server_close()


def _server_type() -> type[ThreadingHTTPServer]:
    # Here, so that importing nostall does not wait for it.
    from http.server import ThreadingHTTPServer

    class Server(ThreadingHTTPServer):
        def __init__(self, *args: Any) -> None:
            self._free = threading.Semaphore(_CONNECTIONS)
            super().__init__(*args)

        def get_request(self) -> Any:
            try:
                return super().get_request()
            except OSError:
                # The connection still waits: without descriptors the next look would be at once.
                time.sleep(_PAUSE_SECONDS)
                raise

        def process_request(self, request: Any, client_address: Any) -> None:
            if not self._free.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread has started
                self._free.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self._free.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Logs no client that goes away: standard error belongs to the training."""
            error = sys.exc_info()[1]
            if not isinstance(error, OSError):
                logging.getLogger("nostall").warning("cannot answer for metrics: %r", error)

    return Server


def _handler() -> type[BaseHTTPRequestHandler]:
    # Here, so that importing nostall does not wait for it.
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_SECONDS

        def do_GET(self) -> None:
            self.wfile.write(self._begin())

        def do_HEAD(self) -> None:
            self._begin()

        def _begin(self) -> bytes:
            """Sends the head of the answer, and returns what it is of."""
            if self.path.partition("?")[0] != "/metrics":  # who scrapes may add what it likes
                self.send_error(404, "there is only /metrics")
                return b""
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            return body

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing: standard error belongs to the training."""

    return Handler


def measured() -> Iterator[tuple[str, dict[str, str], float]]:
    """The numbers of all loaders of this process, each with its name and labels."""
    with _lock:
        loaders = list(_loaders)
    for loader in sorted(loaders, key=lambda x: x.name):
        labels = {"rank": str(loader.world.rank), "loader": loader.name}
        total, memory = loader.totals()
        yield "nostall_batches_total", labels, total.batches
        yield "nostall_stall_seconds_total", labels, total.stall_seconds
        yield "nostall_epoch_seconds_total", labels, total.seconds
        yield "nostall_decode_seconds_total", labels, total.decode_seconds
        for name in ORIGINS:
            origin = total.origins[name]
            yield "nostall_samples_total", {**labels, "origin": name}, origin.samples
            yield "nostall_bytes_total", {**labels, "origin": name}, origin.bytes
        for pool, size in memory.items():
            yield "nostall_memory_bytes", {**labels, "pool": pool}, size


def text() -> str:
    """The numbers of all loaders of this process in Prometheus' text format."""
    rows: dict[str, list[str]] = {name: [] for name in HELP}
    for name, labels, value in measured():
        given = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        rows[name].append(f"{name}{{{given}}} {value}")
    out = []
    for name, lines in rows.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        out += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}", *lines]
    return "\n".join(out) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def scalars(stats: Stats) -> dict[str, float]:
    """The last epoch's numbers by names for loggers of experiments; empty before the first epoch.

    Shares are of 1: `stall_fraction` of the epoch's time, `share_from` of its samples. Seconds of
    `fetch_seconds_from` and `decode_seconds` are those of all threads together: where waiting is long,
    the greatest of them is what it is for.

    Raises:
        UsageError: `stats` are not what a loader's ``stats()`` gives.
    """
    if not isinstance(stats, Stats):
        raise UsageError(f"give the loader's stats(), not {type(stats).__name__}")
    if not stats.epochs:
        return {}
    epoch = stats.epochs[-1]
    return {"nostall/epoch": float(epoch.epoch), **_scalars(epoch)}


def _scalars(of: EpochStats) -> dict[str, float]:
    found = {
        "nostall/stall_fraction": of.stall_fraction,
        "nostall/stall_seconds": of.stall_seconds,
        "nostall/decode_seconds": of.decode_seconds,
    }
    if of.seconds > 0:
        found["nostall/samples_per_second"] = of.samples / of.seconds
        found["nostall/bytes_per_second"] = of.bytes / of.seconds
    for name, origin in of.origins.items():
        found[f"nostall/share_from/{name}"] = origin.samples / max(1, of.samples)
        found[f"nostall/fetch_seconds_from/{name}"] = origin.seconds
    return found


class Interval:
    """What a loader did since the last call, or since this was made; the names are those of `scalars`.

    Time between epochs does not count, nor what follows the last batch of an epoch where no more is
    asked for, beyond its longest step. Nothing is given where no batch was taken.

    Args:
        loader: it need not have begun.

    Raises:
        UsageError: `loader` is none.
    """

    def __init__(self, loader: Observed) -> None:
        if isinstance(loader, type) or not hasattr(loader, "totals"):
            raise UsageError(f"Interval takes a nostall.DataLoader, not {loader!r}")
        self._loader = loader
        self._before, _ = loader.totals()

    def __call__(self) -> dict[str, float]:
        before, (now, _) = self._before, self._loader.totals()
        self._before = now
        return _scalars(subtract(now, before)) if now.batches > before.batches else {}


def to_tensorboard(writer: Any, stats: Stats, step: int) -> None:
    """Writes `scalars` to a torch.utils.tensorboard.SummaryWriter."""
    for name, value in scalars(stats).items():
        writer.add_scalar(name, value, step)


def _plain(epoch: EpochStats) -> dict[str, Any]:
    """As `Stats.to_dict` has it, without the samples that were replaced: they may be many."""
    origins = {name: vars(origin) for name, origin in epoch.origins.items()}
    return {**vars(epoch), "origins": origins, "substituted": []}


class Live:
    """Writes what a loader is doing into a file, once a second at most, for ``nostall top``.

    Beside it, every ten seconds at most, is what its process held.
    """

    def __init__(self, stem: str, rank: int, name: str) -> None:
        self._path, self._held_path = Path(f"{stem}.live.json"), Path(f"{stem}.held.json")
        self._pid = os.getpid()
        self._fixed = {"rank": rank, "loader": name, "pid": self._pid, "process": process.mark()}
        self._next = self._next_held = 0.0
        self._newest: tuple[Recorder, int, int, int] | None = None
        self.memory = Watch()

    def __call__(self, recorder: Recorder, epoch: int, batch: int, queue: int) -> None:
        self._newest = recorder, epoch, batch, queue
        now = time.monotonic()
        if now < self._next or os.getpid() != self._pid:
            return
        self._next = now + LIVE_SECONDS
        added = self.memory()
        self._write(self._path, self._data(*self._newest))
        if added and now >= self._next_held:
            self._next_held = now + HELD_SECONDS
            self._write(self._held_path, vars(self.memory.held))

    def _data(self, recorder: Recorder, epoch: int, batch: int, queue: int) -> dict[str, Any]:
        recent, memory = recorder.recent(), recorder.memory()
        total = add_up(recent)
        return {
            **self._fixed,
            "time": time.time(),
            "epoch": epoch,
            "batch": batch,
            "queue": queue,
            "seconds": total.seconds,
            "stall_seconds": total.stall_seconds,
            "samples": total.samples,
            "origins": {o: c.samples for o, c in total.origins.items()},
            "source_bytes": total.origins["source"].bytes,
            "memory": sum(memory.values()),
            # For the report, of a loader that does not come to write its record.
            "epochs": [_plain(e) for e in recent],
            "pools": memory,
        }

    def end(self) -> None:
        """The loader has ended, or what records it: writes what it did up to its last batch."""
        if self._newest is not None and os.getpid() == self._pid:
            self._next = float("inf")
            self.memory()
            self._write(self._path, {**self._data(*self._newest), "ended": time.time()})
            self._newest = None

    def _write(self, path: Path, data: dict[str, Any]) -> None:
        try:
            values.write(path, data)
        except Exception as error:  # a failure to observe never ends the training
            self._next = float("inf")
            logging.getLogger("nostall").warning("cannot write %s: %s", path, error)
