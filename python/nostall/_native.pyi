from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray

class OrderKind(enum.Enum):
    torch = 0

    keyed = 1

    user = 2

    sequential = 3

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
def epoch_length(spec: JobSpec) -> int: ...
def batches_per_epoch(spec: JobSpec) -> int: ...
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
        """The bytes of one sample. Raises IoError with its path."""

class FolderSource(Source):
    @property
    def root(self) -> str: ...
    @property
    def classes(self) -> list[str]: ...

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
    def apply(self, encoded: object, *, seed: int = 0, epoch: int = 0, sample: int = 0) -> object:
        """
        Decodes and transforms one image; random draws depend on the three numbers alone.
        """

def compile_pipeline(
    steps: Sequence[tuple[str, dict]],
    dtype: str | None = None,
    layout: str | None = None,
    max_pixels: int = 178956970,
) -> Pipeline:
    """Compiles [(name, parameters), ...] into a Pipeline."""

def decode_rgb(encoded: object, max_pixels: int = 178956970) -> object:
    """Decodes a JPEG, PNG or WebP image to uint8 RGB, height x width x 3."""

class PeerTransport:
    """Messages between ranks (native/peer/transport.h); starts nothing."""

    def __init__(self, library: str, transports: str = "", devices: str = "") -> None: ...
    @property
    def address(self) -> bytes: ...

class Batch:
    """One local batch, as the stage hands it out."""

    @property
    def epoch(self) -> int: ...
    @property
    def index(self) -> int: ...
    def __len__(self) -> int: ...
    @property
    def data(self) -> NDArray:
        """
        Images (n, 3, height, width) or (n, height, width, 3), or raw bytes (total,).
        """

    @property
    def labels(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...
    @property
    def samples(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def offsets(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def lengths(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...
    @property
    def origins(self) -> list[tuple[int, int, float]]:
        """
        (samples, bytes, seconds) of the RAM tier, the file tier, other nodes and the source.
        """

    @property
    def transform_seconds(self) -> float: ...
    @property
    def substitutions(self) -> list[tuple[int, int, str]]: ...
    @property
    def queue(self) -> int: ...

class Loader:
    """The staging buffer of one rank (native/stage/loader.h)."""

    def __init__(
        self,
        *,
        job: JobSpec,
        rank: int,
        source: Source,
        pipeline: Pipeline | None,
        tiers: Sequence[tuple[str, int, str, bool]],
        job_name: str,
        local_rank: int,
        local_world: int,
        on_error: str,
        fetchers: int,
        workers: int,
        depth: int,
        reader: str,
        staging_bytes: int,
        io_bytes: int,
        first_epoch: int = 0,
        transport: PeerTransport | None = None,
        node: int = 0,
        node_of_rank: Sequence[int] = [],
        capacities: Sequence[int] = [],
        addresses: Sequence[bytes] = [],
        secret: bytes = ...,
        peer_timeout_ms: int = 10000,
        sharing: str = "push",
        locality: bool = False,
        expected: Sequence[float] = [],
    ) -> None: ...
    def next(self) -> Batch:
        """The next batch; waits for it with the GIL released."""

    def seek(self, epoch: int, batch: int) -> None: ...
    @property
    def position(self) -> tuple[int, int]: ...
    def close(self) -> None: ...
    @property
    def peers(self) -> dict[str, int]:
        """
        What was exchanged with other nodes (native/peer/exchange.h); {} on one node.
        """

    @property
    def memory(self) -> tuple[int, int, int, int]: ...

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

class Layout:
    """What a policy decides (native/simulate/layout.h)."""

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
    def in_turn(self) -> bool: ...
    @in_turn.setter
    def in_turn(self, arg: bool, /) -> None: ...
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
) -> Layout: ...
def keep_owned(
    spec: JobSpec,
    bytes: Annotated[
        NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    capacities: Sequence[int],
) -> Layout: ...
def first_readers(spec: JobSpec) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
def read_own_only(spec: JobSpec, layout: Layout) -> None: ...
def read_local_first(spec: JobSpec, layout: Layout) -> None: ...

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
    layout: Layout,
) -> SimulationResult: ...
def simulate_consistent(
    model: Model,
    spec: JobSpec,
    sizes: Annotated[
        NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    layout: Layout,
) -> SimulationResult: ...
