"""One benchmark under many settings: the table of them, the best and why (`--sweep`).

Settings are environment variables, which NCCL and Gloo read once, so each combination is a run of
its own: the same command without --sweep, started as it is or by `--through` (a launcher). Rounds
go over all combinations in turn, so that a machine that slows down slows all of them; what a
setting differs between its rounds is the noise below which nothing is called better.

`default` tries one group of variables at a time, each beside what is set now, then the best of all
groups together: the product of the groups would take an hour to say the same.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evener.comm.world.ranks import detect
from evener.errors import EvenerError, UsageError

Setting = tuple[tuple[str, str], ...]
BASE: Setting = ()

# What helps most often: streams of NCCL's sockets, channels, algorithm, protocol.
DEFAULTS: tuple[tuple[Setting, ...], ...] = (
    tuple(
        (("NCCL_SOCKET_NTHREADS", threads), ("NCCL_NSOCKS_PERTHREAD", sockets))
        for threads, sockets in (("2", "2"), ("4", "1"), ("4", "4"))
    ),
    tuple((("NCCL_MIN_NCHANNELS", count),) for count in ("4", "16")),
    tuple((("NCCL_ALGO", name),) for name in ("Ring", "Tree")),
    tuple((("NCCL_PROTO", name),) for name in ("Simple", "LL128")),
)
_LIMIT = 600.0


@dataclass
class Tried:
    """A setting and what its rounds gave. Rows: (size, in place) to seconds of each round."""

    setting: Setting
    rows: dict[tuple[int, bool], list[float]] = field(default_factory=dict)
    means: list[float] = field(default_factory=list)
    """Mean bus bandwidth of each round, GB/s."""
    error: str = ""

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.setting) or "as it is now"

    @property
    def gain_base(self) -> float:
        """The best round: what the setting allows when nothing else disturbs it."""
        return max(self.means, default=0.0)

    def time(self, row: tuple[int, bool]) -> float:
        return min(self.rows[row])


def parse(given: Iterable[str], env: Mapping[str, str]) -> list[list[Setting]]:
    """Groups of settings of `NAME=a,b` (their product, one group) and `default`.

    Raises UsageError for what is no setting.
    """
    named: list[list[tuple[str, str]]] = []
    groups: list[list[Setting]] = []
    for text in given:
        if text == "default":
            groups += [
                [one for one in group if not any(name in env for name, _ in one)]
                for group in DEFAULTS
            ]
            continue
        name, equals, values = text.partition("=")
        if not equals or not name.replace("_", "a").isalnum() or not all(values.split(",")):
            raise UsageError(
                f"--sweep {text!r} is no setting", "write NAME=VALUE,VALUE, or default"
            )
        named.append([(name, value) for value in values.split(",")])
    names = [one[0][0] for one in named]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--sweep {name} was given twice", "give all its values at once")
    if named:
        groups.insert(0, list(itertools.product(*named)))
    return [group for group in groups if group]


def run_sweep(
    name: str, given: tuple[str, ...], through: str, rounds: int, argv: list[str], output: str
) -> None:
    """Run all, print the table and the best. Raises EvenerError where nothing ran."""
    if detect().size > 1:
        raise UsageError(
            "--sweep inside a job: settings are read at the start, each needs a job of its own",
            "run it alone and give the launcher to --through",
        )
    groups = parse(given, os.environ)
    command = [*shlex.split(through), sys.executable, "-m", "evener", "bench", name, *rest(argv)]
    tried = {BASE: Tried(BASE)}
    for group in groups:
        tried |= {setting: Tried(setting) for setting in group}
    _say(f"# sweep of {name}: {len(tried)} settings, {rounds} rounds each")
    _say(f"# {shlex.join(command)}")
    _rounds(list(tried.values()), command, rounds)
    if len(groups) > 1:
        together = tuple(pair for group in groups for pair in best_of(tried, group))
        if together not in tried:
            tried[together] = Tried(together)
            _rounds([tried[together]], command, rounds)
    report = verdict(tried)
    _say("#")
    for line in report["text"]:
        _say(line)
    if output:
        try:
            Path(output).write_text(json.dumps(report["document"], indent=1) + "\n", "utf-8")
        except OSError as error:
            raise UsageError(f"-J {output}: {error.strerror}", "name another file") from None


def best_of(tried: dict[Setting, Tried], group: list[Setting]) -> Setting:
    """The group's best setting, BASE where none is better than what is set now beyond noise."""
    best = max((tried[one] for one in group), key=lambda one: one.gain_base)
    return best.setting if _beyond_noise(best, tried[BASE]) else BASE


def _beyond_noise(one: Tried, base: Tried) -> bool:
    """Its worst round is better than the best of what is set now; one round shows no noise."""
    rounds = min(len(one.means), len(base.means))
    return rounds > 1 and min(one.means) > max(base.means)


