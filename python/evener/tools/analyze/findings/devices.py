"""Errors of GPUs: Xid and SXid of the driver, ECC, and what `nvidia-smi -q` shows."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.evidence.kernel import FOLLOWS as CLEAN_UP
from evener.tools.analyze.evidence.kernel import meaning
from evener.tools.analyze.evidence.records import Xid
from evener.tools.analyze.findings.base import DEVICE, LIBRARY, RAISED, Finding, check
from evener.tools.analyze.findings.who import of_bus, of_process
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import names

_WHO = {
    "memory": "Its memory is at fault, a hardware error",
    "link": "That is hardware or the NVLink fabric",
    "bus": "It is lost to the system, a hardware fault",
    "firmware": "Its firmware stopped",
    "gpu": "That is an error of the GPU",
}


@check(
    {
        "cause.gpu": "an error of a GPU or of NVLink that the driver reports (Xid)",
        "cause.gpu-program": "a program's own illegal access on a GPU (Xid 13, 31, 43)",
        "cause.gpu-state": "a GPU that nvidia-smi shows in an error state",
    }
)
def xids(picture: Picture) -> Iterator[Finding]:
    """The driver's errors, the first that is one of the hardware as the cause."""
    all_ = picture.run.evidence.xids
    real = [x for x in all_ if x.code not in CLEAN_UP]
    hard = [x for x in real if x.switch or meaning(x.code).who != "program"]
    if hard:
        yield _hardware(picture, hard, all_)
    elif real:
        yield _program(picture, real)
    yield from _states(picture)
    yield from _fabric(picture)


def _fabric(picture: Picture) -> Iterator[Finding]:
    signs = [s for s in picture.run.evidence.signs if s.kind == "fabric"]
    if not signs:
        return
    of = f" (GPU {signs[0].what})" if signs[0].what.count(":") == 1 else ""
    yield Finding(
        "network.fabric-manager",
        "problem",
        f"the Fabric Manager has not set up NVLink{of}: {signs[0].what or signs[0].text[:100]}",
        "On machines with NVSwitches the GPUs are of use only when the Fabric Manager has "
        "finished. It "
        "does not run, failed, or is of another version than the driver.",
        "measured",
        tuple(s.where for s in signs[:5]),
        "Start nvidia-fabricmanager with the version of the driver; if it fails, reset all GPUs "
        "of the "
        "host or reboot.",
        "systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A4 Fabric",
        "Fabric State: Completed, Status: Success.",
        root=LIBRARY + 2,
    )


def _place(picture: Picture, xid: Xid) -> str:
    rank = of_process(picture, xid.host, xid.pid) if xid.pid > 0 else -1
    rank = rank if rank >= 0 else of_bus(picture, xid.bus, xid.host)
    text = f"the NVSwitch at {xid.bus}" if xid.switch else f"the GPU at {xid.bus}"
    text += f" of {xid.host}" if xid.host else ""
    return text + (f" (rank {rank})" if rank >= 0 else "")


def _hardware(picture: Picture, hard: list[Xid], all_: list[Xid]) -> Finding:
    # An uncorrectable error says more than the row that is remapped for it.
    first = hard[0]
    same = [x for x in hard if x.bus == first.bus and x.host == first.host]
    main = max(
        same[:4], key=lambda x: x.code in (48, 79, 94, 95, 140, 171) and x.code != first.code
    )
    what = meaning(main.code)
    word = "SXid" if main.switch else "Xid"
    place = _place(picture, main)
    place = place if " (rank" in place or main is first else _place(picture, first)
    codes = ", ".join(f"Xid {c}" for c in dict.fromkeys(x.code for x in same))
    others = sorted({x.bus for x in all_ if x.bus != first.bus})
    follow = (
        f" What {names(others)} report afterwards follows from it, and so do the programs' errors."
        if others
        else " The programs' errors follow from it."
    )
    text = f": {main.text[:120]}" if main.text else ""
    kind = " (ECC)" if what.who == "memory" else ""
    return Finding(
        "cause.gpu",
        "problem",
        f"{word} {main.code} on {place}: {what.text}"
        if not main.switch
        else f"{word} {main.code} on {place}: {main.text[:80] or 'an NVLink error'}",
        f"The driver reports {codes}{kind}{text}. {_WHO.get(what.who, _WHO['gpu'])}; the program "
        f"is not the cause.{follow}",
        "measured",
        tuple(x.where for x in [main, *hard][:5]),
        what.do + ".",
        f"nvidia-smi -q -i {main.bus}; nvidia-smi nvlink -e; dmesg -T | grep -i xid",
        "No new Xid under load (dcgmi diag -r 3).",
        root=DEVICE,
    )


def _program(picture: Picture, real: list[Xid]) -> Finding:
    first = real[0]
    what = meaning(first.code)
    return Finding(
        "cause.gpu-program",
        "problem",
        f"Xid {first.code} on {_place(picture, first)}: {what.text}",
        f"The driver reports {first.text[:160] or 'no more'}. This code is a program's error as a "
        "rule, not the hardware's: a kernel reads or writes where it may not.",
        "measured",
        tuple(x.where for x in real[:5]),
        "Find the kernel: run that rank with blocking launches or compute-sanitizer. If the same "
        "program fails on one GPU only, test that GPU.",
        "CUDA_LAUNCH_BLOCKING=1 COMMAND; compute-sanitizer COMMAND",
        "The Python line that launches the kernel.",
        root=RAISED,
    )


def _states(picture: Picture) -> Iterator[Finding]:
    signs = [s for s in picture.run.evidence.signs if s.kind in ("gpu-state", "gpu-lost")]
    if not signs or picture.run.evidence.xids:
        return
    first = signs[0]
    of = f" at {first.what}" if first.kind == "gpu-state" else ""
    rank = of_bus(picture, first.what, first.host) if of else -1
    yield Finding(
        "cause.gpu-state",
        "problem",
        f"a GPU{of}{f' (rank {rank})' if rank >= 0 else ''} is in an error state: "
        f"{first.text[:100]}",
        "; ".join(dict.fromkeys(s.text[:120] for s in signs[:5])) + ". That is the hardware or the "
        "driver, not the program.",
        "measured",
        tuple(s.where for s in signs[:5]),
        "Drain the node and reset the GPU or reboot; replace it if the state comes again.",
        "nvidia-smi -q; dmesg -T | grep -i xid; dcgmi diag -r 3",
        "nvidia-smi -q shows no error and no pending remapping.",
        root=DEVICE,
    )
