"""What torch itself cannot do on a Python newer than itself: a test that meets it is skipped."""

import sys

import torch

_TEXTS = (
    ("torch.compile is not supported on Python 3.14", ""),  # 2.9
    ("has no attribute '__annotations__'", "torch/jit/"),  # 2.9
    ("module 'ast' has no attribute 'Num'", "triton"),  # Triton 3.5, of 2.9
    ("cannot pickle code objects", "torch/distributed/checkpoint/"),  # 2.9 to 2.11
)


def lacking(error: str) -> str:
    """Why torch alone is at fault for this traceback; "" where it is not known to be."""
    if sys.version_info >= (3, 14):
        for text, where in _TEXTS:
            if text in error and where in error:
                return f"torch {torch.__version__} on Python 3.14: {text}"
    return ""
