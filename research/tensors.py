"""Intermediate tensors of an evaluation, by their names in llama.cpp's graph: read as they are computed, or changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.errors import InputError

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["tap"]

Floats = npt.NDArray[np.float32]
Tapped = dict[str, list[Floats]]

_FLOATS = (0, 1)  # ggml's numbers of float32 and float16


@contextlib.contextmanager
def tap(llm: Llama, names: Sequence[str], look: Callable[[str, Floats, int], object] | None = None) -> Iterator[Tapped]:
    """Collect tensors of everything that is evaluated in the block.

        with tap(llm, ["l_out"]) as seen:
            llm.eval(tokens)
        seen["l_out-0"][0]   # float32[1, 1, n_tokens, n_embd]: what block 0 makes of the first micro-batch

    Args:
        names: prefixes of names, such as "l_out" for the output of each block. One that ends in a digit is a whole number: "l_out-1" is
            not "l_out-10". Names are llama.cpp's own and may differ between architectures.
        look: called with each name, its array and the address of the tensor itself (see engine.Tensor), in place of collecting them.
            Evaluation goes on when it returns, with the numbers that are in the tensor then.

    Yields:
        Name -> one array for each micro-batch, in the order of evaluation, with all four dimensions in numpy's order:
        ggml's first dimension, which is contiguous, comes last.

    Evaluation waits for each tensor. Those that are no floats of 32 or 16 bits are left out.

    Raises:
        UnsupportedError: this context is watched already.
        ValueError: no name is given, or an empty one.
        BaseException: an error while tensors were copied is raised again at the end.
    """
    if isinstance(names, str) or not all(names) or not names:
        raise InputError(f"names is {names!r}; allowed: one or more prefixes of tensor names, such as ['l_out']")
    base = engine.ggml
    seen: Tapped = {}
    failed: list[BaseException] = []

    def callback(tensor: int, is_asking: bool, _: Any) -> bool:
        try:
            if failed:
                return not is_asking
            name = base.ggml_get_name(tensor).decode()
            if is_asking:
                is_wanted = any(_names(prefix, name) for prefix in names) and base.ggml_nelements(tensor) > 0
                return is_wanted and engine.Tensor.from_address(tensor).type in _FLOATS
            if look:
                look(name, engine.contents(tensor), tensor)
            else:
                seen.setdefault(name, []).append(engine.contents(tensor))
        except BaseException as error:  # noqa: BLE001  it cannot pass through the library
            failed.append(error)
        return True

    with engine.watched(llm, callback):
        yield seen
    if failed:
        raise failed[0]


def _names(prefix: str, name: str) -> bool:
    """Whether a name begins so, and is a model's own: ggml marks views and copies with a word in brackets."""
    rest = name[len(prefix) :]
    return name.startswith(prefix) and " (" not in name and not (prefix[-1].isdigit() and rest[:1].isdigit())
