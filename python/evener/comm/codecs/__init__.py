"""Arithmetic of the forms: tensors to what is sent, and back. No group and no bucket is known here.

Each has a plain torch reference; where it runs on a GPU, Triton's kernel is beside it (`triton_*`).
What is sent when, and what is remembered, is `evener.comm.wires`'.
"""

__all__ = ["casts", "checks", "int8"]
