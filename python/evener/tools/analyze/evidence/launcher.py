"""How ranks ended, as torchrun, mpirun, srun, Ray, Slurm, Kubernetes and the kernel say it.

torchrun's summary is a list of failures, the first one last:
    Root Cause (first observed failure):
    [0]:
      time      : 2024-11-02_03:04:30
      host      : yew
      rank      : 0 (local_rank: 0)
      exitcode  : -9 (pid: 3090)
      traceback : Signal 9 (SIGKILL) received by PID 3090
"""

from __future__ import annotations

import re
import signal

from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import Evidence, Exit, Sign

_RANK = re.compile(r"^\s*rank\s*: (\d{1,6}) \(local_rank: (\d{1,6})\)")
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d{1,6}) \(pid: (\d{1,10})\)")
_HOST = re.compile(r"^\s*host\s*: (\S{1,200})")
_TRACE = re.compile(r"^\s*traceback\s*: (.{1,400})")
_FAILED = re.compile(r"failed \(exitcode: (-?\d{1,6})\) local_rank: (\d{1,6}) \(pid: (\d{1,10})\)")
_RETURN = re.compile(
    r"(?:--local_rank[= ](?P<local>\d{1,5}).{0,400}?)?(?:exits? with return code ?=? ?|exited "
    r"with code "
    r"|[Ee]xit(?: code|code| status):? ?|died with <Signals\.SIG\w+: )(?P<code>-?\d{1,4})\b"
)
_POD = re.compile(r"^Name: +([\w.-]{1,253})\s*$")
_MPI = re.compile(
    r"process rank (\d{1,6}) with PID (\d{1,10}) on node (\S{1,200}) exited on"
    r"(?: signal (\d{1,3})|\s*$)"
)
_SIGNAL = re.compile(r"\s*signal (\d{1,3}) \(")
_SRUN = re.compile(
    r"srun: error: (\S{1,200}): tasks? (\d{1,6})(?:[-,\d]*): (?:(Out Of Memory)|Killed"
    r"|Segmentation "
    r"fault|Aborted|Bus error|Exited with exit code (\d{1,4}))"
)
_WORLD = (
    re.compile(r"\bworld[ _]size[:= ]+(\d{1,6})\b", re.IGNORECASE),
    re.compile(r"--np(?:roc)?[ =](\d{1,6})\b"),
)
_NODES = re.compile(r"--nnodes[ =](\d{1,6})(?![\d:])\b")
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node[ =](\d{1,5})\b")
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "oom-kill",
        re.compile(
            r"(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process (?P<pid>\d{1,10}) "
            r"\((?P<what>[^)]{1,60})\)"
        ),
    ),
    ("oom-kill", re.compile(r"oom-kill:.{0,300}?task=(?P<what>[^,]{1,60}),pid=(?P<pid>\d{1,10})")),
    (
        "oom-kill",
        re.compile(
            r"\boom[-_]kill(?:er)? event(?:s|\(s\))? in "
            r"(?P<what>Step\w*=?\S{0,60})",
            re.IGNORECASE,
        ),
    ),
    ("oom-kill", re.compile(r"(?:Reason|reason)\"?: *\"?(?P<what>OOMKilled)")),
    ("oom-kill", re.compile(r"\bOUT_OF_ME(?:MORY)?\b(?P<what>)")),
    (
        "oom-kill",
        re.compile(
            r"(?:worker|task|actor|node).{0,120}killed .{0,40}due to "
            r".{0,40}(?P<what>out of memory|OOM|memory pressure)",
            re.IGNORECASE,
        ),
    ),
    (
        "cancelled",
        re.compile(r"\*\*\* (?P<what>(?:JOB|STEP) \S{1,40}) ON \S{1,200} CANCELLED AT \S+ \*\*\*"),
    ),
    (
        "worker-died",
        re.compile(
            r"worker process has died\.(?P<what>.{0,300})|A worker died or was killed while "
            r"executing a task.{0,400}?(?:Worker PID: (?P<pid>\d{1,10}))"
        ),
    ),
    (
        "evicted",
        re.compile(
            r"(?:Reason|reason)\"?: *\"?(?P<what>Evicted|Preempt\w*)"
            r"|\bPREEMPTED\b|DUE TO PREEMPTION"
        ),
    ),
    (
        "node-fail",
        re.compile(
            r"\bNODE_FAIL\b|DUE TO NODE FAILURE|NodeNotReady|node .{0,60}not "
            r"responding|TaintManagerEviction"
        ),
    ),
    (
        "segv",
        re.compile(
            r"(?P<what>Fatal Python error: Segmentation fault|\*\*\* SIGSEGV "
            r"received|Caught signal 11|(?<!by signal: )Segmentation fault(?: \(core dumped\))?"
            r"|segfault at [0-9a-f]+)"
        ),
    ),
    (
        "sigbus",
        re.compile(
            r"(?P<what>Fatal Python error: Bus error|Bus error(?: \(core "
            r"dumped\))?|killed by signal: Bus error|\*\*\* SIGBUS received"
            r"|[Uu]nexpected bus error encountered in worker)"
        ),
    ),
    (
        "gpu-lost",
        re.compile(
            r"(?P<what>GPU is lost|fallen off the bus|Unable to determine the "
            r"device handle for GPU ?\S*)"
        ),
    ),
    (
        "hung-task",
        re.compile(
            r"INFO: task (?P<what>\S{1,60}):(?P<pid>\d{1,10}) blocked for more "
            r"than \d+ seconds"
        ),
    ),
    (
        "link-down",
        re.compile(
            r"(?P<what>\b(?:mlx\d\w*|bnxt\w*|ice|i40e|ixgbe|ens?\w*|eth\d+|ib\w*)\b.{0,80}(?:Link "
            r"[Dd]own|NIC Link is Down|link (?:state )?(?:is )?down|lost carrier))"
        ),
    ),
    ("loader-slow", re.compile(r"(?P<what>DataLoader timed out after \d+ seconds)")),
    ("disk-full", re.compile(r"(?P<what>No space left on device|Disk quota exceeded)")),
    (
        "efa",
        re.compile(
            r"(?P<what>FI_PROVIDER=[\"']?efa|FI_EFA_\w+=|/opt/amazon/(?:efa"
            r"|ofi-nccl)|NCCL_NET=[\"']?(?:ofi|AWS))"
        ),
    ),
    (
        "fabric",
        re.compile(
            r"(?P<what>CUDA_ERROR_SYSTEM_NOT_READY|system not yet initialized"
            r"|error(?: code)?[ :=]+802\b|[Ff]abric ?[Mm]anager (?:is )?(?:not "
            r"running|failed|stopped|inactive)|nvidia-fabricmanager\S* (?:failed"
            r"|inactive|dead))"
        ),
    ),
)
_NAMED = (4, 7, 8, 9, 11)
WORDS = (
    b"return code", b"with code", b"xit code", b"xitcode", b"xit status", b"Signals.SIG", b"Name: ",
    b"local_rank:", b"exitcode", b"traceback :", b"host      :", b"Root Cause", b"exited on",
    b"signal ",
    b"srun: error", b"orld size", b"orld_size", b"WORLD_SIZE", b"--nnodes", b"--nproc",
    b"emory: Kill",
    b"oom", b"OOM", b"OUT_OF_ME", b"Evicted", b"reempt", b"PREEMPT", b"CANCELLED", b"NODE",
    b"SIGSEGV",
    b"egmentation", b"signal 11", b"segfault", b"us error", b"SIGBUS", b"killed by signal",
    b"GPU is lost", b"fallen off", b"device handle", b"blocked for more",
    b"ink ", b"NotReady", b"out of memory", b"DataLoader timed", b"No space left", b"quota",
    b"SYSTEM_NOT_READY", b"not yet initialized", b"802", b"abric", b"host   ", b"carrier",
    b"not responding", b"closing signal", b"FAILED", b"unhealthy", b"FI_",
    b"/opt/amazon", b"NCCL_NET=", b"process has died", b"worker died",
)  # fmt: skip
_FIRST = "Root Cause (first observed failure)"
_TERM = re.compile(r"Sending process (\d{1,10}) closing signal (SIG\w+)")


