"""Run upstream Horovod's examples, as they are, in a simulated two-node cluster.

`make upstream-horovod DIR=... ARGS=--examples`. Data sets that they would download are generated:
pictures of noise in the files and folders in which the data sets come. The static examples are
started as a launcher on two hosts would, the elastic ones by `evener horovodrun` from one host on
both. What they are given makes them short, and is all that is changed. Examples of TensorFlow 2
that call what Keras 3 has not (`optimizer.variables()`) get Keras 2: the package tf_keras.

Keras checks the MNIST that it has downloaded by a digest, so made pictures cannot lie where it
looks. Such an example is run by this file (`with_pictures`): Keras's loader gets scikit-learn's
digits, of 8 x 8 pixels, where it asks for its download. So thousands of steps take a minute.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHORT = ("--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "1")
SPEC = "2x1@1gbit"


@dataclass(frozen=True)
class Example:
    """A script, its arguments ({data}, {out}: folders), and what rank 0 must have printed."""

    path: str
    arguments: tuple[str, ...]
    says: str
    elastic: bool = False
    needs: tuple[str, ...] = ()
    leaves: str = ""  # a file that must be in {out} afterwards
    environment: tuple[tuple[str, str], ...] = ()
    keras_mnist: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).name


_PICTURES = ("--train-dir", "{data}/train", "--val-dir", "{data}/validation")
_IMAGENET = (
    *_PICTURES,
    *("--log-dir", "{out}/logs", "--checkpoint-format", "{out}/checkpoint-{{epoch}}.pth.tar"),
    *("--epochs", "1", "--batch-size", "2", "--val-batch-size", "2"),
)
_MNIST = ("--data-dir", "{data}", "--epochs", "1", "--log-interval", "5")
_TENSORFLOW = ("--model", "MobileNetV2", "--no-cuda", *SHORT, "--num-iters", "2")
_ITERATIONS = ("--num-batches-per-iter", "1", "--num-iters", "3")
_KERAS3 = (("TF_CPP_MIN_LOG_LEVEL", "2"),)
_KERAS2 = (("TF_USE_LEGACY_KERAS", "1"), *_KERAS3)
EXAMPLES = (
    Example(
        "examples/pytorch/pytorch_synthetic_benchmark.py",
        ("--model", "resnet18", *SHORT, "--num-iters", "2"),
        r"Total img/sec on 2 (CPU|GPU)\(s\): [\d.]+ \+-[\d.]+",
    ),
    Example("examples/pytorch/pytorch_mnist.py", _MNIST, r"Test set: Average loss: [\d.]+"),
    Example(
        "examples/pytorch/pytorch_imagenet_resnet50.py",
        _IMAGENET,
        r"Validate Epoch  #1: 100%",
        needs=("tqdm", "tensorboard"),
        leaves="checkpoint-1.pth.tar",
    ),
    Example(
        "examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py",
        ("--model", "resnet18", *SHORT, "--num-iters", "2"),
        r"Total img/sec on 2 (CPU|GPU)\(s\): [\d.]+ \+-[\d.]+",
        elastic=True,
    ),
    Example(
        "examples/elastic/pytorch/pytorch_mnist_elastic.py",
        _MNIST,
        r"Test set: Average loss: [\d.]+",
        elastic=True,
    ),
    Example(
        "examples/elastic/pytorch/pytorch_imagenet_resnet50_elastic.py",
        (*_IMAGENET, "--batches-per-commit", "1"),
        r"Validate Epoch  #1: 100%",
        elastic=True,
        needs=("tqdm", "tensorboard"),
        leaves="checkpoint-1.pth.tar",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_synthetic_benchmark.py",
        _TENSORFLOW,
        r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+",
        needs=("tensorflow", "tf_keras"),
        environment=_KERAS2,
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py",
        _TENSORFLOW,
        r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+",
        elastic=True,
        needs=("tensorflow", "tf_keras"),
        environment=_KERAS2,
    ),
    Example(
        "examples/tensorflow2/tensorflow2_keras_synthetic_benchmark.py",
        ("--model", "MobileNetV2", "--no-cuda", "--batch-size", "2", *_ITERATIONS),
        r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+",
        needs=("tensorflow",),
        environment=_KERAS3,
    ),
    Example(
        "examples/tensorflow2/tensorflow2_mnist.py",
        (),
        r"Step #4990\tLoss: [\d.]+",
        needs=("tensorflow", "tf_keras"),
        leaves="checkpoints-1.index",
        environment=_KERAS2,
        keras_mnist=True,
    ),
    Example(
        "examples/tensorflow2/tensorflow2_keras_mnist.py",
        (),
        r"Epoch 24/24",
        needs=("tensorflow",),
        leaves="checkpoint-24.h5",
        environment=_KERAS3,
        keras_mnist=True,
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py",
        (),
        r"Step #40\tLoss: [\d.]+",
        elastic=True,
        needs=("tensorflow",),
        leaves="checkpoints-1.index",
        environment=_KERAS3,
        keras_mnist=True,
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py",
        (),
        r"Epoch 24/24",
        elastic=True,
        needs=("tensorflow",),
        leaves="checkpoint-24.h5",
        environment=_KERAS3,
        keras_mnist=True,
    ),
)


@dataclass
class Outcome:
    """What became of an example. status: pass, skip, fail."""

    example: str
    status: str
    reason: str
    seconds: float
    output: str = field(default="", repr=False)


def make_data(folder: Path) -> None:
    """MNIST's four files, and folders of JPEG pictures in two classes; all noise."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 512), ("t10k", 128)):
        pictures = noise.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = noise.integers(0, 10, count, dtype=np.uint8)
        # The IDX format: type and number of dimensions, the dimensions, the bytes.
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + pictures.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + labels.tobytes()
        )
    for part, count in (("train", 4), ("validation", 2)):
        for kind in ("cats", "dogs"):
            (folder / part / kind).mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / kind / f"{number}.jpg")


