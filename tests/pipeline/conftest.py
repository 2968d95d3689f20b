import pytest

from evener.errors import UsageError
from evener.pipeline import torch_names
from tests.threads import one_thread  # noqa: F401

# Those that run a pipeline; plans and captures need none of torch's stages.
RUN = (
    "checkpoint",
    "faults",
    "links",
    "replicas",
    "right",
    "run",
    "tensor",
    "transformers",
    "wire",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where this torch is refused, skip what runs a pipeline, with the refusal as the reason."""
    try:
        torch_names.require()
    except UsageError as error:
        for item in items:
            if "tests/pipeline/" in str(item.path) and item.path.stem[5:] in RUN:
                item.add_marker(pytest.mark.skip(reason=error.problem))