class Launcher:
    """Exits and signs of one file."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._first: dict[str, bool] = {}
        self._hosts: dict[str, str] = {}
        self._exit: dict[str, Exit] = {}
        self._mpi: dict[str, re.Match[str]] = {}
        self._pod = ""
        self._seen: set[tuple[str, str, int]] = set()

    def line(self, line: Line) -> None:
        """Take one line that has one of WORDS."""
        text, key = line.text, line.stream
        if _FIRST in text:
            self._first[key] = True
        elif text.strip().endswith("FAILED"):
            self._first[key] = False
        elif found := _HOST.match(text):
            self._hosts[key] = found[1]
        elif found := _RANK.match(text):
            self._exit[key] = Exit(
                int(found[1]), int(found[2]), -1, self._hosts.get(key, ""), 0, 0, line.where,
                self._first.get(key, False),
            )  # fmt: skip
            self._evidence.add(self._exit[key])
            self._evidence.ranks.setdefault(int(found[1]), line.where)
        elif (found := _CODE.match(text)) and key in self._exit:
            one = self._exit[key]
            code, one.pid = int(found[1]), int(found[2])
            one.signal, one.code = (-code, code) if code < 0 else (0, code)
        elif (found := _TRACE.match(text)) and key in self._exit:
            self._exit[key].text = found[1].strip()
        elif found := _FAILED.search(text):
            code = int(found[1])
            self._evidence.add(
                Exit(-1, int(found[2]), int(found[3]), line.host, max(-code, 0), code, line.where)
            )
        elif found := _POD.match(text):
            self._pod = found[1]
        elif (found := _RETURN.search(text)) and "srun" not in text:
            code = int(found["code"])
            number = code if "Signals" in found[0] else -code if code < 0 else max(code - 128, 0)
            if number in _NAMED:
                local = int(found["local"]) if found["local"] else -1
                self._evidence.add(
                    Exit(-1, local, -1, line.host or self._pod, number, -number, line.where)
                )
        elif found := _MPI.search(text):
            if found[4]:
                self._noticed(found, int(found[4]), line.where)
            else:  # Open MPI 5 breaks the line here
                self._mpi[key] = found
        elif key in self._mpi and (found := _SIGNAL.match(text)):
            self._noticed(self._mpi.pop(key), int(found[1]), line.where)
        elif found := _SRUN.search(text):
            self._task(line, found)
        self._sign(line)
        self._size(text)

    def _noticed(self, found: re.Match[str], number: int, where: int) -> None:
        """What mpirun noticed of a rank."""
        self._evidence.add(
            Exit(int(found[1]), -1, int(found[2]), found[3], number, -number, where, True)
        )

    def _task(self, line: Line, found: re.Match[str]) -> None:
        text = found[0]
        number = next(
            (
                int(n)
                for word, n in (
                    ("Killed", signal.SIGKILL), ("Segmentation", signal.SIGSEGV),
                    ("Aborted", signal.SIGABRT), ("Bus", signal.SIGBUS),
                )
                if word in text
            ),
            0,
        )  # fmt: skip
        code = int(found[4]) if found[4] else -number
        self._evidence.add(
            Exit(int(found[2]), -1, -1, found[1], number, code, line.where, text=text)
        )
        if found[3]:
            self._evidence.add(Sign("oom-kill", text, line.where, found[1], rank=int(found[2])))

    def _sign(self, line: Line) -> None:
        for kind, pattern in _SIGNS:
            if not (found := pattern.search(line.text)):
                continue
            groups = found.groupdict()
            pid = int(groups.get("pid") or (line.pid if kind in ("segv", "sigbus") else -1))
            key = (kind, groups.get("what") or "", pid if pid >= 0 else line.rank)
            if key in self._seen:
                return
            if len(self._seen) < 10_000:
                self._seen.add(key)
            self._evidence.add(
                Sign(kind, line.text.strip()[:300], line.where, line.host or self._pod, pid,
                     line.rank, (groups.get("what") or found[0]).strip())
            )  # fmt: skip
            return

    def _size(self, text: str) -> None:
        world = 0
        for pattern in _WORLD:
            if found := pattern.search(text):
                world = int(found[1])
        nodes, each = _NODES.search(text), _PER_NODE.search(text)
        if nodes and each:
            world = int(nodes[1]) * int(each[1])
        if 0 < world <= 200_000:
            self._evidence.world = max(self._evidence.world, world)
