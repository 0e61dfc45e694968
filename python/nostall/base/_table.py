"""The one table of options: what each may be, its default and unit, and where it may be set.

It imports nothing of nostall, so that scripts/reference makes docs/guide/options.md from it.
`nostall.base._options` finds the value in force.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Values:
    """The values of an option.

    `text` describes them, `wrong` says what is wrong with one (None: nothing), and `parse` makes one
    of a variable's text; what it cannot parse stays text, for `wrong` to refuse.
    """

    text: str
    wrong: Callable[[Any], str | None]
    parse: Callable[[str], Any] = str


def _integer(least: int, most: int, what: str = "an integer") -> Values:
    text = f"{what} from {least} to {most}"

    def wrong(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            return f"must be {text}"
        if least <= value <= most:
            return None
        if what != "an integer":
            return f"must be {text}"
        return f"must be at least {least}" if value < least else f"must be at most {most}"

    def parse(given: str) -> Any:
        return int(given) if re.fullmatch(r"-?[0-9]{1,19}", given) else given

    return Values(text, wrong, parse)


_MOST_SECONDS = 10**9  # 31 years: clocks and time limits of other programs hold it


def _seconds(*, zero: bool = False) -> Values:
    least = "from 0" if zero else "above 0 and up"
    text = f"a number of seconds {least} to {_MOST_SECONDS}"

    def wrong(value: Any) -> str | None:
        number = isinstance(value, (int, float, np.integer, np.floating))
        good = number and not isinstance(value, bool) and 0 <= value <= _MOST_SECONDS
        return None if good and (zero or value) else f"must be {text}"

    def parse(given: str) -> Any:
        return float(given) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", given) else given

    return Values(text, wrong, parse)


def _one_of(*choices: str) -> Values:
    names = [f'"{c}"' for c in choices]
    text = f"{', '.join(names[:-1])} or {names[-1]}"
    return Values(
        text, lambda v: None if isinstance(v, str) and v in choices else f"must be {text}"
    )


def _of(text: str, good: Callable[[Any], bool]) -> Values:
    return Values(text, lambda value: None if good(value) else f"must be {text}")


def _either(first: Values, text: str, good: Callable[[Any], bool]) -> Values:
    return Values(
        f"{first.text}, or {text}", lambda v: None if good(v) else first.wrong(v), first.parse
    )


def _or_none(values: Values) -> Values:
    def wrong(value: Any) -> str | None:
        told = None if value is None else values.wrong(value)
        return f"{told}, or None" if told and not told.startswith("must be at ") else told

    return Values(f"{values.text}, or None", wrong, values.parse)


def _is_bytes(value: Any) -> bool:
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return integer and bool(0 <= value < 2**63)


def _is_tiers(value: Any) -> bool:
    def tier(item: Any) -> bool:
        return isinstance(item, str) or _is_bytes(getattr(item, "capacity", None))

    several = isinstance(value, (list, tuple))
    return all(map(tier, value)) if several else tier(value)


def _is_rate(text: str) -> bool:
    """At least 1, with a unit: of a bare "300" nobody knows whether bytes or megabytes are meant."""
    rate = re.fullmatch(r"(?i)\s*(\d+(?:\.\d+)?)\s*(?:b|([kmgt])(i?b)?)\s*", text)
    if not rate:
        return False
    power = " kmgt".index((rate[2] or " ").lower())
    return float(rate[1]) * (1000.0 if (rate[3] or "").lower() == "b" else 1024.0) ** power >= 1


def _is_cores(value: Any) -> bool:
    def core(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31

    return isinstance(value, (tuple, list)) and all(map(core, value))


_FLAG = _of("True or False", lambda value: isinstance(value, (bool, np.bool_)))
_TEXT = _of("text", lambda value: isinstance(value, str))
_PATH = _of("a path", lambda value: isinstance(value, str) or hasattr(value, "__fspath__"))
_FUNCTION = _of("a function", callable)
_ANY = _of("see `help`", lambda _: True)
_TIERS = _of('"auto", a tier as text, or a list of tiers', _is_tiers)
_RATE = _of(
    'bytes per second, as "200MB" with its unit, or a number of at least 1',
    lambda v: (isinstance(v, str) and _is_rate(v)) or (_is_bytes(v) and v > 0),
)
_DEVICE = _of(
    "a device of torch or JAX, its name, or a sharding of JAX",
    lambda v: (
        isinstance(v, str) or any(hasattr(v, name) for name in ("type", "platform", "device_set"))
    ),
)
_SIZE = _of('a size as "512MiB" or a number of bytes', lambda v: isinstance(v, str) or _is_bytes(v))


def _short_secret(given: Any) -> str | None:
    if not isinstance(given, str):
        return "must be text of at least 16 bytes"
    size = len(given.encode())
    return (
        None
        if size >= 16
        else f"has {size} bytes: give it at least 16, for example by "
        "NOSTALL_SECRET=$(openssl rand -hex 16), the same on all ranks"
    )


def _no_signals(given: Any) -> str | None:
    names = given.replace(",", " ").split() if isinstance(given, str) else []
    import signal

    caught = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP"}
    return None if names and caught.issuperset(names) else 'must be names as "SIGUSR1 SIGTERM"'


_SIGNALS = Values('names of signals, as "SIGUSR1 SIGTERM"', _no_signals)
_WIRES = ("fp16", "bf16")
_RANK = _or_none(_integer(0, 2**31 - 1))
_COUNT = _or_none(_integer(1, 2**31 - 1))


@dataclass(frozen=True)
class Option:
    """One row; `name` is that of the argument and of the key in `section` of nostall.toml.

    `default` is a value, or None where `otherwise` says what follows. `file` says whether
    nostall.toml may set it: what decides the results of a program is the program's. `reader` is what
    reads the variable, where that is not nostall's Python.
    """

    section: str
    name: str
    values: Values
    default: Any
    text: str
    otherwise: str = ""
    variable: str = ""
    file: bool = False
    reader: str = ""
    secret: bool = False

    @property
    def key(self) -> str:
        """ "section.name": what finds it."""
        return f"{self.section}.{self.name}"

    @property
    def usual(self) -> str:
        """The default in words."""
        if self.otherwise:
            return self.otherwise
        return f'"{self.default}"' if isinstance(self.default, str) else str(self.default)


_loader, _sync, _checkpoint = (partial(Option, room) for room in ("loader", "sync", "checkpoint"))


def _mpi(variable: str, values: Values, default: Any, text: str, otherwise: str = "") -> Option:
    name = variable.removeprefix("NOSTALL_MPI").removeprefix("_").lower() or "mode"
    return Option(
        "mpi", name, values, default, text, otherwise, variable, reader="libnostall_mpi.so"
    )


def _variable(
    key: str,
    variable: str,
    values: Values,
    default: Any,
    text: str,
    otherwise: str = "",
    *,
    file: bool = True,
    reader: str = "",
    secret: bool = False,
) -> Option:
    section, name = key.split(".")
    return Option(section, name, values, default, text, otherwise, variable, file, reader, secret)


_LOADER = (
    _loader(
        "batch_size",
        _integer(1, 2**31 - 1),
        None,
        "samples per rank and batch",
        "must be given, or `global_batch_size`",
    ),
    _loader("epochs", _COUNT, None, "epochs of the job", "a job without an end"),
    _loader(
        "seed",
        _or_none(_integer(0, 2**64 - 1)),
        0,
        "fixes order and augmentation; None: rank 0 draws one for all ranks",
    ),
    _loader("transforms", _ANY, None, "native transforms, or any callable", "raw bytes"),
    _loader(
        "shuffle",
        _or_none(_FLAG),
        None,
        "False: samples in the order of the source",
        "True, but a user's order= is kept",
    ),
    _loader("drop_last", _FLAG, False, "drop samples that do not fill a batch of all ranks"),
    _loader(
        "tiers",
        _TIERS,
        "auto",
        "storage classes of the node, fastest first",
        file=True,
    ),
    _loader("order", _ANY, "torch", '"torch", "keyed", an order that draws, or sample ids'),
    _loader(
        "on_error",
        _one_of("raise", "substitute"),
        "raise",
        "what a sample that cannot be read or decoded does",
    ),
    _loader(
        "staging",
        _SIZE,
        "auto",
        "bytes of finished batches kept ahead of the consumer, per rank; auto: 256 MiB, 16 MiB of "
        "tokens and numbers, less where a limit of memory leaves little",
        file=True,
    ),
    _loader("rank", _RANK, None, "this rank", "found from the launcher"),
    _loader("world_size", _COUNT, None, "ranks of the job", "found from the launcher"),
    _loader("local_rank", _RANK, None, "this rank on its node", "found from the launcher"),
    _loader("local_world_size", _COUNT, None, "ranks of the node", "found from the launcher"),
    _loader(
        "job",
        _or_none(_TEXT),
        None,
        "name of the job, the same for all its ranks on a node",
        "found from the launcher",
    ),
    _loader(
        "threads",
        _or_none(_integer(1, 1024)),
        None,
        "threads of this rank that transform",
        "the rank's share of the cores",
        file=True,
    ),
    _loader(
        "output",
        _or_none(_one_of("torch", "numpy", "jax")),
        None,
        "arrays of batches",
        "torch where it is installed",
    ),
    _loader(
        "device",
        _or_none(_DEVICE),
        None,
        'the accelerator that batches are sent to, as "cuda", the current one, or "cuda:1"',
        "they stay on the host",
    ),
    _loader(
        "device_ahead",
        _SIZE,
        "256MiB",
        "bytes of batches on the device ahead of the consumer; one batch may always be there",
        file=True,
    ),
    _loader(
        "dtype",
        _or_none(_one_of("uint8", "float16", "float32")),
        None,
        "type of transformed images",
        "what ToTensor implies",
    ),
    _loader(
        "layout",
        _or_none(_one_of("chw", "hwc")),
        None,
        "layout of transformed images",
        "what ToTensor implies",
    ),
    _loader(
        "global_batch_size",
        _or_none(_integer(1, 2**31 - 1)),
        None,
        "samples of a batch over all ranks, instead of `batch_size`, for any number of ranks, which "
        "`scheme` divides it among: an epoch has each sample once",
        "`batch_size` times the ranks",
    ),
    _loader(
        "scheme",
        _one_of("uniform", "whole", "imbalanced"),
        "uniform",
        "how a global batch is divided, as in `nostall.Plan`",
    ),
    _loader(
        "steps",
        _or_none(_integer(1, 2**63 - 1)),
        None,
        "batches of the job, instead of `epochs`: iterating the loader gives all of them",
        "whole epochs",
    ),
    _loader(
        "decode",
        _or_none(_FLAG),
        None,
        "give a callable transform the decoded image, uint8 of shape (height, width, 3)",
        "True where its first step is of torchvision or albumentations",
    ),
    _loader(
        "workers",
        _one_of("threads", "processes"),
        "threads",
        "where callables and kinds of fields in Python run",
    ),
    _loader(
        "collate",
        _or_none(_FUNCTION),
        None,
        "makes a batch of the list of its samples; labels stay beside it",
        "they are stacked",
    ),
    _loader(
        "fields",
        _or_none(_of("a list of names", lambda v: isinstance(v, (list, tuple)) and len(v) > 0)),
        None,
        "the fields of a sample that batches have, by name; others are not unpacked, nor read where "
        "the source can leave them out",
        "all of the source",
    ),
    _loader(
        "batch",
        _or_none(_one_of("dict", "tuple")),
        None,
        "what a batch is: a mapping from the names of its fields, or a tuple in their order",
        "`images, labels` of a source of images and labels, else a mapping",
    ),
    _loader(
        "reader", _one_of("auto", "io_uring", "pread"), "auto", "how files are read", file=True
    ),
    _loader(
        "peers",
        _either(_one_of("auto", "on", "off"), "the job's own allgather", callable),
        "auto",
        "whether nodes share what their tiers hold; auto: where the ranks can find each other",
        file=True,
    ),
    _loader(
        "sharing",
        _one_of("push", "owners-read", "hdmlp"),
        "push",
        "which rank reads a sample for the tiers. push: the rank that needs it first, which sends it "
        "to its owner; owners-read: a rank of its owner; hdmlp: each node what it reads most often, "
        "as HDMLP does (the last two to measure what reading once gains)",
        file=True,
    ),
    _loader(
        "copies",
        _one_of("fixed", "next-use"),
        "fixed",
        "which samples that another node keeps this node keeps too, in the room that its own ones "
        "leave. fixed: those that it reads most often, for the whole job; next-use: in the RAM tier "
        "those that it needs soonest, for as long as that is so (faster where the network is slower "
        "than what a node consumes)",
        file=True,
    ),
    _loader(
        "assignment",
        _one_of("plan", "locality"),
        "plan",
        "locality: from the second epoch on, samples of a global batch go to ranks whose node keeps "
        "them; the global batches stay the same, but a rank's part is no longer a random one",
    ),
    _loader(
        "calibration",
        _or_none(_PATH),
        None,
        "file of `nostall calibrate` to start from",
        "start from defaults and learn",
        file=True,
    ),
)

_SYNC = (
    _sync(
        "mode",
        _one_of("planned", "negotiated"),
        "planned",
        "planned: in the order of the graph, without agreement in each step; negotiated: Horovod's "
        "protocol, to compare with",
    ),
    _sync("nonblocking", _FLAG, False, "negotiated: the agreement is started, and tested later"),
    _sync(
        "global_sleep_every",
        _integer(0, 2**31 - 1),
        0,
        "negotiated: after so many cycles all ranks sleep as long as the one that sleeps least; 0: "
        "never",
    ),
    _sync(
        "cores",
        _of("a sequence of cores", _is_cores),
        (),
        "keeps the progress thread on these cores, and the rest of the process off them",
        "all cores for all threads",
    ),
    _sync(
        "threshold",
        _integer(1, 2**63 - 1),
        8 << 20,
        "bytes that are fused into one reduction: smaller ones start earlier and overlap more of the "
        "backward pass, larger ones cost less each",
    ),
    _sync(
        "compression",
        _of('"fp16", "bf16" or None', lambda v: v is None or (isinstance(v, str) and v in _WIRES)),
        None,
        "type on the wire",
        "that of the gradient",
    ),
    _sync("mean", _FLAG, True, "divide by the number of ranks; False leaves sums"),
    _sync("fixed_order", _FLAG, False, "sums in the order of ranks, the same bits in every run"),
    _sync(
        "views",
        _FLAG,
        True,
        "planned, without compression: `.grad` lies in the buffer that travels, so that the result "
        "need not be copied out of it. A gradient of an earlier step that is still referred to keeps "
        "its memory and its values. A forked child does not inherit that memory: `.grad` is None "
        "there, and gradients that were kept are zeros of the child's own",
    ),
    _sync(
        "check_finite",
        _FLAG,
        False,
        "the first NaN or infinity is an error that names it",
    ),
    _sync("cycle", _seconds(), 0.005, "negotiated: seconds of a cycle"),
    _sync(
        "test_sleep",
        _seconds(zero=True),
        0.0002,
        "negotiated: seconds from test to test",
    ),
    _sync(
        "warn",
        _seconds(),
        60.0,
        "seconds after which a tensor that does not arrive is named",
        file=True,
    ),
    _sync(
        "timeout",
        _seconds(),
        600.0,
        "seconds after which a tensor that does not arrive is an error",
        file=True,
    ),
    Option(
        "sync",
        "timeline",
        _TEXT,
        "",
        "file that rank 0 writes what is reduced to, in Horovod's format, for `nostall report`; only "
        "rank 0's counts. A process's second engine writes `<name>.1<suffix>`, a set without rank 0 "
        "`<name>.rank<r><suffix>`",
        "none",
        "NOSTALL_TIMELINE",
        file=True,
    ),
)

_CHECKPOINT = (
    _checkpoint(
        "keep",
        _either(_integer(1, 2**31 - 1), "a Keep", lambda v: hasattr(v, "superseded")),
        5,
        "how many checkpoints stay",
    ),
    _checkpoint("every", _COUNT, None, "only multiples of this step are saved", "every save"),
    _checkpoint(
        "level",
        _one_of("memory", "fast", "durable"),
        "memory",
        "what `save` waits for: the copy in memory, or a directory that has the checkpoint",
    ),
    _checkpoint(
        "keep_fast", _integer(1, 2**31 - 1), 1, "checkpoints that stay on the fast tier", file=True
    ),
    _checkpoint(
        "rate",
        _or_none(_RATE),
        None,
        "bytes per second of each rank's drain from fast to durable",
        "no limit",
        file=True,
    ),
    _checkpoint(
        "on_signal",
        _or_none(_SIGNALS),
        None,
        "one of these signals to any rank: all ranks save at the same call of `save`, wait until the "
        "checkpoint is on the safest directory, and end with exit code 75",
        "signals do what they did before",
        file=True,
    ),
    _checkpoint(
        "replicated",
        _FLAG,
        False,
        "all ranks hold the same state: rank 0 writes it, all restore it, on any number of ranks",
    ),
    _checkpoint(
        "snapshots",
        _integer(1, 1024),
        1,
        "snapshots in memory at the same time, each of the size of the state",
    ),
    _checkpoint(
        "partner",
        _FLAG,
        False,
        "where each node has a fast directory of its own, the next node keeps a copy of it",
    ),
    _checkpoint(
        "threads",
        _or_none(_integer(1, 1024)),
        None,
        "threads that copy",
        "the rank's share of the cores, at most 8",
        file=True,
    ),
    _checkpoint(
        "timeout",
        _seconds(),
        600.0,
        "seconds after which a rank that does not arrive fails the save",
        file=True,
    ),
    _checkpoint(
        "patience",
        _seconds(),
        60.0,
        "seconds that a save may wait until an earlier snapshot is written; then it is given up with "
        "a warning, so that hanging storage does not stop the training. A restore waits as long for "
        "saves that have returned, but at most half of timeout",
        file=True,
    ),
    _checkpoint(
        "priority",
        _one_of("normal", "low", "idle"),
        "low",
        "of background threads: low is nice 19; idle disturbs least, but may delay a write for long "
        "on a busy machine",
        file=True,
    ),
    _checkpoint(
        "verify",
        _FLAG,
        True,
        "read a drained copy back before the fast one may be removed",
        file=True,
    ),
    _checkpoint(
        "windows",
        _FLAG,
        True,
        "write to durable storage while no loader of this process reads and no gradients are being "
        "reduced, as long as this delays a drain by less than half the time between two saves",
        file=True,
    ),
    _checkpoint(
        "max_failures",
        _integer(1, 2**31 - 1),
        3,
        "after this many saves in a row that are safe nowhere, `save` raises IoError",
    ),
    _checkpoint(
        "max_unsafe_seconds",
        _seconds(),
        3600.0,
        "`save` also raises once a save that is safe nowhere has this age, and no later one is safe",
    ),
    _checkpoint(
        "on_failure",
        _or_none(_FUNCTION),
        None,
        "called with the text of that error, in place of raising it, by `save` and `close`",
        "it is raised",
    ),
    _checkpoint("rank", _RANK, None, "this rank", "found from the launcher"),
    _checkpoint("world_size", _COUNT, None, "ranks of the job", "found from the launcher"),
    _checkpoint("job", _or_none(_TEXT), None, "name of the job", "found from the launcher"),
    _checkpoint(
        "gather",
        _or_none(_FUNCTION),
        None,
        "the job's allgather of bytes",
        "found as the loader finds it",
    ),
)

_JOB = (
    _variable(
        "config.file",
        "NOSTALL_CONFIG",
        _PATH,
        "",
        "the file of options",
        "nostall.toml of the working directory, where it is",
        file=False,
    ),
    _variable(
        "job.rendezvous",
        "NOSTALL_RENDEZVOUS",
        _TEXT,
        "",
        "where ranks find each other: tcp://host:port, or a directory that all see",
        "torch.distributed, torchrun's store or mpi4py; under srun a directory in the home",
    ),
    _variable(
        "job.secret",
        "NOSTALL_SECRET",
        Values("text of at least 16 bytes", _short_secret),
        "",
        "the job's secret, the same on all ranks",
        "agreed on where the ranks meet",
        file=False,
        secret=True,
    ),
    _variable(
        "job.host",
        "NOSTALL_HOST",
        _TEXT,
        "",
        "address of this node that it gives the others",
        "of the interface towards them",
    ),
    _variable(
        "job.node",
        "NOSTALL_NODE",
        _TEXT,
        "",
        "name of the node, so that one machine can stand for several",
        "the machine and its namespaces",
        file=False,
    ),
    _variable(
        "job.peer_timeout_ms",
        "NOSTALL_PEER_TIMEOUT_MS",
        _integer(1, 2**31 - 1, "a number of milliseconds"),
        10_000,
        "milliseconds without the next answer of a rank (250 more for each MiB that is on its way) "
        "before it is lost, until it answers again",
    ),
    _variable(
        "job.ucx_devices",
        "NOSTALL_UCX_DEVICES",
        _TEXT,
        "",
        "network devices to use and to listen on, for example eth0 or mlx5_0:1",
        "all",
    ),
    _variable(
        "job.ucx_tls",
        "NOSTALL_UCX_TLS",
        _TEXT,
        "",
        "transports, for example tcp or rc,sm",
        "UCX chooses",
    ),
    _variable(
        "job.ucx_library",
        "NOSTALL_UCX_LIBRARY",
        _TEXT,
        "",
        "the library of nostall that speaks to UCX, by its path or name",
        "nostall_ucx.so of the package",
        file=False,
    ),
)

_OTHERS = (
    _variable(
        "observe.trace",
        "NOSTALL_TRACE",
        _TEXT,
        "",
        "directory that runs are recorded to, for `nostall report`",
        "nothing is recorded",
    ),
    _variable(
        "observe.metrics_port",
        "NOSTALL_METRICS_PORT",
        _integer(0, 65535, "a port"),
        None,
        "port for Prometheus; the rank's local number is added",
        "none",
    ),
    _variable(
        "observe.metrics_address",
        "NOSTALL_METRICS_ADDRESS",
        _TEXT,
        "127.0.0.1",
        "address of that port; 0.0.0.0 lets other machines read it, as scrapers of a cluster do",
    ),
    _variable(
        "source.object_timeout_s",
        "NOSTALL_OBJECT_TIMEOUT_S",
        _seconds(),
        30,
        "seconds that a request to an object store may take",
    ),
    _variable(
        "source.object_requests",
        "NOSTALL_OBJECT_REQUESTS",
        _either(_integer(1, 512), '"auto"', lambda value: value == "auto"),
        "auto",
        "requests in flight at an object store, of each data set and process; "
        '"auto" finds the number by measurement',
    ),
    _variable(
        "source.object_retries",
        "NOSTALL_OBJECT_RETRIES",
        _integer(0, 1000),
        8,
        "retries of errors that pass, within twice the timeout",
    ),
    _variable(
        "torch.order",
        "NOSTALL_ORDER",
        _one_of("any", "fixed"),
        "any",
        'sums in the order of ranks ("fixed"), the same bits in every run',
        file=False,
    ),
    _variable(
        "dlio.tiers",
        "NOSTALL_DLIO_TIERS",
        _TEXT,
        "",
        "tiers of the plug-in for DLIO, separated by commas",
        "those of [loader] tiers",
        file=False,
    ),
    _variable(
        "dlio.checkpoint",
        "NOSTALL_DLIO_CHECKPOINT",
        _one_of("memory", "durable"),
        "durable",
        "what a checkpoint of the plug-in for DLIO waits for",
        file=False,
    ),
    _variable(
        "collective.table",
        "NOSTALL_COLLECTIVES",
        _TEXT,
        "",
        'table of algorithms, or "off"',
        "collectives.json of the user's cache",
        file=False,
        reader="Python and libnostall_mpi.so",
    ),
)

_MPI = (
    _mpi(
        "NOSTALL_MPI", _one_of("replace", "off"), "replace", "off: replace nothing, still profile"
    ),
    _mpi(
        "NOSTALL_MPI_TIMEOUT",
        _seconds(),
        86_400,
        "seconds until a rank or node that does not arrive is an error",
    ),
    _mpi(
        "NOSTALL_MPI_BETWEEN",
        _one_of("allreduce", "arrival"),
        "allreduce",
        "between nodes: the MPI's allreduce, or one by the order in which nodes arrive",
    ),
    _mpi(
        "NOSTALL_MPI_NONBLOCKING",
        _either(_integer(0, 2**63 - 1, "a number of bytes"), '"off"', lambda v: v == "off"),
        32_768,
        "bytes from which nonblocking calls are replaced",
    ),
    _mpi(
        "NOSTALL_MPI_SHARED",
        _integer(0, 2**63 - 1, "a number of bytes"),
        2**30,
        "most bytes of shared memory that MPI_Alloc_mem gives a rank",
    ),
    _mpi("NOSTALL_MPI_VERBOSE", _TEXT, "", "1: print counts at the end", "nothing is printed"),
    _mpi(
        "NOSTALL_MPI_PROFILE",
        _TEXT,
        "",
        "directory for profiles; `nostall run --profile` sets it",
        "no profile",
    ),
    _mpi(
        "NOSTALL_MPI_PROFILE_RECORDS",
        _integer(1, 2**63 - 1),
        2**20,
        "most calls that a rank keeps, 40 bytes each",
    ),
)

TABLE: tuple[Option, ...] = (*_LOADER, *_SYNC, *_CHECKPOINT, *_JOB, *_OTHERS, *_MPI)
