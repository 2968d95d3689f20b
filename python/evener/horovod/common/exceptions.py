"""The errors of the Horovod door."""

from __future__ import annotations

from evener.errors import EvenerError


class HorovodInternalError(EvenerError, RuntimeError):
    """A collective failed, or the ranks do not agree on it. Raised on every rank.

    A RuntimeError as upstream's, because scripts catch it as one.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - upstream's name
    """Hosts were added to an elastic job, or removed. Raised by `State.commit` on every rank.

    skip_sync: only removed, so that all who go on have the state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class NotInitializedError(EvenerError, ValueError):
    """An operation came before `hvd.init()` or after `hvd.shutdown()`. A ValueError."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized", "call hvd.init() first")


class NotServedError(EvenerError, ModuleNotFoundError):
    """A module of upstream's that Evener does not have: for a library as if it was not there.

    problem: begins with the module's name.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.name = problem.split()[0]


class HorovodVersionMismatchError(ImportError):
    """Upstream's: built for another version of a framework. Evener builds nothing; not raised."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """A line that names both versions of framework `name`."""
    return f"{name} {version} is here, and {installed_version} was expected"


class NotBuiltError(EvenerError, NotImplementedError):
    """A part of Horovod's interface that is planned."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(
            f"{what} is planned: Evener's Horovod door does not have it yet",
            fix or "leave it out, or run this script with upstream's Horovod for now",
        )


class NotBuiltAttributeError(NotBuiltError, AttributeError):
    """The same for a name that is looked up, so that `hasattr` says no."""