def rest(argv: list[str]) -> list[str]:
    """The arguments without --sweep, --through, --rounds and -J: what each run gets."""
    kept: list[str] = []
    skip = False
    # The command's own name comes first in argv, behind `bench`.
    words = argv[argv.index("bench") + 2 :] if "bench" in argv else argv
    for word in words:
        flag, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif flag in ("--sweep", "--through", "--rounds", "-J", "--output_file", "--output-file"):
            skip = not equals
        elif not word.startswith("-J"):
            kept.append(word)
    return kept


def _rounds(settings: list[Tried], command: list[str], rounds: int) -> None:
    for number in range(rounds):
        for one in settings:
            if one.error:
                continue
            _run(one, command)
            shown = one.error or f"mean bus bandwidth {one.means[-1]:.4g} GB/s"
            _say(f"# round {number + 1}, {one.name}: {shown}")


def _run(one: Tried, command: list[str]) -> None:
    """One run; what goes wrong is the setting's `error`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        env = {**os.environ, **dict(one.setting)}
        try:
            done = subprocess.run(
                [*command, "-J", str(path)], env=env, capture_output=True, text=True, timeout=_LIMIT
            )
        except subprocess.TimeoutExpired:
            one.error = f"did not end in {_LIMIT:g} s"
            return
        except OSError as error:
            raise EvenerError(
                f"{command[0]}: {error.strerror}", "name a launcher that is there"
            ) from None
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            lines = (done.stderr or done.stdout).strip().splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines or ["no output"]
            one.error = f"status {done.returncode}: {errors[-1][:200]}"
            return
    if done.returncode:
        one.error = f"status {done.returncode}: wrong results or under NCCL_TESTS_MIN_BW"
        return
    one.means.append(found["average_bus_bandwidth"]["bandwidth"])
    for row in found["results"]:
        for side in ("out_of_place", "in_place"):
            seconds = row[side].get("time", row[side].get("cpu_time")) / 1e6
            one.rows.setdefault((row["size"], side == "in_place"), []).append(seconds)


def verdict(tried: dict[Setting, Tried]) -> dict[str, Any]:
    """`text`: lines; `document`: JSON. Raises EvenerError where no setting ran."""
    ran = [one for one in tried.values() if one.means]
    if not ran:
        raise EvenerError(
            f"no setting ran; the first said: {next(iter(tried.values())).error}",
            "run the benchmark without --sweep",
        )
    base = tried[BASE]
    ranked = sorted(ran, key=lambda one: one.gain_base, reverse=True)
    text = [f"# {'mean busbw':>10}  {'rounds differ':>13}  {'vs now':>7}  setting"]
    for one in ranked:
        spread = (max(one.means) - min(one.means)) / max(one.means) if max(one.means) else 0.0
        gain = f"{one.gain_base / base.gain_base:.2f}x" if base.gain_base else ""
        text.append(f"# {one.gain_base:>10.4g}  {spread:>13.0%}  {gain:>7}  {one.name}")
    text += [f"# {'failed':>10}  {'':>13}  {'':>7}  {o.name}: {o.error}" for o in _failed(tried)]
    best = ranked[0]
    why = reason(best, base)
    text += ["#", f"# best: {best.name}", f"# why: {why}"]
    if best is not base and _beyond_noise(best, base):
        text.append("# use: " + " ".join(f"export {n}={v};" for n, v in best.setting))
    document = {
        "version": 1,
        "best": dict(best.setting),
        "why": why,
        "beyond_noise": _beyond_noise(best, base),
        "settings": [
            {
                "setting": dict(one.setting),
                "mean_bus_bandwidth": one.means,
                "error": one.error or None,
                "rows": [
                    {"size": size, "in_place": place, "time_us": [t * 1e6 for t in times]}
                    for (size, place), times in one.rows.items()
                ],
            }
            for one in tried.values()
        ],
    }
    return {"text": text, "document": document}


def _failed(tried: dict[Setting, Tried]) -> list[Tried]:
    return [one for one in tried.values() if not one.means]


def reason(best: Tried, base: Tried) -> str:
    """Why the best is the best, against what is set now: where it wins and by how much."""
    if not base.means:
        return f"what is set now did not run: {base.error}"
    if best is base:
        return "no setting gave more bus bandwidth than what is set now"
    gains = {row: base.time(row) / best.time(row) for row in base.rows if row in best.rows}
    wins = sum(gain > 1 for gain in gains.values())
    size, place = max(gains, key=lambda row: gains[row])
    most = gains[(size, place)]
    text = (
        f"{best.gain_base / base.gain_base:.2f} times the mean bus bandwidth of now; faster in "
        f"{wins} of {len(gains)} rows, most at {size} bytes {'in' if place else 'out of'} place "
        f"({most:.2f} times)"
    )
    losses = [row for row, gain in gains.items() if gain < 0.95]
    if losses:
        sizes = sorted({row[0] for row in losses})
        text += f"; slower by 5% or more from {sizes[0]} to {sizes[-1]} bytes in {len(losses)} rows"
    if not _beyond_noise(best, base):
        text += (
            "; but it may be chance: the rounds overlap, or there is one only; try more --rounds"
        )
    return text


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
