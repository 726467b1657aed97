"""Multiplies small matrices with ggml's AMX kernels and compares the products with integer arithmetic.

Run as a script, in a process of its own, because kernels that a compiler broke crash; the argument is the folder of
ggml's libraries. Prints "right", "wrong: ..." or "none", where ggml has no AMX. Linux only, as AMX in ggml is. Uses the standard
library alone, so that `python -I -S` can run it.

Weights and activations are integers in blocks whose scale is 1: quantising loses nothing, and every sum is exact in
float32.
"""

from __future__ import annotations

import ctypes
import operator
import random
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

N_ROWS, N_COLUMNS = 64, 256  # of the weights: four tiles of AMX, one block of the largest kind
N_TOKENS = (1, 19)  # one token has a path of its own; 19 are a full tile and a part of another
N_THREADS = 2  # each sets its tiles up by itself

Weights = tuple[bytes, list[int]]  # a block as ggml stores it, and its values
_ONE = struct.pack("<e", 1.0)


# --- blocks of ggml's quantised types ---


def q4_0(r: random.Random) -> Weights:
    qs = r.randbytes(16)
    return _ONE + qs, [(q & 15) - 8 for q in qs] + [(q >> 4) - 8 for q in qs]


def q4_1(r: random.Random) -> Weights:
    qs = r.randbytes(16)
    return _ONE + struct.pack("<e", -5.0) + qs, [(q & 15) - 5 for q in qs] + [(q >> 4) - 5 for q in qs]


def q8_0(r: random.Random) -> Weights:
    values = [r.randint(-127, 127) for _ in range(32)]
    return _ONE + struct.pack("32b", *values), values


def _scales_and_minima(packed: bytes) -> list[tuple[int, int]]:
    """Of the eight parts of a Q4_K or Q5_K block: 6 bits each, in 12 bytes."""
    low = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    high = [(packed[j + 8] & 15 | packed[j] >> 6 << 4, packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4) for j in range(4)]
    return low + high


def q4_k(r: random.Random) -> Weights:
    return _k_block(r, has_fifth_bit=False)


def q5_k(r: random.Random) -> Weights:
    return _k_block(r, has_fifth_bit=True)


