"""Logs of incidents whose cause is known, written after the formats; hosts, programs: made up.

`tests/analyze` has cases of them, `tests/twins/analyze.py` makes random ones. Each function gives
the lines of one rank or of one tool, as that tool writes them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from typing import Any

STYLES = ("2.0", "2.1", "2.3", "2.4", "2.6", "2.9")


def watchdog(
    rank: int,
    seq: int,
    op: str = "ALLREDUCE",
    numel: int = 1024,
    style: str = "2.4",
    enqueued: int | None = None,
    completed: int | None = None,
    group: str = "default_pg",
    numel_out: int | None = None,
    second: int = 0,
    ms: int = 600_000,
) -> list[str]:
    """What one rank's watchdog says of a time-out, as a version of PyTorch writes it."""
    e = seq if enqueued is None else enqueued
    c = seq - 1 if completed is None else completed
    stamp = f"E0214 11:{second // 60 % 60:02}:{second % 60:02}.{rank:09} "
    pid = 0 if group == "default_pg" else 3
    pg = f"[PG ID {pid} PG GUID {pid}({group}) Rank {rank}]"
    out = numel if numel_out is None else numel_out
    shape = f"NumelIn={numel}, NumelOut={out}, "
    if style == "2.0":
        shape, stamp = f"TensorShape=[{numel}], ", "E "
    elif style == "2.1":
        stamp = "E "
    elif style == "2.3":
        pg = f"[PG {pid} Rank {rank}]"
    work = (
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, "
        f"OpType={op}, {shape}Timeout(ms)={ms}) ran for {ms + 17 + rank} milliseconds before "
        f"timing out."
    )
    if style == "2.0":
        work = work.replace("milliseconds before timing out.", "milliseconds before timing out.")
    lead = f"[rank{rank}]:" if style not in ("2.0",) else ""
    lines = [f"{lead}[{stamp}ProcessGroupNCCL.cpp:616] {work}"]
    if style in ("2.3", "2.4"):
        lines.append(
            f"{lead}[{stamp}ProcessGroupNCCL.cpp:1785] {pg} Exception (either an error or timeout) "
            f"detected by watchdog at work: {seq}, last enqueued NCCL work: {e}, last completed "
            f"NCCL "
            f"work: {c}."
        )
    elif style in ("2.6", "2.9"):
        started = ", last started work: -1" if style == "2.6" and rank % 2 else ""
        lines.append(
            f"{lead}[{stamp}ProcessGroupNCCL.cpp:2271] {pg}  failure detected by watchdog at work "
            f"sequence id: {seq} PG status: last enqueued work: {e}{started}, last completed "
            f"work: {c}"
        )
        lines.append(
            f"{lead}[{stamp}ProcessGroupNCCL.cpp:670] Stack trace of the failed collective not "
            f"found, "
            "potentially because FlightRecorder is disabled."
        )
    lines += [
        f"{lead}[{stamp}ProcessGroupNCCL.cpp:630] [Rank {rank}] Some NCCL operations have "
        f"failed or "
        "timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations "
        "might "
        "run on corrupted/incomplete data.",
        f"{lead}[{stamp}ProcessGroupNCCL.cpp:636] [Rank {rank}] To avoid data inconsistency, we "
        f"are "
        "taking the entire process down.",
        f"{lead}[{stamp}ProcessGroupNCCL.cpp:1595] {pg} Process group watchdog thread "
        f"terminated with "
        f"exception: {work}",
    ]
    return lines


def heartbeat(rank: int, outstanding: int, seconds: int = 480, old: bool = True) -> list[str]:
    """What one rank's heartbeat monitor says of a watchdog that is stuck."""
    pg = f"[PG 0 Rank {rank}]" if old else f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return [
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1316] {pg} Heartbeat monitor timed out! Process "
        f"will be "
        f"terminated after dumping debug info. workMetaList_.size()={outstanding}",
        f"[rank{rank}]:[F ProcessGroupNCCL.cpp:1169] {pg} {pg} ProcessGroupNCCL's watchdog got "
        f"stuck "
        f"for {seconds} seconds without making progress in monitoring enqueued collectives. This "
        "typically indicates a NCCL/CUDA API hang blocking the watchdog, and could be triggered by "
        "another thread holding the GIL inside a CUDA api, or other deadlock-prone behaviors. "
        f"workMetaList_.size() = {outstanding}",
    ]


