"""A table of nccl-tests of our own, and what the tests of strangers' logs do with a log.

All lines of those tests are written after the formats; the hosts are made up.
"""

from pathlib import Path

from evener.tools.analyze import Picture, collect, document, page, picture, run_checks
from evener.tools.analyze.findings import Finding

HEAD = (
    "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 "
    "iters: 20 agg iters: 1 validation: 1 graph: 0\n"
    "#\n# Using devices\n"
    "#  Rank  0 Group  0 Pid   1001 on     node-a device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB\n"
    "#  Rank  1 Group  0 Pid   1002 on     node-b device  0 [0000:0f:00] NVIDIA A100-SXM4-80GB\n#\n"
    "#                                                   out-of-place             in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time"
    "   algbw   busbw #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)"
    "  (GB/s)  (GB/s)\n"
)
ROWS = (
    "     1048576        262144     float     sum      -1    110.0    9.53    9.53      0    112.0"
    "    9.36    9.36      0\n"
    "     2097152        524288     float     sum      -1    200.0   10.49   10.49      0    201.0"
    "   10.43   10.43      0\n"
    "     4194304       1048576     float     sum      -1    390.0   10.75   10.75      0    391.0"
    "   10.73   10.73      0\n"
)
TAIL = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 10.215\n"
TABLE = HEAD + ROWS + TAIL
MEAN = (9.53 + 9.36 + 10.49 + 10.43 + 10.75 + 10.73) / 6


def read(tmp_path: Path, *texts: str) -> Picture:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.log")
        paths[-1].write_text(text)
    result = picture(collect(paths))
    findings = run_checks(result)
    document(result, findings)
    page(result, findings)
    return result


def found(result: Picture) -> dict[str, Finding]:
    return {finding.id: finding for finding in run_checks(result)}


def prefixed(text: str, prefix: str) -> str:
    """Each line behind a prefix; `%d` in it counts up."""
    return "".join(
        (prefix % number if "%" in prefix else prefix) + line + "\n"
        for number, line in enumerate(text.splitlines())
    )
