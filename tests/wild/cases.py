"""Which programs are run, under which doors. A case is a script and one entry of CASES.

A script trains a small model that it makes on the spot, says each step's loss to the harness, and
names the place where its user would write the line of a door (`wild.line`). It knows of no door.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Door:
    """A way to put Evener under a program: variables, or the line that `wild.line` stands for.

    `close`: of one that may choose lossy forms, how far weights may end from plain DDP's, relative
    to what training did; 0: it is lossless. `says`: what Evener says where it has come in; without
    it a run shows nothing.
    """

    name: str
    what: str
    line: str = ""
    env: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why nothing runs under it yet
    close: float = 0.0
    says: str = ""
    ddp: bool = True  # for DistributedDataParallel, and so for every case that names no doors


@dataclass(frozen=True)
class Case:
    """A program.

    `package`: the distribution whose version the table names, "" for a loop of our own. `env`: the
    environment that it needs, one of ENVIRONMENTS. `doors`: those it runs under; () stands for all
    that are for DistributedDataParallel. `skip`: why it does not run under a door, by door.
    `seconds`: a run that takes longer is ended and has failed. `expects`: "bits", or "rounding" and
    then `why` says what makes the order of sums another one than DDP's.
    """

    name: str
    package: str
    script: str
    env: str = "main"
    args: tuple[str, ...] = ()
    doors: tuple[str, ...] = ()
    skip: dict[str, str] = field(default_factory=dict)
    seconds: float = 240.0
    expects: str = "bits"
    why: str = ""


PLAIN = Door("plain", "DistributedDataParallel as it is")
DOORS = (
    Door("model", "accelerate(model)", line="model"),
    Door("optimizer", "accelerate(model, optimizer)", line="optimizer"),
    Door("exact", "EVENER_DDP=exact, no line", env={"EVENER_DDP": "exact"}),
    Door(
        "auto",
        "EVENER_DDP=auto, floor INT8, no line",
        env={"EVENER_DDP": "auto", "EVENER_FLOOR": "int8"},
        close=0.5,
    ),
    Door(
        "horovod",
        "the program's own use of Horovod, beside its DDP",
        line="horovod",
        # Upstream's first step with zeros, at broadcast_optimizer_state, is not DDP's.
        env={"EVENER_HOROVOD_ZERO_STEP": "0"},
        ddp=False,
    ),
    *(
        Door(
            f"fsdp-{mode}",
            f"EVENER_FSDP={mode}, no line, under a program of FSDP2's",
            env={"EVENER_FSDP": mode} | ({"EVENER_FLOOR": "int8"} if mode == "auto" else {}),
            close=0.0 if mode == "exact" else 0.5,
            says="goes on with Evener",
            ddp=False,
        )
        for mode in ("exact", "int8", "auto")
    ),
)
FSDP = ("fsdp-exact", "fsdp-int8", "fsdp-auto")

# What is installed, and what of a package's own limits is set aside (as the project's own torch).
ENVIRONMENTS = {
    "main": (
        "transformers",
        "accelerate",
        "lightning",
        "timm",
        "trl",
        "peft",
        "diffusers",
        "sentence-transformers",
        "ultralytics",
        "datasets",
        "bitsandbytes",
    ),
    "composer": ("mosaicml>=0.30",),
    # The last release for the project's torch; it imports tensorboard, and does not ask for it.
    "titan": ("torchtitan==0.2.2", "tensorboard"),
    # deepctr-torch imports requests and packaging, and does not ask for them.
    "recommend": (
        "deepctr-torch",
        "requests",
        "packaging",
        "torch-rechub",
        "pandas",
        "torchfm",
        "pytorch-widedeep",
    ),
    "more": ("mmengine", "lightly", "torch-geometric", "schedulefree"),
    # The last releases that know Horovod.
    "horovod": (
        "pytorch-lightning<2",
        "torchmetrics<1",
        "pytorch-ignite",
        "open_clip_torch==2.24.0",
        "webdataset",
        "pandas",
        "setuptools<81",
    ),
}

CASES = (
    Case("nanogpt", "", "nanogpt"),
    Case("nanogpt-clip", "", "nanogpt", args=("--clip", "--accumulate", "2")),
    Case("gan", "", "gan"),
    Case("scaler", "", "scaler"),
    *(
        Case(kind, "", "kinds", args=(kind,))
        for kind in ("swa", "siamese", "teacher", "penalty", "maml", "policy", "albert", "depth")
    ),
    *(
        Case(kind, "", "architectures", args=(kind,))
        for kind in ("scan", "mixing", "graph", "convnext", "flow", "queue")
    ),
    *(
        Case(kind, "", "optimizers", args=(kind,))
        for kind in ("redundancy", "uneven", "muon", "free", "replay")
    ),
    Case("torchvision", "torchvision", "torchvision_reference"),
    Case("trainer", "transformers", "trainer"),
    Case("trainer-accumulate", "transformers", "trainer", args=("--accumulate", "--bf16")),
    Case("trainer-reentrant", "transformers", "trainer", args=("--reentrant",)),
    Case("trainer-again", "transformers", "trainer", args=("--again",)),
    Case("trainer-mixtral", "transformers", "trainer", args=("--model", "mixtral")),
    Case("trainer-lora", "transformers", "trainer", args=("--model", "lora")),
    Case("trainer-residuals", "transformers", "residuals", doors=("auto",)),
    Case("trainer-topk", "transformers", "residuals", args=("--topk",), doors=("auto",)),
    Case("accelerate", "accelerate", "accelerate_loop"),
    Case("lightning", "lightning", "lightning_fit"),
    Case("lightning-manual", "lightning", "lightning_fit", args=("--manual",)),
    Case("lightning-residuals", "lightning", "residuals", args=("--lightning",), doors=("auto",)),
    Case(
        "lightning-topk", "lightning", "residuals", args=("--lightning", "--topk"), doors=("auto",)
    ),
    Case("timm", "timm", "timm_loop"),
    Case("peft", "peft", "peft_lora"),
    Case("trl-sft", "trl", "trl_sft"),
    Case("diffusers", "diffusers", "diffusers_unet"),
    Case("sentence-transformers", "sentence-transformers", "sentences"),
    Case("ultralytics", "ultralytics", "ultralytics_yolo"),
    Case("fsdp-script", "", "fsdp_script", doors=FSDP),
    Case("fsdp-mixed", "", "fsdp_script", args=("--mixed", "--prefetch"), doors=FSDP),
    Case(
        "fsdp-accumulate", "", "fsdp_script", args=("--mixed", "--accumulate", "--keep"), doors=FSDP
    ),
    Case("fsdp-accelerate", "accelerate", "fsdp_accelerate", doors=FSDP),
    Case(
        "fsdp-accelerate-ac",
        "accelerate",
        "fsdp_accelerate",
        args=("--checkpointing",),
        doors=FSDP,
    ),
    Case("fsdp-trainer", "transformers", "fsdp_accelerate", args=("--trainer",), doors=FSDP),
    Case("fsdp-lightning", "lightning", "fsdp_lightning", doors=FSDP),
    Case("fsdp-titan", "torchtitan", "fsdp_titan", env="titan", doors=FSDP),
    Case("fsdp-dit", "diffusers", "fsdp_models", args=("dit",), doors=FSDP),
    Case("fsdp-experts", "transformers", "fsdp_models", args=("experts",), doors=FSDP),
    Case("mmengine", "mmengine", "mmengine_runner", env="more"),
    Case("lightly-dino", "lightly", "lightly_dino", env="more"),
    Case("lightly-simclr", "lightly", "lightly_dino", env="more", args=("--simclr",)),
    Case("geometric", "torch-geometric", "geometric", env="more"),
    Case("composer", "mosaicml", "composer_fit", env="composer"),
    Case("horovod-uneven", "", "horovod_uneven", doors=("horovod",)),
    Case("lightning-1.9", "pytorch-lightning", "horovod_lightning", "horovod", doors=("horovod",)),
    Case("ignite", "pytorch-ignite", "horovod_ignite", "horovod", doors=("horovod",)),
    Case("open-clip", "open_clip_torch", "horovod_open_clip", "horovod", doors=("horovod",)),
)


@dataclass(frozen=True)
class Program:
    """A program that compares itself, on its own processes: it runs with and without a part of
    Evener and says what is not equal. `module`: of tests.wild; its exit status is 1 then."""

    name: str
    module: str
    args: tuple[str, ...] = ()
    env: str = "main"
    seconds: float = 300.0


PROGRAMS = (
    *(
        Program(f"zero-{name}", "zero_frameworks", ("-k", name))
        for name in ("trainer-lora", "trainer-best", "trainer-generates", "trl-sft",
                     "qlora-sft", "qlora-dpo", "accelerate-lora", "lightning-accumulates")
    ),
    *(
        Program(f"zero-script-{name}", "zero_scripts", ("-k", name), seconds=600.0)
        for name in ("sft", "sft-lora", "sft-qlora", "sft-packed", "dpo", "dpo-lora", "dpo-qlora",
                     "kto", "reward", "grpo")
    ),
    *(
        Program(f"zero-models-{n}", "zero_models", ("--part", f"{n}/8"), seconds=900.0)
        for n in range(1, 9)
    ),
    Program("zero-sequences", "zero_sequences", seconds=900.0),
    Program("moe-models", "moe_models"),
    Program("pipeline-models", "pipeline_models"),
)  # fmt: skip
