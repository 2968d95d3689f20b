"""`horovod.run(func, ...)`: a function as a job, its results by rank.

The job is `evener launch ... python -m evener.horovod.runner.function_task`. Its ranks connect to
this process for the function, and again to bring what it returned or raised; channel.py says who
may connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from evener.base import interfaces, settings
from evener.errors import EvenerError
from evener.horovod.common import pickling
from evener.horovod.runner import channel
from evener.tools.launch import batch
from evener.tools.launch.hosts import Host, is_local, parse_hostfile, parse_hosts

# Programs look for these words.
FAILED = "Horovod detected that one or more processes exited with non-zero status"


class RunError(EvenerError, RuntimeError):
    """The function raised on a rank (its exception is `__cause__`), or the job failed."""


class _Exchange:
    """Gives the function to whoever knows the key, and takes results and errors."""

    def __init__(self, work: bytes, addresses: Sequence[str]) -> None:
        self._key = secrets.token_bytes(16)
        self._work = work
        self.results: dict[int, Any] = {}
        self.errors: dict[int, tuple[str, Any]] = {}
        self._listener = channel.Listener(addresses, self._key, self._serve)

    def address(self) -> str:
        """For EVENER_RUN: [address, port] of each place where it listens, and the key."""
        return json.dumps([self._listener.places, self._key.hex()])

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        kind, rank, data = connection.recv()
        if kind == "work":
            connection.send_bytes(self._work)
        elif kind == "result":
            self.results[rank] = pickling.loads(data)
            connection.send_bytes(b"taken")
        else:
            self.errors.setdefault(rank, data)
            connection.send_bytes(b"taken")


def listening_addresses(named: Sequence[Host] | None, nics: str) -> list[str]:
    """This host's addresses at which ranks on the hosts `named` (None: not known yet) reach it.

    nics: the interfaces of the job, comma-separated, or "". Loopback where all ranks are here.
    """
    if named is not None and all(is_local(host.name) for host in named):
        return ["127.0.0.1"]
    own = interfaces.addresses()
    if chosen := [address for name, address in own if name in nics.split(",")]:
        return chosen
    remote = [host.name.strip("[]").rpartition("@")[2] for host in named or []]
    ways = [interfaces.address_to(name) for name in remote if not is_local(name)]
    if found := list(dict.fromkeys(way for way in ways if way)):
        return found
    # Hosts that a script names later may come from anywhere.
    return [address for _, address in own if not interfaces.is_loopback(address)] or ["127.0.0.1"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on num_proc ranks; gives what they returned, in rank order.

    The function and its results must be picklable; with cloudpickle installed, lambdas and what is
    defined in `__main__` are. The arguments are those of `horovodrun`; in an elastic job the first
    min_num_proc results are given. executable: the ranks' Python.

    Raises ValueError for arguments that contradict each other, RunError where a rank's function
    raised (with the rank, its traceback, and the exception as the cause) or the job failed.
    """
    del disable_cache  # hosts are checked at every start
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    for old, new in (("np", np), ("min_np", min_np), ("max_np", max_np)):
        if new is not None:
            full = old.replace("np", "num_proc")
            warnings.warn(f"{old} is deprecated, use {full}", DeprecationWarning, stacklevel=2)
    num_proc = num_proc if np is None else np
    min_num_proc = min_num_proc if min_np is None else min_np
    max_num_proc = max_num_proc if max_np is None else max_np
    nics = ",".join(network_interfaces or ([network_interface] if network_interface else []))
    elastic = any(v is not None for v in (min_num_proc, max_num_proc, host_discovery_script))
    options = {
        "-np": num_proc,
        "--min-np": min_num_proc,
        "--max-np": max_num_proc,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "-H": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "-p": ssh_port,
        "-i": ssh_identity_file,
        "--output-dir": output_filename,
        "--mpi-args": mpi_args,
        "--network-interface": nics or None,
    }
    command = [sys.executable, "-m", "evener", "launch", "--horovod"]
    for option, value in options.items():
        if value is not None:
            command.append(f"{option}={value}" if option.startswith("--") else option)
            command += [] if option.startswith("--") else [str(value)]
    if cooldown_range:
        command += ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    command += ["--mpi"] * bool(use_mpi) + ["--torchrun"] * (bool(use_gloo) and not elastic)
    command += ["-v"] * bool(verbose) + ["-x", settings.EVENER_RUN.name]
    command += [executable or sys.executable, "-m", "evener.horovod.runner.function_task"]
    named: list[Host] | None = None
    if hostfile is not None:
        named = parse_hostfile(Path(hostfile))
    elif host_discovery_script is None:
        named = parse_hosts(hosts) if hosts else batch.hosts(os.environ) or [Host("localhost", 1)]
    exchange = _Exchange(_work(func, args, kwargs or {}), listening_addresses(named, nics))
    try:
        status = call(command, {**os.environ, settings.EVENER_RUN.name: exchange.address()})
    finally:
        exchange.close()
    if status != 0 and exchange.errors:
        rank, (text, data) = next(iter(exchange.errors.items()))  # others follow from the first
        cause = None
        with contextlib.suppress(Exception):
            cause = pickling.loads(data) if data else None
        raise RunError(f"{FAILED}: the function raised on rank {rank}:\n{text.rstrip()}") from cause
    if status != 0:
        raise RunError(f"{FAILED}: the job ended with status {status}", "see its output above")
    wanted = min_num_proc if elastic and min_num_proc else num_proc
    if elastic:
        wanted = min(wanted, len(exchange.results))
    missing = [rank for rank in range(wanted) if rank not in exchange.results]
    if missing:
        raise RunError(f"ranks {missing} ended well but brought no result", "look at their output")
    return [exchange.results[rank] for rank in range(wanted)]


def _work(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        import cloudpickle  # noqa: F401
    except ImportError as error:
        if getattr(func, "__module__", "") == "__main__":
            raise RunError(
                f"{func} is defined in __main__, which the ranks cannot import",
                "install cloudpickle, or put the function into a module",
            ) from error
    function = pickling.dumps((func, tuple(args), dict(kwargs)))
    return pickling.dumps({"path": list(sys.path), "function": function})


def call(command: Sequence[str], env: Mapping[str, str]) -> int:
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
