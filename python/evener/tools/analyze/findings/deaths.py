"""A run that failed: which process ended first for a reason of its own.

Of the errors of sixty-four ranks, sixty-three follow: a peer is gone, a store does not answer, a
watchdog gives up. What is left is the root; where several are left, the earliest, and where their
times do not tell, all of them are named.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from evener.tools.analyze.evidence.records import NO_OOM, Evidence, Exit, Raised, Sign
from evener.tools.analyze.findings.base import (
    CRASHED,
    ENDED,
    KILLED,
    LIBRARY,
    RAISED,
    Finding,
    check,
)
from evener.tools.analyze.findings.causes import meant
from evener.tools.analyze.findings.who import of_process, ranks, silent, world_size
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import names

# Errors that only tell that another process ended or did not answer.
_FOLLOWS = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused|aborted)|[Bb]roken pipe|recv(?:Value"
    r"|Bytes) failed"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|[Ww]atchdog"
    r"|[Tt]imed out (?:waiting|after)|[Tt]ime(?:d )?out|ChildFailedError|SignalException|SIGTERM"
    r"|KeyboardInterrupt|has been shut down|failed to pass monitoredBarrier|Socket (?:is )?closed"
    r"|another (?:rank|process)|peer (?:has )?(?:exited|closed|gone)|store->(?:get|wait)"
    r"|DistStoreError"
    r"|NCCL operation (?:timed out|failed)|unhandled system error|ncclInternalError|internal error"
    r"|ActorDiedError|RayActorError|WorkerCrashedError|worker died|The actor died|EOFError"
    r"|killed by signal: (?:Terminated|Aborted|Hangup)|\(code: 143\)|wait timeout|SystemExit"
    r"|DistNetworkError|Rendezvous|not all ranks|CalledProcessError|NCCL [Ee]rror(?: \d+:| in:|:)"
    r"|server socket has failed to"
)
_CUDA = re.compile(r"CUDA error|CUDA out of memory|cuda runtime error|HIP error|CUBLAS|CUDNN")
_SHM = re.compile(
    r"shared memory\(shm\)|shared memory.*No space left|/torch_\S+.*(?:No space left|\(28\))"
)
_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ([\d, ]{1,200})\) "
    r"(is killed by signal: \w[\w ]{0,40}\w|exited unexpectedly)"
)
_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory")
_ECC = re.compile(r"uncorrectable ECC|NVLink.*uncorrectable|uncorrectable NVLink|GPU is lost", re.I)
_NOT_READY = re.compile(r"system not yet initialized|SYSTEM_NOT_READY|error(?: code)?:? 802")
_LAUNCH = re.compile(
    r"unspecified launch failure|misaligned|illegal (?:memory|instruction)|device-side assert"
)
_SIGNALS = {
    2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV",
    15: "SIGTERM",
}  # fmt: skip


def roots(evidence: Evidence) -> list[Raised]:
    """Exceptions that follow from no other process, the likely first one first."""
    # Another reader knows more of these lines.
    told = {d.where for d in evidence.desyncs} | {m.where for m in evidence.meetings}
    own = [
        r
        for r in evidence.raised
        if r.where not in told
        if not _FOLLOWS.search(f"{r.name}: {r.text}") or _MEMORY.search(f"{r.name}: {r.text}")
    ]
    waited = {w.rank: w for w in evidence.waits}
    earlier = [
        r
        for r in own
        if r.rank not in waited or _before(r, waited[r.rank].where, waited[r.rank].time)
    ]
    return sorted(earlier, key=lambda r: (r.time if r.time >= 0 else 1e18, r.where))


def _before(raised: Raised, where: int, time: float) -> bool:
    if raised.time >= 0 and time >= 0:
        return raised.time <= time
    return raised.where < where if raised.where >> 40 == where >> 40 else True


@check(
    {
        "cause.exception": "an exception in one rank, from which the errors of the others follow",
        "cause.gpu-memory": "a program that asks for more GPU memory than there is",
        "cause.gpu-ecc": "a CUDA error that means broken hardware",
    }
)
def raised(picture: Picture) -> Iterator[Finding]:
    """The root exception."""
    evidence = picture.run.evidence
    found = roots(evidence)
    if not found:
        return
    by_kind: dict[tuple[str, str], list[Raised]] = defaultdict(list)
    for one in found:
        by_kind[one.name, re.sub(r"\d+", "#", one.text)[:80]].append(one)
    first = found[0]
    same = by_kind[first.name, re.sub(r"\d+", "#", first.text)[:80]]
    who = sorted({r.rank for r in same if r.rank >= 0})
    if not who and not evidence.ranks and not any(e.local >= 0 for e in evidence.exits):
        who = sorted({r.task for r in same if r.task >= 0})
    told = [e for e in evidence.exits if e.first and e.rank >= 0 and e.code == 1]
    by_launcher = not who and not evidence.ranks_named and len(by_kind) == 1 and len(told) == 1
    if by_launcher:
        who = [told[0].rank]
    size = world_size(picture)
    text = f"{first.name.rsplit('.', 1)[-1]}: {first.text}".strip(": ")
    at = f" at {first.line}" if first.line else ""
    title, note = _title(first, who, size, text, at)
    others = [k for k in by_kind if k != (first.name, re.sub(r"\d+", "#", first.text)[:80])]
    timed = all(r.time >= 0 for r in found)
    detail = f"{text[:300].rstrip('. ')}.{note}"
    if others:
        also = names(sorted({by_kind[k][0].name.rsplit(".", 1)[-1] for k in others}))
        how = "earlier by the lines' times" if timed else "first in the files; no times tell more"
        detail += f" Others raised {also}; this one is {how}."
    if by_launcher:
        detail += (
            f" The launcher calls {ranks(who)} the first failure; no line of it names its rank."
        )
    follows = len(evidence.raised) - len(found)
    if follows > 0:
        detail += f" The {follows} other tracebacks only tell that a peer was gone or timed out."
    waiting = [w.rank for w in evidence.waits if w.rank not in who]
    if waiting:
        detail += (
            f" {ranks(waiting).capitalize()} then waited for it until their watchdogs gave up."
        )
    whole = f"{first.name}: {first.text}"
    id, root, do, command = (
        "cause.exception",
        RAISED,
        "Mend that line; the errors of the other ranks go with it.",
        "",
    )
    if _NOT_READY.search(whole):
        id, root = "network.fabric-manager", LIBRARY + 2
        title = f"{title}: the Fabric Manager does not run, or the GPUs wait for it"
        do = (
            "Start nvidia-fabricmanager with the version of the driver; if it fails, reset all "
            "GPUs "
            "of the host or reboot."
        )
        command = "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A4 Fabric"
    elif _ECC.search(whole):
        id, root = "cause.gpu-ecc", KILLED + 5
        do = (
            "Reset that GPU or reboot the node; replace it if the error comes again. The "
            "program is not the "
            "cause."
        )
        command = "nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg -T | grep -i xid"
    elif _MEMORY.search(whole):
        id = "cause.gpu-memory"
        do = (
            "Use less on that GPU: a smaller batch, recomputation, sharding, or see who else "
            "uses it."
        )
        command = "nvidia-smi; export PYTORCH_ALLOC_CONF=expandable_segments:True"
    elif _SHM.search(whole):
        id = "host.shm-full"
        title = f"/dev/shm is full or too small: {title}"
        do = (
            "Give the container more (Docker: --shm-size or --ipc=host; Kubernetes: an emptyDir "
            "with medium Memory at /dev/shm), and remove files that no process uses."
        )
        command = "df -h /dev/shm; ls -la /dev/shm"
    elif worker := _WORKER.search(whole):
        of = f" of {ranks(who)}" if who else ""
        end = worker[2].replace("is killed", "was killed")
        title = f"a data loader's worker{of} {end} (process {worker[1]})"
        detail += " The rank itself only noticed."
        do = (
            "See why that worker ended. With num_workers=0 its code runs in the rank, and an error "
            "shows. A segmentation fault is in native code of the dataset; an end without a word "
            "is mostly host memory or /dev/shm."
        )
        command = (
            "dmesg -T | grep -iE 'oom|killed process|segfault'; df -h /dev/shm; "
            "export PYTHONFAULTHANDLER=1"
        )
    elif _LAUNCH.search(whole):
        do = (
            "The line shown may be a later one: errors of kernels arrive late. Look for an Xid "
            "in the kernel's log first; if there is none, run once with blocking "
            "launches."
        )
        command = "dmesg -T | grep -i xid; CUDA_LAUNCH_BLOCKING=1 COMMAND"
    elif known := meant(whole):
        detail += f" It means: {known.title}. {known.detail}"
        do, command = known.do, known.command
    if _CUDA.search(whole) and any(x for x in evidence.xids):
        root, command = CRASHED, ""
        do = "See the driver's error first."
    yield Finding(
        id,
        "problem",
        title,
        detail,
        "measured" if (len(by_kind) == 1 or timed) and not by_launcher else "inferred",
        tuple(r.where for r in same[:5]),
        do,
        command,
        "That rank goes on.",
        root=root,
    )


def _title(first: Raised, who: list[int], size: int, text: str, at: str) -> tuple[str, str]:
    short = text.rstrip(". ") if len(text) <= 120 else text[:117] + "..."
    everyone = 0 < size <= len(who)
    if len(who) > 1 and (everyone or len(who) > 4):
        note = ": the program, its data or the machine, not one rank" if everyone else ""
        return f"{len(who)} ranks raised {short}{at}", f" It is the same on all of them{note}."
    if who:
        return f"{ranks(who)} raised {short}{at}", ""
    host = f" on {first.host}" if first.host else ""
    return f"a process{host} raised {short}{at}", " No line names its rank."


def killed(evidence: Evidence) -> tuple[list[Sign], list[Exit]]:
    """What the system killed for memory: its own words, and exits by SIGKILL."""
    signs = [s for s in evidence.signs if s.kind == "oom-kill"]
    exits = [e for e in evidence.exits if e.signal == 9 or e.code == 137]
    return signs, exits


@check(
    {
        "cause.killed": "a process that the system killed, mostly for host memory",
        "cause.host-gone": "a host or pod that was taken away, or failed",
        "cause.worker-died": "a worker of Ray that died, and nothing here says why",
        "cause.stopped": "a launcher that was told to end, with no other reason in the files",
        "cause.crash": "a process that crashed (segmentation fault, bus error)",
        "host.link-down": "a network link of a host that went down",
        "host.hung-task": "a process stuck in the kernel, as on a storage that does not answer",
    }
)
def ended(picture: Picture) -> Iterator[Finding]:
    """Processes that ended by a signal, and hosts that went away."""
    evidence = picture.run.evidence
    signs, exits = killed(evidence)
    # Once one process is gone, a launcher kills the others: with SIGKILL too, after a while.
    first = [e for e in exits if e.first] or exits[:1]
    signals = [e for e in evidence.exits if e.first and e.signal not in (9, 0)]
    if signs or (exits and not signals):
        yield _killed(picture, signs, first)
    gone = [s for s in evidence.signs if s.kind in ("node-fail", "evicted")]
    if gone:
        host = f" ({gone[0].host})" if gone[0].host else ""
        what = "was preempted or evicted" if gone[0].kind == "evicted" else "failed"
        yield Finding(
            "cause.host-gone",
            "problem",
            f"a host or pod{host} {what}",
            f"It says: {gone[0].text[:200]}. The ranks there ended with it; the others only "
            f"notice.",
            "measured",
            tuple(s.where for s in gone[:5]),
            "See the scheduler's events for that host; start again without it, from a checkpoint.",
            "scontrol show node NODE; kubectl describe node NODE; kubectl get events",
            "All hosts stay for the whole run.",
            root=KILLED,
        )
    yield from _crashed(picture)
    yield from _worker(evidence)
    yield from _system(picture)
    terms = [r for r in evidence.raised if "SignalException" in r.name and "15" in r.text]
    cancelled = [s for s in evidence.signs if s.kind == "cancelled"]
    stopped = cancelled or terms
    if stopped and not evidence.waits and not evidence.exits and not roots(evidence):
        yield Finding(
            "cause.stopped",
            "warning",
            f"Slurm cancelled {cancelled[0].what.lower()}, and no line says why"
            if cancelled
            else "the job was ended from outside: its launcher got SIGTERM",
            f"{stopped[0].text[:200]}. A scheduler, a time limit, another node's launcher or a "
            f"person "
            "did; what ended first is not in these files.",
            "measured",
            tuple(r.where for r in stopped[:3]),
            "Look at the scheduler's record of the job, and at the logs of the other nodes.",
            "sacct -j JOB -o State,ExitCode,Reason; kubectl describe pod POD",
            "The reason for the signal.",
            root=ENDED + 5,
        )


def _killed(picture: Picture, signs: list[Sign], exits: list[Exit]) -> Finding:
    evidence = picture.run.evidence
    who = {e.rank for e in exits if e.rank >= 0}
    if not who:
        by_pid = {e.pid: e.rank for e in evidence.exits if e.rank >= 0}
        who |= {by_pid[e.pid] for e in exits if e.pid in by_pid}
    for sign in signs:
        rank = sign.rank if sign.rank >= 0 else of_process(picture, sign.host, sign.pid)
        if rank >= 0:
            who.add(rank)
    if not who and evidence.seen and len(alone := silent(picture)) == 1:
        who.add(alone[0])
    hosts = sorted({s.host for s in signs if s.host} | {e.host for e in exits if e.host})
    where = tuple([s.where for s in signs[:3]] + [e.where for e in exits[:3]])
    of = f" on {names(hosts)}" if hosts else ""
    pids = sorted({s.pid for s in signs if s.pid > 0} | {e.pid for e in exits if e.pid > 0})
    subject = ranks(who) if who else f"process {pids[0]}" if pids else "a process"
    was = "were" if len(who) > 1 else "was"
    sure = bool(signs)
    why = (
        "no host memory was left (OOM)"
        if sure
        else "SIGKILL, mostly because no host memory was left"
    )
    detail = f"{signs[0].text[:240]}. " if signs else "The launcher reports signal 9 (SIGKILL). "
    if not sure and exits and all(exit_.text == NO_OOM for exit_ in exits):
        return Finding(
            "cause.killed",
            "problem",
            f"{subject} {was} killed{of}: SIGKILL, and not for memory",
            f"{detail}{NO_OOM.capitalize()}, so another program sent it: a user, the batch "
            "system, or a health check.",
            "measured",
            where,
            "See who ends processes there: the batch system's record of the job, other users.",
            "sacct -j JOB -o State,ExitCode,Reason; last; ausearch -sc kill",
            "No process ends by a signal.",
            root=KILLED,
        )
    detail += (
        "The kernel's out-of-memory killer or a container's limit ends a process so, without a "
        "word "
        "of its own. The errors of the other ranks follow from it."
    )
    return Finding(
        "cause.killed",
        "problem",
        f"{subject} {was} killed{of}: {why}",
        detail,
        "measured" if sure else "inferred",
        where,
        "Look at the kernel's log and the memory limit of job or container (host memory, not the "
        "GPU's). Data loader workers, a growing cache or checkpoints in memory are the usual ones.",
        "dmesg -T | grep -iE 'out of memory|oom'; kubectl describe pod POD | grep -A3 'Last "
        "State'; "
        "sacct -j JOB -o State,MaxRSS,ReqMem",
        "The memory in use stays level.",
        root=KILLED,
    )


def _crashed(picture: Picture) -> Iterator[Finding]:
    evidence = picture.run.evidence
    segv = [s for s in evidence.signs if s.kind == "segv"]
    bus = [s for s in evidence.signs if s.kind == "sigbus"]
    exits = [e for e in evidence.exits if e.signal in (4, 7, 8, 11)]
    if not segv and not bus and not exits:
        return
    fabric = [s for s in evidence.signs if s.kind == "mnnvl"]
    number = 7 if (bus and not segv) or (exits and exits[0].signal == 7) else 11
    number = exits[0].signal if exits and not segv and not bus else number
    name = {7: "bus error (SIGBUS)", 11: "segmentation fault (SIGSEGV)"}.get(
        number, f"signal {number} ({_SIGNALS.get(number, '?')})"
    )
    who = {e.rank for e in exits if e.rank >= 0} | {s.rank for s in segv + bus if s.rank >= 0}
    for sign in segv + bus:
        rank = of_process(picture, sign.host, sign.pid) if sign.pid > 0 else -1
        if rank >= 0:
            who.add(rank)
    pids = sorted({s.pid for s in segv + bus if s.pid > 0})
    subject = (
        ranks(who)
        if who
        else f"{len(pids)} processes ({', '.join(map(str, pids[:4]))})"
        if len(pids) > 1
        else "a process"
    )
    where = tuple([s.where for s in (segv + bus)[:4]] + [e.where for e in exits[:3]])
    if number == 7:
        yield Finding(
            "host.shm-full",
            "problem",
            f"{subject} died of a bus error (SIGBUS): /dev/shm is full or too small",
            "A data loader's worker or NCCL wrote to shared memory that has no page left. "
            "Containers "
            "get 64 MB where nothing else is asked for.",
            "inferred",
            where,
            "Give the container more (Docker: --shm-size or --ipc=host; Kubernetes: an emptyDir "
            "with "
            "medium Memory at /dev/shm).",
            "df -h /dev/shm",
            "No bus error.",
            root=KILLED,
        )
        return
    if fabric:
        masks = sorted(
            set(re.findall(r"healthMask (0x[0-9a-fA-F]+)", " ".join(s.text for s in fabric)))
        )
        sizes = sorted(set(re.findall(r"cliqueSize (\d+)", " ".join(s.text for s in fabric))))
        mask = f" The fabric reports healthMask {', '.join(masks)}" if masks else ""
        if masks == ["0xaa"]:
            mask += " (every pair of bits says: not degraded, healthy)"
        clique = f" with a clique of {', '.join(sizes)} ranks" if sizes else ""
        yield Finding(
            "cause.mnnvl",
            "problem",
            f"{subject} crashed ({name}) in the set-up of multi-node NVLink (MNNVL)",
            f"MNNVL was set up{clique}, and no line says that the set-up ended.{mask}.",
            "inferred",
            (*where, *(s.where for s in fabric[:2])),
            "Go round it, and see whether the crash goes; then bring NCCL, driver and IMEX to "
            "the same "
            "and a newer version on all nodes, and check the fabric.",
            "export NCCL_MNNVL_ENABLE=0; nvidia-smi -q | grep -A6 Fabric; nvidia-imex-ctl -N",
            "No crash without MNNVL: then it is the fabric or NCCL's set-up of it.",
            root=LIBRARY_CRASH,
        )
        return
    yield Finding(
        "cause.crash",
        "problem",
        f"{subject} crashed: {name}",
        "Native code failed there: an extension, a driver or a library. The other ranks only "
        "notice "
        "that it is gone.",
        "measured",
        where,
        "Get the native stack of that process.",
        "export PYTHONFAULTHANDLER=1; ulimit -c unlimited; gdb -p PID -batch -ex 'thread apply "
        "all bt'",
        "A stack that names the library.",
        root=CRASHED,
    )


LIBRARY_CRASH = CRASHED + 5


def _worker(evidence: Evidence) -> Iterator[Finding]:
    """A worker of Ray that is gone: Ray lists what it may have been, and does not know."""
    died = [s for s in evidence.signs if s.kind == "worker-died"]
    if not died:
        return
    pid = next((s.pid for s in died if s.pid > 0), -1)
    who = f" (process {pid})" if pid > 0 else ""
    limit = " It may have passed its pod's memory limit." if "memory limit" in died[0].text else ""
    yield Finding(
        "cause.worker-died",
        "problem",
        f"a worker process of Ray died{who}; what ended it is not in these lines",
        f"{died[0].what[:240].strip() or died[0].text[:240]}.{limit} Ray only sees that the "
        "connection to it ended: a kill for host memory, a crash, or an end from outside.",
        "measured",
        tuple(s.where for s in died[:5]),
        "Look at that host's kernel log and at the worker's own files, which hold its last words.",
        "dmesg -T | grep -iE 'killed process|oom|segfault|xid'; "
        "ls -t /tmp/ray/session_latest/logs/worker-*.err | head; "
        "kubectl describe pod POD | grep -A3 'Last State'",
        "The signal or the exception that ended it.",
        root=ENDED + 5,
    )


def _system(picture: Picture) -> Iterator[Finding]:
    evidence = picture.run.evidence
    troubled = bool(evidence.waits or evidence.raised or evidence.exits or picture.run.ended)
    down = [s for s in evidence.signs if s.kind == "link-down"]
    if down:
        host = f"{down[0].host}: " if down[0].host else ""
        yield Finding(
            "host.link-down",
            "problem" if troubled else "warning",
            f"{host}a network link went down ({down[0].what[:60]})",
            f"{down[0].text[:200]}. What goes over it waits or fails.",
            "measured",
            tuple(s.where for s in down[:5]),
            "Look at the cable, the transceiver and the switch's port.",
            "ip -s link; ethtool -S IF; journalctl -k | grep -i link",
            "The link stays up.",
            root=KILLED if troubled else 0,
        )
    stuck = [s for s in evidence.signs if s.kind == "hung-task"]
    if stuck:
        rank = of_process(picture, stuck[0].host, stuck[0].pid)
        who = f"rank {rank}" if rank >= 0 else f"process {stuck[0].pid} ({stuck[0].what})"
        yield Finding(
            "host.hung-task",
            "problem",
            f"{who} is stuck in the kernel, mostly on storage that does not answer",
            f"{stuck[0].text[:200]}.",
            "measured",
            tuple(s.where for s in stuck[:5]),
            "Look at what it waits for: a network file system, a disk, a driver.",
            "cat /proc/PID/stack; cat /proc/PID/wchan; dmesg -T | tail -50",
            "No task is blocked.",
            root=CRASHED,
        )
