def topk_with_feedback(
    gradient: int, residual: int, elements: int, values: int, indices: int, k: int
) -> None: ...
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
