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
    comms: int,
    depth: int,
    sizes: list[int],
    seconds: float,
    verify: bool,
) -> list[tuple[int, int, float, float, float, float, float]]: ...

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

class HostArena:
    def __init__(self, size: int, page: int, threads: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def page(self) -> int: ...
    def usage(self) -> tuple[int, int, int]: ...
    def take(self, size: int) -> tuple[int, int]: ...
    def give_back(self, offset: int, length: int) -> None: ...