def traceback(
    rank: int,
    error: str,
    file: str = "/srv/app/train.py",
    line: int = 88,
    prefix: str | None = None,
    library: str = "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
) -> list[str]:
    """A Python traceback of one rank; the innermost frames are a library's."""
    lead = f"[rank{rank}]: " if prefix is None else prefix
    return [
        lead + text
        for text in (
            "Traceback (most recent call last):",
            f'  File "{file}", line {line}, in <module>',
            "    main()",
            f'  File "{file}", line {line + 40}, in main',
            "    loss = model(batch)",
            "           ^^^^^^^^^^^^",
            f'  File "{library}", line 1511, in _wrapped_call_impl',
            "    return self._call_impl(*args, **kwargs)",
            error,
        )
    ]


GONE = (
    "torch.distributed.DistBackendError: NCCL error in: "
    "../torch/csrc/distributed/c10d/NCCLUtils.hpp:"
    "317, remote process exited or there was a network error, NCCL version 2.21.5",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.7]:41235",
    "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving "
    "ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: "
    "Connection reset by peer",
    "RuntimeError: NCCL communicator was aborted on rank 2.",
    "torch.distributed.DistStoreError: Socket Timeout",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "1800000ms for recv operation to complete",
)
"""Errors of ranks whose peer went away."""


def torchrun(
    failures: Iterable[tuple[int, int, int]], first: tuple[int, int, int], host: str = "node-a"
) -> list[str]:
    """torchrun's summary: failures as (rank, exit code, pid), the first one last."""

    def one(index: int, rank: int, code: int, pid: int) -> list[str]:
        names = {-6: "SIGABRT", -9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -15: "SIGTERM"}
        said = (
            f"Signal {-code} ({names.get(code, '?')}) received by PID {pid}"
            if code < 0
            else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        )
        return [
            f"[{index}]:",
            "  time      : 2026-02-14_11:20:31",
            f"  host      : {host}",
            f"  rank      : {rank} (local_rank: {rank % 8})",
            f"  exitcode  : {code} (pid: {pid})",
            "  error_file: <N/A>",
            f"  traceback : {said}",
        ]

    lines = [
        f"E0214 11:20:31.901000 70 torch/distributed/elastic/multiprocessing/api.py:869] failed "
        f"(exitcode: {first[1]}) local_rank: {first[0] % 8} (pid: {first[2]}) of binary: "
        f"/opt/venv/bin/python",
        "Traceback (most recent call last):",
        '  File "/opt/venv/bin/torchrun", line 8, in <module>',
        "    sys.exit(main())",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
    ]
    for index, (rank, code, pid) in enumerate(failures, 1):
        lines += one(index, rank, code, pid)
    lines += ["-" * 60, "Root Cause (first observed failure):", *one(0, *first), "=" * 60]
    return lines


def entry(
    seq: int,
    op: str = "all_reduce",
    size: int = 64,
    state: str = "completed",
    dtype: str = "Float",
    group: str = "0",
    desc: str = "default_pg",
    created: int | None = None,
    frames: Iterable[tuple[str, int]] = (),
    p2p: bool = False,
    out: int | None = None,
) -> dict[str, Any]:
    """One entry of a flight recorder."""
    at = 1_780_000_000_000_000_000 + (seq * 1_000_000 if created is None else created)
    return {
        "frames": [{"name": "f", "filename": f, "line": n} for f, n in frames],
        "record_id": seq, "pg_id": int(group) if group.isdigit() else 0,
        "process_group": (group, desc), "collective_seq_id": 0 if p2p else seq,
        "p2p_seq_id": seq if p2p else 0, "op_id": seq, "profiling_name": f"nccl:{op}",
        "time_created_ns": at, "input_sizes": [[size]], "input_dtypes": [dtype],
        "output_sizes": [[size if out is None else out]], "output_dtypes": [dtype], "state": state,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": state == "completed", "timeout_ms": 600_000, "is_p2p": p2p,
    }  # fmt: skip


