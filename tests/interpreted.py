"""Triton's interpreter, without what it does again for each launch.

Before each launch, and before each call of a kernel's function by another, it looks through all of
`triton.language` and puts its own functions there; after the launch it takes them out. That is 20
to 60 % of what small kernels cost. Where only kernels use the language, its functions may stay.
"""

from __future__ import annotations

from typing import Any


def stay() -> None:
    """Keep the interpreter's functions in the language until this process ends.

    Call it where TRITON_INTERPRET is set, before the first launch.
    """
    from triton.runtime import interpreter

    patch, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    done = set[int]()

    def once(kernel: Any) -> Any:
        """As `_patch_lang`, with nothing left to restore."""
        seen = {id(x) for x in kernel.__globals__.values() if any(x is y for y in languages)}
        if not seen or seen - done:
            patch(kernel)  # says so where a kernel has no language
            done.update(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once