def make_digits(file: Path) -> None:
    """scikit-learn's digits, as Keras's MNIST comes: bytes [n, 8, 8], labels [n]."""
    import numpy as np
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    x = (pictures.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    y = labels.astype(np.uint8)
    np.savez(file, x_train=x[:1500], y_train=y[:1500], x_test=x[1500:], y_test=y[1500:])


def with_pictures() -> None:
    """`python upstream_examples.py FILE SCRIPT ...`: run a script; Keras's MNIST is in FILE."""
    file, *sys.argv = sys.argv[1:]
    import tensorflow as tf

    load: Any = tf.keras.datasets.mnist.load_data
    load.__globals__["get_file"] = lambda *_, **__: file
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def run(root: Path, only: list[str], timeout: float) -> Iterator[Outcome]:
    """Run the examples below `root`, one after the other."""
    from evener.tools.lab import Lab

    chosen = [e for e in EXAMPLES if not only or any(text in e.path for text in only)]
    with tempfile.TemporaryDirectory(prefix="upstream-horovod-") as scratch:
        make_data(Path(scratch) / "data")
        if any(example.keras_mnist for example in chosen):
            make_digits(Path(scratch) / "data" / "mnist.npz")
        with Lab(SPEC, keep=[scratch, str(root)]) as lab:
            for example in chosen:
                yield _one(lab, root, Path(scratch), example, timeout)


def _one(lab: Any, root: Path, scratch: Path, example: Example, timeout: float) -> Outcome:
    from evener.tools.launch.horovod_path import ALIAS

    missing = [name for name in example.needs if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"the example imports {', '.join(missing)}: pip install {' '.join(missing)}"
        return Outcome(example.name, "skip", reason, 0.0)
    out = scratch / example.name
    out.mkdir()
    places = {"data": scratch / "data", "out": out}
    command = [sys.executable, str(root / example.path)]
    if example.keras_mnist:
        command[1:1] = [__file__, str(scratch / "data" / "mnist.npz")]
    command += [argument.format(**places) for argument in example.arguments]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ALIAS), os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",  # nothing is written into the user's checkout
        "HOME": str(out),  # the examples lock a file there
        "OMP_NUM_THREADS": "1",
        "EVENER_TIMEOUT": f"{timeout:g}",
        **dict(example.environment),
    }
    lines: list[str] = []
    begun = time.monotonic()
    if example.elastic:
        first = lab.nodes[0]
        agent = first.environment()["OMPI_MCA_plm_rsh_agent"]
        hosts = ",".join(f"{node.name}:1" for node in lab.nodes)
        full = [sys.executable, "-m", "evener", "horovodrun", "--rsh", agent, "-np", "2"]
        process = first.popen(
            ["timeout", f"{timeout:g}", *full, "--min-np", "1", "-H", hosts, *command],
            env=env,
            cwd=out,
            text=True,
            stdout=-1,
            stderr=-2,
        )
        text, _ = process.communicate()
        lines, status = text.splitlines(), process.returncode
    else:
        done = lab.launch(
            command,
            env=env,
            cwd=out,
            timeout=timeout,
            quiet=True,
            on_line=lambda rank, _node, _stream, line: lines.append(f"[{rank}] {line}"),
        )
        status = done.status
    seconds = time.monotonic() - begun
    output = "\n".join(lines)
    problem = ""
    if status != 0:
        problem = f"status {status}: " + next(
            (line for line in reversed(lines) if line.strip()), ""
        )
    elif not re.search(example.says, output):
        problem = f"it did not print {example.says!r}"
    elif example.leaves and not (out / example.leaves).is_file():
        problem = f"it did not write {example.leaves}"
    return Outcome(example.name, "fail" if problem else "pass", problem, seconds, output)


if __name__ == "__main__":
    with_pictures()