def recorder(
    entries: list[dict[str, Any]],
    groups: dict[str, tuple[str, list[int]]],
    version: str = "2.10",
    rank: int | None = None,
) -> dict[str, Any]:
    """One rank's dump, as a version of PyTorch writes it."""
    value: dict[str, Any] = {
        "version": version,
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in groups.items()
        },
        "entries": entries,
    }
    if version in ("1.5", "2.0", "2.1"):
        for one in entries:
            one["seq_id"] = one.pop("collective_seq_id")
            one["pg_name"] = one.pop("process_group")[0]
            one.pop("p2p_seq_id")
    else:
        status = {}
        for name in groups:
            mine = [e for e in entries if e["process_group"][0] == name and not e["is_p2p"]]
            done = [e["collective_seq_id"] for e in mine if e["state"] == "completed"]
            status[name] = {
                "last_enqueued_collective": max((e["collective_seq_id"] for e in mine), default=-1),
                "last_started_collective": max(done, default=-1),
                "last_completed_collective": max(done, default=-1),
            }
        value["pg_status"] = status
        value["nccl_version"] = "2.27.5"
    if rank is not None:
        value["rank"] = rank
    return value


def dumped(value: dict[str, Any], form: str = "pickle") -> bytes:
    """A dump as bytes: pickle of protocol 2 or 4, or JSON."""
    if form == "json":
        return json.dumps(value).encode()
    return pickle.dumps(value, protocol=2 if form == "pickle" else 4)


# --- what collectors of logs do with lines ---


def docker(lines: Iterable[str], host: str = "") -> list[str]:
    """Docker's json-file driver."""
    del host
    return [
        json.dumps(
            {"log": line + "\n", "stream": "stderr", "time": f"2026-02-14T11:00:{i % 60:02}.1Z"}
        )
        for i, line in enumerate(lines)
    ]


def kubectl(lines: Iterable[str], host: str = "worker-0") -> list[str]:
    """`kubectl logs --prefix --timestamps`."""
    return [f"[pod/{host}/pytorch] 2026-02-14T11:00:00.123456789Z {line}" for line in lines]


def cri(lines: Iterable[str], host: str = "") -> list[str]:
    """The files of containerd and CRI-O."""
    del host
    return [f"2026-02-14T11:00:00.123456789Z stderr F {line}" for line in lines]


def gcp(lines: Iterable[str], host: str = "worker-0") -> list[str]:
    """`gcloud logging read --format=json`, one entry a line."""
    return [
        json.dumps(
            {
                "insertId": f"x{i}",
                "textPayload": line,
                "resource": {"type": "k8s_container", "labels": {"pod_name": host}},
                "timestamp": f"2026-02-14T11:00:{i % 60:02}.1Z",
            }
        )
        for i, line in enumerate(lines)
    ]


def gcp_document(lines: Iterable[str], host: str = "worker-0") -> list[str]:
    """The same as one array, newest first, as the command writes it."""
    entries = [
        {"textPayload": line, "timestamp": f"2026-02-14T11:{i // 60:02}:{i % 60:02}.1Z",
         "resource": {"labels": {"pod_name": host}}}
        for i, line in enumerate(lines)
    ]  # fmt: skip
    return json.dumps(entries[::-1], indent=2).split("\n")


def cloudwatch(lines: Iterable[str], host: str = "") -> list[str]:
    """`aws logs get-log-events`."""
    del host
    events = [
        {
            "timestamp": 1_780_000_000_000 + i,
            "message": line,
            "ingestionTime": 1_780_000_000_500 + i,
        }
        for i, line in enumerate(lines)
    ]
    return json.dumps({"events": events, "nextForwardToken": "f/1"}, indent=4).split("\n")


def journald(lines: Iterable[str], host: str = "node-a") -> list[str]:
    """`journalctl -o json`."""
    return [
        json.dumps(
            {"MESSAGE": line, "_HOSTNAME": host, "__REALTIME_TIMESTAMP": f"{1780000000 + i}000000"}
        )
        for i, line in enumerate(lines)
    ]


def coloured(lines: Iterable[str], host: str = "") -> list[str]:
    """Behind colours, as Ray writes it."""
    del host
    return [f"\x1b[36m(Worker pid=71)\x1b[0m {line}" for line in lines]


def mpi(lines: Iterable[str], host: str = "") -> list[str]:
    """Behind a time, as many launchers write it."""
    del host
    return [f"2026-02-14 11:00:00,123 {line}" for line in lines]


def plain(lines: Iterable[str], host: str = "") -> list[str]:
    """As it is."""
    del host
    return list(lines)


WRAPS = {
    "plain": plain, "docker": docker, "kubectl": kubectl, "cri": cri, "gcp": gcp,
    "gcp_document": gcp_document, "cloudwatch": cloudwatch, "journald": journald,
    "coloured": coloured, "time": mpi,
}  # fmt: skip