def _k_block(r: random.Random, has_fifth_bit: bool) -> Weights:
    packed, qh, qs = r.randbytes(12), r.randbytes(32 if has_fifth_bit else 0), r.randbytes(128)
    values = []
    for part, (scale, minimum) in enumerate(_scales_and_minima(packed)):
        for i in range(32):
            q = qs[part // 2 * 32 + i] >> part % 2 * 4 & 15
            if has_fifth_bit:
                q |= (qh[i] >> part & 1) << 4
            values.append(scale * q - minimum)
    return _ONE + _ONE + packed + qh + qs, values


def q6_k(r: random.Random) -> Weights:
    ql, qh, scales = r.randbytes(128), r.randbytes(64), [r.randint(-20, 20) for _ in range(16)]
    values = []
    for i in range(256):
        half, part, at = i // 128, i % 128 // 32, i % 32
        q = ql[half * 64 + part % 2 * 32 + at] >> part // 2 * 4 & 15 | (qh[half * 32 + at] >> part * 2 & 3) << 4
        values.append(scales[i // 16] * (q - 32))
    return ql + qh + struct.pack("16b", *scales) + _ONE, values


TYPES: dict[str, tuple[int, Callable[[random.Random], Weights]]] = {  # the number is that of enum ggml_type
    "Q4_0": (2, q4_0),
    "Q4_1": (3, q4_1),
    "Q8_0": (8, q8_0),
    "Q4_K": (12, q4_k),
    "Q5_K": (13, q5_k),
    "Q6_K": (14, q6_k),
}


def activations(r: random.Random) -> list[int]:
    """With the largest number that 8 bits hold in each block, so that the block's scale is 1."""
    values = [r.randint(-40, 40) for _ in range(N_COLUMNS)]
    for start in range(0, N_COLUMNS, 32):
        values[start + r.randrange(32)] = r.choice((-127, 127))
    return values


# --- ggml ---

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _size), ("mem_buffer", _pointer), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The few functions of ggml that a product takes; nothing is freed, since the process ends."""

    def __init__(self, folder: Path) -> None:
        self.base, self.cpu = (
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in ("libggml-base.so", "libggml-cpu.so")
        )
        self.backend = self.call("backend_cpu_init", _pointer)
        self.call("backend_cpu_set_n_threads", None, self.backend, ctypes.c_int(N_THREADS))

    def call(self, name: str, restype: Any, *args: Any) -> Any:
        library = self.cpu if name.startswith("backend_cpu") else self.base
        function = getattr(library, "ggml_" + name)
        function.restype = restype
        result = function(*args)
        return _pointer(result) if restype is _pointer else result

    def amx(self) -> Any:
        """The buffer type of AMX; None if there is none."""
        registry = self.call("backend_cpu_reg", _pointer)
        address = self.call("backend_reg_get_proc_address", _pointer, registry, b"ggml_backend_dev_get_extra_bufts")
        device = self.call("backend_reg_dev_get", _pointer, registry, _size(0))
        found = ctypes.CFUNCTYPE(ctypes.POINTER(_pointer), _pointer)(address.value)(device) if address else None
        while found and found[0]:
            if self.call("backend_buft_name", ctypes.c_char_p, _pointer(found[0])) == b"AMX":
                return _pointer(found[0])
            found = ctypes.cast(ctypes.addressof(found.contents) + ctypes.sizeof(_pointer), ctypes.POINTER(_pointer))
        return None

    def product(self, buft: Any, kind: int, weights: bytes, inputs: list[list[int]]) -> list[tuple[float, ...]]:
        """The rows of weights, in a buffer of this type, times each of the inputs."""
        numbers = ctypes.c_int64(N_COLUMNS), ctypes.c_int64(N_ROWS), ctypes.c_int64(len(inputs))
        params = _InitParams(2**20, None, True)
        kept, others = (self.call("init", _pointer, params) for _ in range(2))
        a = self.call("new_tensor_2d", _pointer, kept, ctypes.c_int(kind), numbers[0], numbers[1])
        b = self.call("new_tensor_2d", _pointer, others, ctypes.c_int(0), numbers[0], numbers[2])
        result = self.call("mul_mat", _pointer, others, a, b)
        graph = self.call("new_graph", _pointer, others)
        self.call("build_forward_expand", None, graph, result)
        self.call("backend_alloc_ctx_tensors_from_buft", _pointer, kept, buft)
        self.call("backend_alloc_ctx_tensors", _pointer, others, self.backend)

        self._set(a, weights)
        self._set(b, struct.pack(f"{len(inputs) * N_COLUMNS}f", *(x for row in inputs for x in row)))
        if self.call("backend_graph_compute", ctypes.c_int, self.backend, graph) != 0:
            raise RuntimeError("ggml computes nothing")
        out = ctypes.create_string_buffer(4 * N_ROWS * len(inputs))
        self.call("backend_tensor_get", None, result, out, _size(0), _size(len(out)))
        return list(struct.iter_unpack(f"{N_ROWS}f", out.raw))

    def _set(self, tensor: Any, data: bytes) -> None:
        self.call("backend_tensor_set", None, tensor, data, _size(0), _size(len(data)))


# --- the comparison ---


def differences(ggml: Ggml, buft: Any) -> Iterator[str]:
    """What is wrong, in a few words each."""
    r = random.Random(7)
    for name, (kind, block) in TYPES.items():
        rows, packed = [], b""
        for _ in range(N_ROWS):
            row: list[int] = []
            while len(row) < N_COLUMNS:
                stored, values = block(r)
                packed += stored
                row += values
            rows.append(row)
        for n_tokens in N_TOKENS:
            inputs = [activations(r) for _ in range(n_tokens)]
            wanted = [tuple(float(sum(map(operator.mul, row, x))) for row in rows) for x in inputs]
            if ggml.product(buft, kind, packed, inputs) != wanted:
                yield f"{name}, {n_tokens} tokens"


def main(folder: str) -> str:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, and leaves no file behind
    ggml = Ggml(Path(folder))
    buft = ggml.amx()
    if not buft:
        return "none"
    wrong = list(differences(ggml, buft))
    return f"wrong: {'; '.join(wrong)}" if wrong else "right"


if __name__ == "__main__":
    print(main(sys.argv[1]))
