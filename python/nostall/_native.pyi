from collections.abc import Callable, Sequence
import datetime
import enum
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray
import torch

class MemoryLimit:
    """A limit of memory (native/base/limits.h), in bytes."""

    @property
    def kind(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def reserve(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def most(self) -> int: ...

def memory_limits(shm: str = "/dev/shm", proc: str = "/proc") -> list[MemoryLimit]:
    """The limits of memory that bind this process, as they stand."""

def kernels() -> dict[str, str]:
    """Which instructions each kind of vector code uses on this processor."""

class AtEnd(enum.Enum):
    repeat = 0

    stop = 1

    reweight = 2

class Mixture:
    """Sources in one order by weights (plan/mixture.h)."""

    def __init__(
        self, samples: Sequence[int], changes: Sequence[tuple[int, Sequence[float]]], at_end: AtEnd
    ) -> None: ...
    @property
    def end(self) -> int | None:
        """Places until the mixture ends; None if sources repeat."""

    def counts(self, place: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """Places that each source had before this one."""

    def fingerprint(self, place: int = 18446744073709551615) -> int:
        """64-bit hash of all that decides the places before this one."""

def mixture_shares(weights: Sequence[float]) -> tuple[list[int], int]:
    """Places of each source in a period, and the period."""

class OrderKind(enum.Enum):
    torch = 0

    keyed = 1

    user = 2

    sequential = 3

    sub_batch = 4

    weighted = 5

    repeated = 6

    mixture = 7

    bucketed = 8

class Scheme(enum.Enum):
    uniform = 0

    whole = 1

    imbalanced = 2

class JobSpec:
    """What fixes the future of a job (native/plan/plan.h)."""

    def __init__(self) -> None: ...
    @property
    def samples(self) -> int: ...
    @samples.setter
    def samples(self, arg: int, /) -> None: ...
    @property
    def global_batch(self) -> int: ...
    @global_batch.setter
    def global_batch(self, arg: int, /) -> None: ...
    @property
    def epochs(self) -> int: ...
    @epochs.setter
    def epochs(self, arg: int, /) -> None: ...
    @property
    def world(self) -> int: ...
    @world.setter
    def world(self, arg: int, /) -> None: ...
    @property
    def order_world(self) -> int: ...
    @order_world.setter
    def order_world(self, arg: int, /) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg: int, /) -> None: ...
    @property
    def drop_last(self) -> bool: ...
    @drop_last.setter
    def drop_last(self, arg: bool, /) -> None: ...
    @property
    def order(self) -> OrderKind: ...
    @order.setter
    def order(self, arg: OrderKind, /) -> None: ...
    @property
    def scheme(self) -> Scheme: ...
    @scheme.setter
    def scheme(self, arg: Scheme, /) -> None: ...
    @property
    def draws(self) -> int: ...
    @draws.setter
    def draws(self, arg: int, /) -> None: ...
    @property
    def replacement(self) -> bool: ...
    @replacement.setter
    def replacement(self, arg: bool, /) -> None: ...
    @property
    def times(self) -> int: ...
    @times.setter
    def times(self, arg: int, /) -> None: ...
    @property
    def steps(self) -> int: ...
    @steps.setter
    def steps(self, arg: int, /) -> None: ...
    @property
    def weights(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...
    @weights.setter
    def weights(
        self,
        arg: Annotated[
            NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        /,
    ) -> None: ...
    @property
    def mixture(self) -> Mixture: ...
    @mixture.setter
    def mixture(self, arg: Mixture, /) -> None: ...
    @property
    def buckets(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    @buckets.setter
    def buckets(
        self,
        arg: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        /,
    ) -> None: ...
    @property
    def sub_batches(self) -> tuple[int, int, int]: ...
    @sub_batches.setter
    def sub_batches(self, arg: tuple[int, int, int], /) -> None: ...
    @property
    def user_order(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @user_order.setter
    def user_order(
        self,
        arg: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        /,
    ) -> None: ...

def validate(spec: JobSpec) -> None: ...
def pass_of(spec: JobSpec, epoch: int, batch: int) -> tuple[int, int, int, int]:
    """
    (chunk, pass over it, place in the pass, batches of the chunk) of a global batch.
    """

def epoch_length(spec: JobSpec) -> int: ...
def batches_per_epoch(spec: JobSpec) -> int: ...
def batches_in(spec: JobSpec, epoch: int) -> int: ...
def stand_ins(
    seed: int, bad: int, samples: int
) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """
    The samples that may stand in for `bad`, in the order in which they are tried.
    """

def plan_fingerprint(spec: JobSpec) -> int: ...
def epoch_order(
    spec: JobSpec, epoch: int
) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
def rank_epoch(spec: JobSpec, epoch: int, rank: int) -> tuple:
    """
    The samples of one rank in one epoch, and where each of its batches ends.
    """

def node_access(spec: JobSpec, first_rank: int, ranks: int, first_epoch: int = 0) -> tuple:
    """Accesses of every sample by the node, and the time of the first."""

def place(
    sizes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    spec: JobSpec,
    first_rank: int,
    ranks: int,
    capacities: Sequence[int],
    overhead: int = 0,
) -> tuple:
    """Tier (255: none) and offset of every sample, and bytes used by tier."""

def owners(
    spec: JobSpec,
    sizes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    capacities: Sequence[int],
    ranks_per_node: int,
) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
    """The node that keeps each sample; 2**32 - 1 where none has room."""

def source_bytes_lower_bound(
    spec: JobSpec,
    sizes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    capacity: int,
    first_epoch: int = 0,
) -> int: ...

class KeyedPermutation:
    def __init__(self, n: int, seed: int, epoch: int) -> None: ...
    def __call__(self, position: int) -> int: ...
    def inverse(self, sample: int) -> int: ...

def uring_problem() -> str:
    """Why this process cannot have an io_uring; empty if it can."""

class Source:
    """A fixed list of samples (native/source/source.h)."""

    def __len__(self) -> int: ...
    @property
    def sizes(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), writable=False)]: ...
    @property
    def labels(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...
    def describe(self, sample: int) -> str: ...
    def read(self, sample: int) -> bytes:
        """
        The bytes of one sample. Raises IoError with its path, CorruptionError if they are not those that were read first.
        """

    def open_sums(self, path: str) -> str:
        """
        Takes the checksums kept there, if they hold; else why they, and the index they lie beside, are of another content.
        """

    def keep_sums(self) -> int:
        """Keeps what was learned in that file; 0 or -errno."""

    @property
    def sums(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The checksum of every sample, 0 where it is not known yet."""

    def learn_sums(
        self,
        sums: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """Takes checksums over where none is known; 0: not known."""

class FolderSource(Source):
    @property
    def root(self) -> str: ...
    @property
    def classes(self) -> list[str]: ...

class ViewSource(Source):
    @property
    def numbers(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """The place of every sample among those of all parts, laid end to end."""

    def origin(self, sample: int) -> tuple[int, int]:
        """The part of a sample, and its number there."""

def open_view(
    sources: Sequence[Source],
    label_offsets: Sequence[int],
    numbers: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ]
    | None,
) -> ViewSource:
    """
    Samples of other sources, by their numbers when these are laid end to end; all if None.
    """

def open_folder(
    root: str,
    index_path: str,
    extensions: Sequence[str],
    class_per_folder: bool,
    allow_empty: bool,
    threads: int,
) -> FolderSource:
    """
    Lists a folder, or takes its stored index where that still holds. An empty index_path: none.
    """

def check_index(
    root: str, index_path: str, extensions: Sequence[str], class_per_folder: bool
) -> str:
    """Empty if the stored index holds, else why it does not."""

def open_files(
    root: str, paths: Sequence[str], labels: Sequence[int], threads: int
) -> FolderSource: ...

class Column:
    """One value of bytes a sample (native/source/composite.h)."""

    def __init__(
        self,
        values: Annotated[
            NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        width: int,
        ends: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        present: Annotated[
            NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """
        Values of `width` bytes, or if that is 0 of those between the n + 1 `ends`; `present` is 0 where a sample has none, or empty.
        """

class CompositeSource(Source):
    def __init__(
        self,
        names: Sequence[str],
        parts: Source | None,
        part_of: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        columns: Sequence[Column],
        labels: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        samples: int,
    ) -> None:
        """
        `names` of the fields of parts, then of the columns; `part_of` has the id of each sample's parts, 2**32 - 1 where there is none.
        """

    def select(self, fields: Sequence[int]) -> CompositeSource: ...

class BesideSource(Source):
    def __init__(self, sources: Sequence[Source], fields: Sequence[tuple[int, int]]) -> None:
        """
        Records of all sources (native/source/beside.h); a field is those from one to another.
        """

class Storage:
    """Files or objects of which ranges are read."""

    @property
    def paths(self) -> list[str]: ...
    @property
    def sizes(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def times(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Nanoseconds since the epoch of each file's last change; 0 where unknown.
        """

    def read(self, file: int, offset: int, size: int) -> bytes: ...

def open_storage(paths: Sequence[str], direct: str) -> Storage: ...
def python_storage(
    paths: Sequence[str],
    sizes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    versions: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    read: Callable,
) -> Storage:
    """
    read(list of (file, offset, size)) -> list of buffers or exceptions; `versions` change with the contents, like the times of files.
    """

class LmdbRecords:
    """What a scan of an LMDB tree found."""

    def __len__(self) -> int: ...
    @property
    def offset(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def length(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def own_pages(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...
    def key(self, arg: int, /) -> bytes: ...
    def find(self, arg: bytes, /) -> int | None:
        """
        The record with that key, by looking at all of them; None if there is none.
        """

    def decimal_keys(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """The keys as numbers, 2**64 - 1 for those that are not decimal."""

    @property
    def databases(self) -> list[str]: ...
    @property
    def pages_read(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def transaction(self) -> int: ...
    @property
    def other_meta_used(self) -> bool: ...
    def stamp(self, arg: str, /) -> str: ...

def scan_lmdb(storage: Storage, database: str) -> LmdbRecords: ...
def lmdb_stamp(storage: Storage, database: str) -> str: ...
def scan_tar(storage: Storage, keep: str, threads: int, progress: Callable | None) -> tuple:
    """
    (file, offset, size, names, contents) of all regular members; contents of those whose name ends with `keep`.
    """

def scan_tfrecord(storage: Storage, check: bool, threads: int, progress: Callable | None) -> tuple:
    """
    (file, offset, length, CRC32C) of all records; `check` compares the latter too.
    """

def find_payloads(
    storage: Storage,
    file: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    length: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    kind: str,
    image: str,
    label: str,
    threads: int,
    progress: Callable | None,
    crc: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> tuple:
    """
    (offset, length, label, shape, sums) of the image in every record; shape is (n * 3,): channels, height, width of pixels that are not encoded, else zeros; sums are checksums where `crc`, the CRC32C of every record or empty, gives them, else zeros.
    """

class MembersKind(enum.Enum):
    example = 0

    npz = 1

    msgpack = 2

def find_members(
    storage: Storage,
    file: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    length: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    kind: MembersKind,
    names: Sequence[str],
    threads: int,
    progress: Callable | None,
) -> tuple:
    """
    (members, offset, length): for every member (name, type, whether a list, fewest and most numbers); and where each lies in the file, of record 0, of record 1, ..., 2**64 - 1 for none. Without `names` all that there are.
    """

class RecordTable:
    @property
    def kind(self) -> str: ...
    @property
    def stamp(self) -> str: ...
    def __len__(self) -> int: ...
    @property
    def paths(self) -> list[str]: ...
    @property
    def file_sizes(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def times(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...
    @property
    def file(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    @property
    def offset(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def length(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def label(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...
    @property
    def head(self) -> Annotated[NDArray[numpy.uint16], dict(shape=(None,))]: ...
    @property
    def parts(self) -> int: ...
    @property
    def part_offset(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    @property
    def part_length(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    def store(self, path: str) -> tuple[int, int]:
        """Writes the stored form; (0 or -errno, bytes)."""

def record_table(
    kind: str,
    stamp: str,
    storage: Storage,
    file: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    length: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    label: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    head: Annotated[
        NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    parts: int,
    part_offset: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    part_length: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> RecordTable:
    """
    Of samples with `parts` fields, where each field begins in its record (2**32 - 1: the sample lacks it) and its length; 0 for images and labels.
    """

def load_records(path: str) -> RecordTable: ...

class RecordSource(Source):
    @property
    def table(self) -> RecordTable: ...
    @property
    def cost(self) -> tuple[float, float]:
        """Seconds per operation and per byte, as measured so far."""

def record_source(
    storage: Storage,
    table: RecordTable,
    max_read: int,
    coalesce: bool,
    page_size: int,
    database: str,
) -> RecordSource:
    """
    A source on a table; `page_size` of an LMDB database whose value pages are checked, or 0.
    """

def callback_source(
    sizes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    labels: Annotated[
        NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    group: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    fingerprint: int,
    read: Callable,
    describe: Callable,
    bounded: bool,
) -> Source:
    """
    read(list of ids) -> list of buffers or exceptions; samples of a group (rising, or empty) are read together. If `bounded`, zeros follow a sample shorter than its size.
    """

class RangeReader:
    """Reads ranges of a storage's first file; for one thread."""

    def __init__(self, storage: Storage, reader: str, depth: int) -> None: ...
    def read(
        self,
        offset: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        length: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        place: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        into: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> float:
        """
        Reads range i into into[place[i] : place[i] + length[i]]; seconds it took.
        """

    @property
    def name(self) -> str: ...
    @property
    def bytes_read(self) -> int:
        """Of the storage, alignment included."""

class TokenIndex:
    """Extents and documents (native/tokens/stream.h)."""

    @property
    def stamp(self) -> str: ...
    @property
    def paths(self) -> list[str]: ...
    @property
    def sizes(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def times(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...
    def divided_as(self, other: TokenStream) -> TokenIndex:
        """The same extents with the documents of another stream."""

    def store(self, path: str) -> tuple[int, int]:
        """Writes the stored form; (0 or -errno, bytes)."""

def load_tokens(path: str) -> TokenIndex: ...
def token_index(
    storage: Storage,
    stamp: str,
    width: int,
    file: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    tokens: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    begins: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
) -> TokenIndex:
    """Documents that begin at these tokens."""

def scan_tokens(
    storage: Storage,
    stamp: str,
    width: int,
    file: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    offset: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    tokens: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    end: int | None,
    vocabulary: int,
    threads: int,
    progress: Callable | None,
) -> TokenIndex:
    """
    Documents end with the id `end`, if any, and with their extent; reads all ids once.
    """

class TokenStream:
    """Ids of files as one stream (native/tokens/stream.h)."""

    def __init__(self, storage: Storage, index: TokenIndex) -> None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def documents(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...
    @property
    def lengths(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """Tokens of each document."""

    def begin(self, arg: int, /) -> int: ...
    def read(self, begin: int, count: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """The bytes of these ids."""

class UnitSource(Source):
    def segments(self, unit: int) -> list[tuple[int, int]]:
        """(first token in the stream, tokens) of each segment."""

    @property
    def tokens(self) -> int:
        """Of all units together."""

    @property
    def waste(self) -> float:
        """The share of positions of packed units that no token takes."""

def token_units_like(units: UnitSource, stream: TokenStream) -> UnitSource:
    """The same units of another stream with the same documents."""

def token_windows(
    stream: TokenStream,
    length: int,
    stride: int,
    by_document: bool,
    partial: bool,
    overlap: bool,
    fields: int,
) -> UnitSource: ...
def token_documents(
    stream: TokenStream, length: int, longer: str, overlap: bool, fields: int
) -> UnitSource: ...
def token_pieces(
    stream: TokenStream,
    offsets: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    pieces: Annotated[
        NDArray[numpy.uint32], dict(shape=(None, 3), order="C", device="cpu", writable=False)
    ],
    overlap: bool,
    fields: int,
) -> UnitSource:
    """
    `pieces`: document, first token in it and tokens of each; `offsets`: where the pieces of each unit begin, and their number.
    """

def token_packed(
    stream: TokenStream,
    capacity: int,
    packing: str,
    longer: str,
    seed: int,
    overlap: bool,
    fields: int,
) -> UnitSource: ...

class Mixing:
    """MixUp and CutMix of whole batches (native/image/mix.h)."""

    @property
    def classes(self) -> int: ...
    @property
    def shift(self) -> int: ...
    def drawn(
        self, height: int, width: int, *, seed: int = 0, epoch: int = 0, batch: int = 0
    ) -> tuple[str, float, tuple[int, int, int, int]]:
        """
        What a global batch gets: none, mixup or cutmix; lam; the box (x, y, width, height).
        """

    def apply(
        self,
        images: Annotated[NDArray, dict(shape=(None, None, None, None), order="C", device="cpu")],
        labels: Annotated[
            NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        *,
        seed: int = 0,
        epoch: int = 0,
        batch: int = 0,
    ) -> tuple:
        """
        Mixes the images of a local batch in place. Gives lam, and the targets (n, classes).
        """

def compile_mixing(
    mixers: Sequence[tuple[str, float, float]], *, p: float, classes: int, shift: int
) -> Mixing:
    """Of ("mixup" or "cutmix", alpha, weight), of which each batch gets one."""

class Pipeline:
    """Compiled transforms of encoded images."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def draws(self) -> int:
        """How many of a sample's draws the steps take."""

    def apply(
        self,
        encoded: object,
        *,
        seed: int = 0,
        epoch: int = 0,
        sample: int = 0,
        occurrence: int = 0,
    ) -> object:
        """
        Decodes and transforms one image; random draws depend on the four numbers alone, of which `occurrence` counts how often the epoch had the sample before.
        """

    def apply_record(
        self, parts: dict, *, seed: int = 0, epoch: int = 0, sample: int = 0, occurrence: int = 0
    ) -> dict:
        """
        Transforms a sample of several parts. `parts` may have: images, a list of encoded images; masks, of (encoded PNG or an array of uint8 or uint16, dtype); boxes, of (float32 array (n, 4), format, normalised); keypoints, of (float32 array (n, 2 or 3), normalised). Gives the same names; boxes as (boxes, rows of the input that they were).
        """

    def drawn(
        self, height: int, width: int, *, seed: int = 0, epoch: int = 0, sample: int = 0
    ) -> list:
        """
        What the steps are for one sample of height x width pixels: (name, numbers) of each action.
        """

def compile_pipeline(
    steps: Sequence[tuple[str, dict]],
    dtype: str | None = None,
    layout: str | None = None,
    max_pixels: int = 178956970,
    pixels: dict | None = None,
) -> Pipeline:
    """
    Compiles [(name, parameters), ...] into a Pipeline; `pixels` is for samples that are not encoded: height, width, channels, channels_first, bgr.
    """

def decode_rgb(encoded: object, max_pixels: int = 178956970) -> object:
    """Decodes a JPEG, PNG or WebP image to uint8 RGB, height x width x 3."""

class ScalarCodec(enum.Enum):
    raw = 0

    decimal = 1

    varint = 2

    msgpack = 3

class ArrayCodec(enum.Enum):
    raw = 0

    npy = 1

    varint = 2

    msgpack = 3

class ArrayMeaning(enum.Enum):
    none = 0

    xyxy = 1

    xywh = 2

    cxcywh = 3

    keypoints = 4

class ImageField:
    """An image that a pipeline decodes."""

    def __init__(self) -> None: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @pipeline.setter
    def pipeline(self, arg: Pipeline, /) -> None: ...

class BytesField:
    """Bytes as they are."""

    def __init__(self) -> None: ...

class TextField:
    """UTF-8, or JSON."""

    def __init__(self) -> None: ...
    @property
    def json(self) -> bool: ...
    @json.setter
    def json(self, arg: bool, /) -> None: ...

class ScalarField:
    """A number."""

    def __init__(self) -> None: ...
    @property
    def codec(self) -> ScalarCodec: ...
    @codec.setter
    def codec(self, arg: ScalarCodec, /) -> None: ...
    @property
    def stored(self) -> str | None: ...
    @stored.setter
    def stored(self, arg: str, /) -> None: ...
    @property
    def type(self) -> str: ...
    @type.setter
    def type(self, arg: str, /) -> None: ...

class ArrayField:
    """Numbers; -1 in `shape` is ragged."""

    def __init__(self) -> None: ...
    @property
    def shape(self) -> list[int]: ...
    @shape.setter
    def shape(self, arg: Sequence[int], /) -> None: ...
    @property
    def codec(self) -> ArrayCodec: ...
    @codec.setter
    def codec(self, arg: ArrayCodec, /) -> None: ...
    @property
    def meaning(self) -> ArrayMeaning: ...
    @meaning.setter
    def meaning(self, arg: ArrayMeaning, /) -> None: ...
    @property
    def normalised(self) -> bool: ...
    @normalised.setter
    def normalised(self, arg: bool, /) -> None: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @pipeline.setter
    def pipeline(self, arg: Pipeline, /) -> None: ...
    @property
    def rows_of(self) -> int | None: ...
    @rows_of.setter
    def rows_of(self, arg: int | None, /) -> None: ...
    @property
    def type(self) -> str: ...
    @type.setter
    def type(self, arg: str, /) -> None: ...

class MaskField:
    """A PNG image of integers."""

    def __init__(self) -> None: ...
    @property
    def height(self) -> int: ...
    @height.setter
    def height(self, arg: int, /) -> None: ...
    @property
    def width(self) -> int: ...
    @width.setter
    def width(self, arg: int, /) -> None: ...
    @property
    def max_pixels(self) -> int: ...
    @max_pixels.setter
    def max_pixels(self, arg: int, /) -> None: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @pipeline.setter
    def pipeline(self, arg: Pipeline, /) -> None: ...
    @property
    def type(self) -> str: ...
    @type.setter
    def type(self, arg: str, /) -> None: ...

class AudioField:
    """A WAV file."""

    def __init__(self) -> None: ...
    @property
    def channels(self) -> int: ...
    @channels.setter
    def channels(self, arg: int, /) -> None: ...
    @property
    def rate(self) -> int: ...
    @rate.setter
    def rate(self, arg: int, /) -> None: ...
    @property
    def frames(self) -> int: ...
    @frames.setter
    def frames(self, arg: int, /) -> None: ...
    @property
    def type(self) -> str: ...
    @type.setter
    def type(self, arg: str, /) -> None: ...

class TokenPart(enum.Enum):
    ids = 0

    labels = 1

    positions = 2

    segments = 3

    lengths = 4

class TokensField:
    """A part of a unit of tokens."""

    def __init__(self) -> None: ...
    @property
    def part(self) -> TokenPart: ...
    @part.setter
    def part(self, arg: TokenPart, /) -> None: ...
    @property
    def stored(self) -> str: ...
    @stored.setter
    def stored(self, arg: str, /) -> None: ...
    @property
    def length(self) -> int: ...
    @length.setter
    def length(self, arg: int, /) -> None: ...
    @property
    def pad(self) -> int: ...
    @pad.setter
    def pad(self, arg: int, /) -> None: ...
    @property
    def ignored(self) -> int: ...
    @ignored.setter
    def ignored(self, arg: int, /) -> None: ...
    @property
    def mask(self) -> str | None: ...
    @mask.setter
    def mask(self, arg: str, /) -> None: ...
    @property
    def vocabulary(self) -> int: ...
    @vocabulary.setter
    def vocabulary(self, arg: int, /) -> None: ...
    @property
    def type(self) -> str: ...
    @type.setter
    def type(self, arg: str, /) -> None: ...

class Decoder:
    """What decodes a kind of the user's own."""

def python_decoder(function: Callable) -> Decoder:
    """Decodes by a function: (bytes) -> (shape, its bytes as uint8)."""

class CustomField:
    """What a Decoder gives."""

    def __init__(self) -> None: ...
    @property
    def shape(self) -> list[int]: ...
    @shape.setter
    def shape(self, arg: Sequence[int], /) -> None: ...
    @property
    def decoder(self) -> Decoder: ...
    @decoder.setter
    def decoder(self, arg: Decoder, /) -> None: ...
    @property
    def type(self) -> str: ...
    @type.setter
    def type(self, arg: str, /) -> None: ...

class Field:
    """A field of a source, and its kind (native/fields/program.h)."""

    def __init__(self) -> None: ...
    @property
    def name(self) -> str: ...
    @name.setter
    def name(self, arg: str, /) -> None: ...
    @property
    def index(self) -> int: ...
    @index.setter
    def index(self, arg: int, /) -> None: ...
    @property
    def kind(
        self,
    ) -> (
        ImageField
        | BytesField
        | TextField
        | ScalarField
        | ArrayField
        | MaskField
        | AudioField
        | TokensField
        | CustomField
    ): ...
    @kind.setter
    def kind(
        self,
        arg: ImageField
        | BytesField
        | TextField
        | ScalarField
        | ArrayField
        | MaskField
        | AudioField
        | TokensField
        | CustomField,
        /,
    ) -> None: ...
    @property
    def padded(self) -> bool: ...
    @padded.setter
    def padded(self, arg: bool, /) -> None: ...
    @property
    def fill(self) -> bytes | None: ...
    @fill.setter
    def fill(self, arg: bytes, /) -> None: ...

class BatchMix:
    """What is mixed when a batch is complete."""

    def __init__(self) -> None: ...
    @property
    def mixing(self) -> Mixing: ...
    @mixing.setter
    def mixing(self, arg: Mixing, /) -> None: ...
    @property
    def images(self) -> list[int]: ...
    @images.setter
    def images(self, arg: Sequence[int], /) -> None: ...
    @property
    def labels(self) -> int | None: ...
    @labels.setter
    def labels(self, arg: int | None, /) -> None: ...
    @property
    def draws_only(self) -> bool: ...
    @draws_only.setter
    def draws_only(self, arg: bool, /) -> None: ...

class Program:
    """Unpacks records (native/fields/program.h)."""

    @property
    def outputs(self) -> list[tuple[str, str, list[int], str]]:
        """
        (name, dtype, shape of one sample, form) of each; -1 in a shape is ragged.
        """

    @property
    def light(self) -> bool:
        """Whether unpacking costs little more than a copy."""

def compile_program(fields: Sequence[Field], mix: BatchMix | None = None) -> Program: ...

class PeerTransport:
    """Messages between ranks (native/peer/transport.h); starts nothing."""

    def __init__(self, library: str, transports: str = "", devices: str = "") -> None: ...
    @property
    def address(self) -> bytes: ...

class OnError(enum.Enum):
    substitute = 1

    report = 2

class Sharing(enum.Enum):
    push = 0

    owners_read = 1

    hdmlp = 2

class ReaderKind(enum.Enum):
    auto = 0

    pread = 1

    io_uring = 2

class TierKind(enum.Enum):
    ram = 0

    file = 1

class LoaderConfig:
    """What a loader does (native/stage/loader.h)."""

    def __init__(self) -> None: ...
    @property
    def job(self) -> JobSpec: ...
    @job.setter
    def job(self, arg: JobSpec, /) -> None: ...
    @property
    def rank(self) -> int: ...
    @rank.setter
    def rank(self, arg: int, /) -> None: ...
    @property
    def source(self) -> Source: ...
    @source.setter
    def source(self, arg: Source, /) -> None: ...
    @property
    def program(self) -> Program: ...
    @program.setter
    def program(self, program: Program | None) -> None: ...
    @property
    def sharing(self) -> Sharing: ...
    @sharing.setter
    def sharing(self, arg: Sharing, /) -> None: ...
    @property
    def locality(self) -> bool: ...
    @locality.setter
    def locality(self, arg: bool, /) -> None: ...
    @property
    def first_epoch(self) -> int: ...
    @first_epoch.setter
    def first_epoch(self, arg: int, /) -> None: ...
    @property
    def on_error(self) -> OnError: ...
    @on_error.setter
    def on_error(self, arg: OnError, /) -> None: ...
    @property
    def fetchers(self) -> int: ...
    @fetchers.setter
    def fetchers(self, arg: int, /) -> None: ...
    @property
    def workers(self) -> int: ...
    @workers.setter
    def workers(self, arg: int, /) -> None: ...
    @property
    def depth(self) -> int: ...
    @depth.setter
    def depth(self, arg: int, /) -> None: ...
    @property
    def reader(self) -> ReaderKind: ...
    @reader.setter
    def reader(self, arg: ReaderKind, /) -> None: ...
    @property
    def expected_tiers(self) -> list[float]: ...
    @expected_tiers.setter
    def expected_tiers(self, arg: Sequence[float], /) -> None: ...
    @property
    def expected_peer(self) -> float: ...
    @expected_peer.setter
    def expected_peer(self, arg: float, /) -> None: ...
    @property
    def expected_source(self) -> float: ...
    @expected_source.setter
    def expected_source(self, arg: float, /) -> None: ...
    @property
    def staging_bytes(self) -> int: ...
    @staging_bytes.setter
    def staging_bytes(self, arg: int, /) -> None: ...
    @property
    def io_bytes(self) -> int: ...
    @io_bytes.setter
    def io_bytes(self, arg: int, /) -> None: ...
    @property
    def keep_bytes(self) -> int: ...
    @keep_bytes.setter
    def keep_bytes(self, arg: int, /) -> None: ...
    @property
    def labels_in_slab(self) -> bool: ...
    @labels_in_slab.setter
    def labels_in_slab(self, arg: bool, /) -> None: ...
    def share(self, tiers: NodeReader, numbers: Sequence[int]) -> None:
        """
        Takes the tiers that others share; sample s is their sample numbers[s], or s without any.
        """

    def take_batch_memory(self, take: Callable) -> None:
        """
        `take` gives the memory of batches: (bytes) -> a uint8 array of so many. It is called from the stage's threads.
        """

class TierSpec:
    """A storage class of a node."""

    def __init__(
        self, kind: TierKind, capacity: int, path: str, keep: bool, modest: bool
    ) -> None: ...
    def use_store(self, tier: object) -> None:
        """
        `tier` keeps the records: put(key, bytes), and get(key) -> bytes or None.
        """

class Nodes:
    """The node of each rank, and what each node keeps."""

    def __init__(self) -> None: ...
    @property
    def of_rank(self) -> list[int]: ...
    @of_rank.setter
    def of_rank(self, arg: Sequence[int], /) -> None: ...
    @property
    def capacity(self) -> list[int]: ...
    @capacity.setter
    def capacity(self, arg: Sequence[int], /) -> None: ...

class NodeSpec:
    """A rank's node and its tiers (native/stage/node.h)."""

    def __init__(self) -> None: ...
    @property
    def job(self) -> str: ...
    @job.setter
    def job(self, arg: str, /) -> None: ...
    @property
    def local_rank(self) -> int: ...
    @local_rank.setter
    def local_rank(self, arg: int, /) -> None: ...
    @property
    def local_world(self) -> int: ...
    @local_world.setter
    def local_world(self, arg: int, /) -> None: ...
    @property
    def tiers(self) -> list[TierSpec]: ...
    @tiers.setter
    def tiers(self, arg: Sequence[TierSpec], /) -> None: ...
    @property
    def node(self) -> int: ...
    @node.setter
    def node(self, arg: int, /) -> None: ...
    @property
    def nodes(self) -> Nodes: ...
    @nodes.setter
    def nodes(self, arg: Nodes, /) -> None: ...
    @property
    def all_tiers(self) -> list[list[TierSpec]]: ...
    @all_tiers.setter
    def all_tiers(self, arg: Sequence[Sequence[TierSpec]], /) -> None: ...

class ExchangeConfig:
    """How nodes are reached (native/peer/exchange.h)."""

    def __init__(self) -> None: ...
    @property
    def addresses(self) -> list[bytes]: ...
    @addresses.setter
    def addresses(self, arg: Sequence[bytes], /) -> None: ...
    @property
    def secret(self) -> bytes: ...
    @secret.setter
    def secret(self, arg: bytes, /) -> None: ...
    @property
    def timeout(self) -> datetime.timedelta: ...
    @timeout.setter
    def timeout(self, arg: datetime.timedelta, /) -> None: ...

class Batch:
    """One local batch, as the stage hands it out."""

    @property
    def epoch(self) -> int: ...
    @property
    def index(self) -> int: ...
    def __len__(self) -> int: ...
    @property
    def data(self) -> NDArray:
        """Raw bytes (total,)."""

    def output(self, number: int) -> Any:
        """
        One output of the program: an array, or if it is ragged (values, offsets or lengths), and the shapes where more than the first dimension differs.
        """

    @property
    def mixture(self) -> tuple[str, float, tuple[int, int, int, int]]:
        """
        What the batch got: none, mixup or cutmix; how much of each sample is its own; the box (x, y, width, height).
        """

    def texts(self, number: int) -> list[str]:
        """The same of texts, as a list."""

    @property
    def labels(self) -> NDArray:
        """Their own memory, or with labels_in_slab that of the batch."""

    @property
    def samples(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def occurrences(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        How often the epoch had each sample before; empty where none comes again.
        """

    @property
    def offsets(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def lengths(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def failures(self) -> list[tuple[int, str]]:
        """(place, reason) of samples that on_error="report" left empty."""

    @property
    def queue(self) -> int: ...
    def release(self) -> None:
        """
        Gives the memory back, once no array is over it; its outputs are then gone.
        """

def unpack_one(
    source: Source,
    program: Program,
    record: bytes,
    sample: int,
    *,
    seed: int,
    epoch: int,
    occurrence: int,
) -> Batch:
    """The batch of one sample, from its record."""

class Record:
    """What a consumer was handed (native/stage/record.h)."""

    def __init__(self, kept: int) -> None: ...
    def begin(self, epoch: int) -> None:
        """Begins the sums of an epoch."""

    def add(self, batch: Batch, time: float, wait: float) -> None: ...
    def substitute(self, sample: int) -> None: ...
    @property
    def taken(self) -> tuple[int, int, int, float, float, list[tuple[int, int, float]], list[int]]:
        """
        Of the epoch: its number, batches, samples, seconds of waiting and of decoding; (samples, bytes, seconds) of the RAM tier, the file tier, other nodes and the source; substituted.
        """

    @property
    def most(self) -> tuple[int, int, int, int, int]:
        """The most bytes by pool."""

    @property
    def columns(self) -> list[list[float]]:
        """Of the last batches."""

class Loader:
    """The staging buffer of one rank (native/stage/loader.h)."""

    def __init__(
        self,
        config: LoaderConfig,
        node: NodeSpec,
        peers: ExchangeConfig,
        transport: PeerTransport | None,
    ) -> None:
        """`transport` is None where samples do not travel between nodes."""

    def next(self) -> Batch:
        """The next batch; waits for it with the GIL released."""

    def next_soon(self) -> Batch | None:
        """The same, or None after a tenth of a second."""

    def seek(self, epoch: int, batch: int) -> None: ...
    @property
    def position(self) -> tuple[int, int]: ...
    def close(self) -> None: ...
    @property
    def peers(self) -> dict[str, int]:
        """
        What was exchanged with other nodes (native/peer/exchange.h); {} on one node.
        """

class NodeReader:
    """
    Samples in any order through a node's tiers (native/stage/node_reader.h).
    """

    def __init__(self, source: Source, job: str, tiers: Sequence[TierSpec]) -> None: ...
    def read(self, samples: list[int]) -> list[bytes]:
        """The bytes of each sample."""

    @property
    def ram_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def taken(self) -> dict[str, int]:
        """Samples that this process took, by where from."""

class HorovodTimeline:
    """Operations of a Horovod timeline (native/timeline/horovod.h)."""

    def __init__(self) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def finish(self) -> None: ...
    def take(self) -> dict: ...
    @property
    def closed_rounds(self) -> int: ...
    @property
    def tensors(self) -> list: ...
    @property
    def report(self) -> dict: ...

class TraceFilter:
    """Chosen events of a Chrome-format trace (native/timeline/scanner.h)."""

    def __init__(self, names: Sequence[str], categories: Sequence[str]) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def finish(self) -> None: ...
    def take(self) -> list: ...
    @property
    def report(self) -> dict: ...

def trace_start(path: str, rank: int, world: int) -> None: ...
def trace_stop() -> tuple[int, int, int]:
    """Events written, events dropped, bytes of the file."""

def trace_on() -> bool: ...
def trace_kind(category: str, name: str) -> int: ...
def trace_now() -> int:
    """Nanoseconds of the clock of all events."""

def trace_record(kind: int, begin: int, end: int) -> None:
    """Nothing while not recording; `kind` from trace_kind."""

CHECKPOINT_BLOCK: int = 4194304

CHECKPOINT_ALIGNMENT: int = 4096

class Priority(enum.Enum):
    normal = 0

    low = 1

    idle = 2

class Copying(enum.Enum):
    at_once = 0

    in_background = 1

    lazily = 2

class Snapshot:
    """A snapshot in memory (native/checkpoint/snapshot.h)."""

    def __init__(self, threads: int) -> None: ...
    def reserve(self, bytes: int) -> None: ...
    def begin(
        self, header: bytes, pieces: Sequence[tuple[int, int]], copying: Copying = Copying.at_once
    ) -> None:
        """
        Pieces are (address, bytes) of memory that must stay as it is until it is copied, and be readable until the snapshot is written.
        """

    def copy(self, pieces: Sequence[int]) -> None:
        """The blocks that these pieces lie in, now."""

    def finish(self) -> None: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def capacity(self) -> int: ...

class Gate:
    """Keeps background writing back while it is held."""

    def __init__(self) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    @property
    def held(self) -> bool: ...
    @property
    def waited_seconds(self) -> float: ...

class Activity:
    """The process needs storage or network inside (native/base/activity.h)."""

    def __init__(self) -> None: ...
    def __enter__(self) -> Activity: ...
    def __exit__(self, *args: object) -> None: ...
    @staticmethod
    def quiet() -> bool: ...

class Written:
    @property
    def size(self) -> int: ...
    @property
    def crcs(self) -> list[int]: ...
    @property
    def direct(self) -> bool: ...
    @property
    def seconds(self) -> float: ...
    @property
    def cpu_seconds(self) -> float: ...

class SnapshotWrite:
    """A snapshot into a file (native/checkpoint/write.h)."""

    def __init__(
        self,
        snapshot: Snapshot,
        path: str,
        rate: int = 0,
        priority: Priority = Priority.low,
        threads: int = 1,
        direct: bool = True,
        gate: Gate | None = None,
        gate_patience: float = 1.0,
        considerate: bool = False,
    ) -> None: ...
    def run(self) -> Written: ...
    def hurry(self) -> None: ...
    def stop(self) -> None: ...

class FileCopy:
    """A checked copy (native/checkpoint/transfer.h)."""

    def __init__(
        self,
        source: str,
        target: str,
        size: int,
        crcs: Sequence[int],
        rate: int = 0,
        priority: Priority = Priority.low,
        direct: bool = True,
        gate: Gate | None = None,
        gate_patience: float = 1.0,
        considerate: bool = False,
    ) -> None: ...
    def run(self) -> Written: ...
    def hurry(self) -> None: ...
    def stop(self) -> None: ...

class Progress:
    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

def read_checked(
    path: str, size: int, crcs: Sequence[int], threads: int, progress: Progress | None = None
) -> tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,))], list[int], float]:
    """
    The file's bytes, the numbers of its damaged blocks, and the seconds it took.
    """

def check_file(
    path: str,
    size: int,
    crcs: Sequence[int],
    threads: int,
    progress: Progress | None = None,
    priority: Priority = Priority.normal,
) -> list[int]:
    """The numbers of its damaged blocks."""

def crc32c(bytes: bytes) -> int: ...

class Locked(enum.Enum):
    yes = 0

    elsewhere = 1

    unsupported = 2

    failed = 3

class DirectoryLock:
    """A lock that ends with its process."""

    def __init__(self, path: str) -> None: ...
    def acquire(self) -> Locked:
        """At once: whether it was had, or the file system has no locks."""

    @property
    def error_number(self) -> int:
        """Why acquire() failed, an errno."""

    def release(self) -> None: ...

class Reducer:
    """An operation on elements (native/collective/reducer.h)."""

    @overload
    def __init__(self, op: str, type: str) -> None: ...
    @overload
    def __init__(self, function: object, element_bytes: int, commutative: bool) -> None: ...

class CommunicatorStats:
    @property
    def calls(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def sleeps(self) -> int: ...
    @property
    def wait_ns(self) -> int: ...
    @property
    def imbalanced(self) -> int: ...

class Communicator:
    """Ranks of one node, on raw addresses (native/collective)."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def barrier(self) -> None: ...
    def allreduce(
        self,
        source: int,
        target: int,
        count: int,
        reducer: Reducer,
        algorithm: str = "cooperative",
        fixed: bool = False,
    ) -> None: ...
    def two_level_allreduce(
        self,
        leaders: object | None,
        data: int,
        count: int,
        reducer: Reducer,
        fixed: bool,
        part_bytes: int,
    ) -> None:
        """
        In place, over several nodes. `leaders` (None but on local rank 0): an object whose start(address, count, type) begins their allreduce of elements and returns an object with wait().
        """

    def reduce(
        self,
        source: int,
        target: int,
        count: int,
        reducer: Reducer,
        root: int,
        algorithm: str = "cooperative",
        fixed: bool = False,
    ) -> None: ...
    def broadcast(
        self, data: int, bytes: int, root: int, algorithm: str = "cooperative"
    ) -> None: ...
    def reduce_scatter(self, source: int, target: int, count: int, reducer: Reducer) -> None:
        """`count` elements for each rank."""

    def allgather(self, source: int, target: int, bytes: int) -> None:
        """`bytes` of each rank."""

    def set_timeout(self, seconds: float) -> None: ...
    def abort(self, what: str = "aborted it") -> None:
        """`what` that rank did, for the others."""

    def leave(self) -> None: ...
    def stats(self) -> CommunicatorStats: ...

def open_communicator(
    job: str,
    rank: int,
    ranks: int,
    timeout: float,
    window_bytes: int,
    arena_bytes: int,
    directory: str,
    table: str,
) -> Communicator:
    """Waits for all ranks."""

def allocate_shared(communicator: Communicator, bytes: int) -> object:
    """Bytes that all ranks reach, or None if the arena has no room."""

class SyncMode(enum.Enum):
    planned = 0

    negotiated = 1

class GradientOptions:
    """How gradients are reduced (native/sync/options.h)."""

    def __init__(self) -> None: ...
    @property
    def mode(self) -> SyncMode: ...
    @mode.setter
    def mode(self, arg: SyncMode, /) -> None: ...
    @property
    def mean(self) -> bool: ...
    @mean.setter
    def mean(self, arg: bool, /) -> None: ...
    @property
    def check_finite(self) -> bool: ...
    @check_finite.setter
    def check_finite(self, arg: bool, /) -> None: ...
    @property
    def threshold(self) -> int: ...
    @threshold.setter
    def threshold(self, arg: int, /) -> None: ...
    @property
    def cores(self) -> list[int]: ...
    @cores.setter
    def cores(self, arg: Sequence[int], /) -> None: ...
    @property
    def timeline(self) -> str: ...
    @timeline.setter
    def timeline(self, arg: str, /) -> None: ...
    @property
    def shapes(self) -> list[str]: ...
    @shapes.setter
    def shapes(self, arg: Sequence[str], /) -> None: ...
    @property
    def global_sleep_every(self) -> int: ...
    @global_sleep_every.setter
    def global_sleep_every(self, arg: int, /) -> None: ...
    @property
    def nonblocking(self) -> bool: ...
    @nonblocking.setter
    def nonblocking(self, arg: bool, /) -> None: ...
    @property
    def warn(self) -> float: ...
    @warn.setter
    def warn(self, arg: float, /) -> None: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...
    @property
    def cycle(self) -> float: ...
    @cycle.setter
    def cycle(self, arg: float, /) -> None: ...
    @property
    def test_sleep(self) -> float: ...
    @test_sleep.setter
    def test_sleep(self, arg: float, /) -> None: ...

class GradientEngine:
    """Reduces gradients over all ranks (native/sync)."""

    def __init__(
        self,
        tensors: Sequence[tuple[str, int, str, str]],
        options: GradientOptions,
        job: str,
        rank: int,
        ranks: int,
        network: object | None,
        fixed_order: bool,
    ) -> None:
        """
        `rank` of `ranks`: within the node, where there is a network between nodes.
        """

    def set_plan(self, groups: Sequence[Sequence[int]]) -> None: ...
    def broadcast(self, data: bytes, root: int) -> bytes: ...
    def all_gather(self, data: bytes) -> list: ...
    def submit(self, tensor: int, address: int, present: bool) -> None:
        """
        The gradient's memory at `address` is read and written until wait() has returned.
        """

    def submit_in_place(
        self, tensor: int, address: int, present: bool
    ) -> Annotated[torch.Tensor, dict(shape=(None,))]:
        """The flat torch tensor in which the result will be after wait()."""

    def wait(self) -> None: ...
    def wait_for(self, tensor: int) -> None: ...
    def contributors(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    def stats(self) -> dict[str, int]: ...
    def oversleeps(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """
        How often the thread woke late: entry i counts [2^i, 2^(i+1)) microseconds.
        """

def plan_reductions(
    graph: Sequence[tuple[Sequence[int], int, int]],
    tensors: Sequence[tuple[str, int, str, str]],
    threshold: int,
) -> tuple[list[list[int]], int, int]:
    """
    (groups, nodes, edges) of a graph of (parents, tensor or -1, priority).
    """

def fuse_reductions(
    order: Sequence[int], tensors: Sequence[tuple[str, int, str, str]], threshold: int
) -> list[list[int]]: ...

class StorageClass:
    """One class of Table 3.1; MB and MB/s."""

    def __init__(self) -> None: ...
    @property
    def capacity(self) -> float: ...
    @capacity.setter
    def capacity(self, arg: float, /) -> None: ...
    @property
    def threads(self) -> int: ...
    @threads.setter
    def threads(self, arg: int, /) -> None: ...
    @property
    def read(self) -> list[tuple[float, float]]: ...
    @read.setter
    def read(self, arg: Sequence[tuple[float, float]], /) -> None: ...
    @property
    def write(self) -> list[tuple[float, float]]: ...
    @write.setter
    def write(self, arg: Sequence[tuple[float, float]], /) -> None: ...

class Model:
    """The machine (native/simulate/model.h)."""

    def __init__(self) -> None: ...
    @property
    def nodes(self) -> int: ...
    @nodes.setter
    def nodes(self, arg: int, /) -> None: ...
    @property
    def compute(self) -> float: ...
    @compute.setter
    def compute(self, arg: float, /) -> None: ...
    @property
    def preprocess(self) -> float: ...
    @preprocess.setter
    def preprocess(self, arg: float, /) -> None: ...
    @property
    def network(self) -> float: ...
    @network.setter
    def network(self, arg: float, /) -> None: ...
    @property
    def source_link(self) -> float: ...
    @source_link.setter
    def source_link(self, arg: float, /) -> None: ...
    @property
    def source(self) -> list[tuple[float, float]]: ...
    @source.setter
    def source(self, arg: Sequence[tuple[float, float]], /) -> None: ...
    @property
    def classes(self) -> list[StorageClass]: ...
    @classes.setter
    def classes(self, arg: Sequence[StorageClass], /) -> None: ...
    @property
    def step_seconds(self) -> float: ...
    @step_seconds.setter
    def step_seconds(self, arg: float, /) -> None: ...
    def source_share(self, gamma: int) -> float: ...
    def thread_read(self, storage_class: int) -> float: ...
    def stage_seconds(self) -> float: ...

def validate_model(model: Model) -> None: ...
def interpolate(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Equation 4.1."""

class Loading(enum.Enum):
    perfect = 0

    on_demand = 1

    staged = 2

class Filling(enum.Enum):
    none = 0

    prefetch = 1

    reading = 2

    before = 3

class Decision:
    """What a policy decides (native/simulate/decision.h)."""

    def __init__(self) -> None: ...
    @property
    def loading(self) -> Loading: ...
    @loading.setter
    def loading(self, arg: Loading, /) -> None: ...
    @property
    def filling(self) -> Filling: ...
    @filling.setter
    def filling(self, arg: Filling, /) -> None: ...
    @property
    def stage_remote(self) -> bool: ...
    @stage_remote.setter
    def stage_remote(self, arg: bool, /) -> None: ...
    @property
    def stage_source(self) -> bool: ...
    @stage_source.setter
    def stage_source(self, arg: bool, /) -> None: ...
    @property
    def cleanup(self) -> bool: ...
    @cleanup.setter
    def cleanup(self, arg: bool, /) -> None: ...
    @property
    def nodes(self) -> int: ...
    def kept(
        self, node: int, storage_class: int
    ) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """What the node keeps there, in fill order."""

    def set_kept(
        self,
        keep: Sequence[
            Sequence[
                Annotated[
                    NDArray[numpy.uint32],
                    dict(shape=(None,), order="C", device="cpu", writable=False),
                ]
            ]
        ],
    ) -> None:
        """keep[node][class - 1]: sample ids in fill order."""

    def set_owner(
        self,
        owner: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """The node of every sample, 2**32 - 1 for none."""

    def set_order(
        self,
        order: Sequence[
            Annotated[
                NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
            ]
        ],
    ) -> None:
        """order[epoch * nodes + node]: sample ids."""

    def order(self, index: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

def keep_frequent(
    spec: JobSpec,
    bytes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    capacities: Sequence[int],
    in_order: bool = True,
) -> Decision: ...
def keep_owned(
    spec: JobSpec,
    bytes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    capacities: Sequence[int],
) -> Decision: ...
def first_readers(spec: JobSpec) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
def read_own_only(spec: JobSpec, decision: Decision) -> None: ...
def read_local_first(spec: JobSpec, decision: Decision) -> None: ...

class SimulationResult:
    """Seconds and MB (simulate/simulate.h)."""

    @property
    def seconds(self) -> float: ...
    @property
    def initial_seconds(self) -> float: ...
    @property
    def warm_seconds(self) -> float: ...
    @property
    def batch_seconds(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...
    @property
    def compute_seconds(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...
    @property
    def node_stall(self) -> list[float]: ...
    @property
    def epoch_seconds(self) -> list[float]: ...
    @property
    def staged(self) -> list[float]: ...
    @property
    def kept_from_nodes(self) -> float: ...
    @property
    def kept_from_source(self) -> float: ...
    @property
    def epoch_source(self) -> list[float]: ...

def simulate_published(
    model: Model,
    spec: JobSpec,
    sizes: Annotated[
        NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    decision: Decision,
) -> SimulationResult: ...
def simulate_consistent(
    model: Model,
    spec: JobSpec,
    sizes: Annotated[
        NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    decision: Decision,
) -> SimulationResult: ...
