from collections.abc import Sequence

def topk_with_feedback(
    gradient: int, residual: int, elements: int, values: int, indices: int, k: int
) -> None: ...
def chunks_select(
    gradient: int, residual: int, elements: int, k: int, scales: int, values: int, indices: int
) -> None: ...
def chunks_add(
    scales: int, values: int, indices: int, k: int, factor: float, out: int, elements: int
) -> None: ...
def int8_quantize(
    values: int, residual: int, elements: int, codes: int, room: int, scales: int, key: int
) -> None: ...
def int8_dequantize_sum(
    codes: int, scales: int, room: int, peers: int, factor: float, out: int, elements: int
) -> None: ...
def cast_narrow(values: int, elements: int, scale: float, form: str, out: int) -> None: ...
def cast_widen(values: int, elements: int, scale: float, form: str, out: int) -> None: ...
def net_bench(
    rank: int,
    control: str,
    plugin: str,
    streams: int,
    pattern: str,
    comms: int,
    depth: int,
    sizes: list[int],
    seconds: float,
    verify: bool,
) -> list[tuple[int, int, float, float, float, float, float, float | None]]: ...

_Tensor = tuple[str, int]
_How = tuple[int, str | None, int, int, int]

def adam_step(
    elements: int,
    master: tuple[str, int, int],
    gradient: _Tensor,
    first: _Tensor,
    second: _Tensor,
    output: _Tensor,
    hyper: list[float],
    decoupled: bool,
    number: int,
    how: _How,
) -> None: ...
def sgd_step(
    elements: int,
    master: tuple[str, int, int],
    gradient: _Tensor,
    first: _Tensor,
    output: _Tensor,
    hyper: list[float],
    nesterov: bool,
    number: int,
    how: _How,
) -> None: ...
def sum_of_squares(elements: int, gradient: _Tensor, threads: int) -> float: ...
def instruction_sets() -> list[str]: ...
def optimizer_threads() -> int: ...

class Launcher:
    def __init__(
        self,
        begin: int,
        end: int,
        steps: list[list[tuple[int, list[int], int, list[int], int, int]]],
        piece: int,
        pieces: int,
    ) -> None: ...
    def run(self, first: int, count: int, together: int) -> tuple[int, int]: ...
    def timed(
        self, streams: Streams, count: int, together: int, limit: float
    ) -> tuple[int, int, tuple[int, int, int] | None, float, float]: ...

class Streams:
    def __init__(
        self, query: int, look: int, select: int, ranks: list[tuple[int, int, int]]
    ) -> None: ...
    def wait(self, limit: float) -> tuple[int, int, int] | None: ...

class HostArena:
    def __init__(self, size: int, page: int, threads: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def page(self) -> int: ...
    def usage(self) -> tuple[int, int, int]: ...
    def take(self, size: int) -> tuple[int, int]: ...
    def give_back(self, offset: int, length: int) -> None: ...

_Meta = tuple[int, Sequence[int], str]
_Answer = tuple[
    int,
    str,
    int,
    list[tuple[int, list[int], str]],
    bool,
    int,
    int,
    tuple[float, float],
    list[list[int]],
    int,
    str,
    list[int],
]

class Negotiator:
    def __init__(
        self,
        rank: int,
        size: int,
        sets: list[list[int]],
        fusion: int,
        cache: int,
        repeats: int,
        frozen_bytes: int,
        stall_warn: float,
        stall_abort: float,
        cycle: float,
        timeout: float,
    ) -> None: ...
    @property
    def port(self) -> int: ...
    def connect(self, addresses: list[str], port: int, token: str) -> None: ...
    def submit(
        self,
        kind: int,
        name: str,
        set: int,
        tensors: list[_Meta],
        gpu: bool,
        op: int,
        root: int,
        factors: tuple[float, float],
        splits: Sequence[int],
        urgent: bool,
        drives: bool,
    ) -> bool: ...
    def open_gate(self, path: str) -> None: ...
    def use_gate(self) -> None: ...
    @staticmethod
    def gate_bytes(size: int) -> int: ...
    def exchange(self, flag: bool) -> bool | None: ...
    def quick(
        self,
        name: str,
        dtype: int,
        shape: Sequence[int],
        gpu: bool,
        op: int,
        factors: tuple[float, float],
    ) -> int: ...
    def await_work(self, timeout: float) -> bool: ...
    def drive(self) -> None: ...
    def undrive(self) -> None: ...
    def flush(self) -> None: ...
    def next(self, timeout: float) -> tuple[list[_Answer], bool, bool, str | None] | None: ...
    def finished(self, flagged: bool) -> None: ...
    def ended(self) -> str | None: ...
    def frozen(self) -> tuple[bool, int]: ...
    def now(self) -> float: ...
    def record(self, on: bool) -> None: ...
    def news(self) -> tuple[list[tuple[float, str, int, int, int]], list[str]]: ...
    def shutdown(self) -> None: ...
    def close(self, linger: float) -> None: ...

class StagedExchange:
    WORDS: int
    def __init__(
        self,
        rank: int,
        size: int,
        send: int,
        receive: int,
        words: int,
        slot: int,
        slots: int,
        patience: float,
    ) -> None: ...
    def handle(self) -> bytes: ...
    def connect(self, handles: list[bytes], limit: float) -> None: ...
    def try_device(self, stream: int) -> None: ...
    def enqueue(
        self,
        parts: bool,
        bytes: int,
        payload: int,
        received: int,
        out: int,
        back: int,
    ) -> None: ...
    def run_on_host(self, parts: bool, bytes: int, payload: int, received: int) -> None: ...
    def failure(self) -> str | None: ...
    def close(self) -> None: ...
