"""ggml's RPC backend: the devices of servers on other machines, for a model that is loaded here; and such a server.

The backend is llama-cpp-python's own if that was built with GGML_RPC, else the module that pypcd was built with
(cmake/rpc.cmake). Servers are not put into ggml's list of devices, which every later model would use: each model gets a list
of its own. Knows nothing of PCD.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import pathlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp

from pypcd import library as library_module
from pypcd.engine import _bindings
from pypcd.engine._devices import chosen, described, gpus
from pypcd.engine._handles import is_open
from pypcd.engine._tensors import ggml
from pypcd.errors import LibraryError, RPCError
from pypcd.settings import remote

__all__ = ["RemoteDevices", "rpc_library", "rpc_server"]

_NAME = "libggml-rpc.so"  # on macOS too

_stderr: int | None = None  # a copy of it
_models: weakref.WeakKeyDictionary[llama_cpp.Llama, RemoteDevices] = weakref.WeakKeyDictionary()


def rpc_library() -> pathlib.Path | None:
    """The module that has the backend; None: llama-cpp-python has it.

    Raises:
        LibraryError: neither has it.
    """
    own = pathlib.Path(llama_cpp.__file__ or "").parent / "lib"
    if any(own.glob("libggml-rpc*")):
        return None
    for folder in library_module.library_dirs():
        if (folder / _NAME).is_file():
            return folder / _NAME
    raise LibraryError(
        "neither this pypcd nor this llama-cpp-python was built with ggml's RPC, which other machines need; install pypcd with its "
        "native part (not on Windows, nor with -C cmake.define.PYPCD_RPC=OFF), or a llama-cpp-python built with "
        "CMAKE_ARGS=-DGGML_RPC=ON"
    )


def _backend(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of the RPC backend, which is loaded if it is not.

    Raises:
        LibraryError: there is none, or it does not load.
    """
    library = rpc_library()
    registry = ggml.ggml_backend_reg_by_name(b"RPC")
    if registry is None and library is not None:
        registry = ggml.ggml_backend_load(str(library).encode())
    if registry is None:
        raise LibraryError(f"ggml's RPC backend does not load from {library}; reinstall pypcd")
    return ctypes.CFUNCTYPE(restype, *argtypes)(ggml.ggml_backend_reg_get_proc_address(registry, name.encode()))


class RemoteDevices:
    """The devices of some servers, for one model; they come before those of this machine, as in llama.cpp.

    Attributes:
        devices: what each of them has, as devices() describes this machine's; the description is the address.

    Args:
        addresses: as remote.parse_servers() gives them.

    Raises:
        RPCError: a server cannot be used.
        LibraryError: there is no RPC backend.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = frozenset(addresses)
        add_server = _backend("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
        # all models of this process share a connection, beside which a server answers no other one
        used = {address for llm, there in _models.items() if is_open(llm) for address in there._addresses}
        for address in addresses:
            if address not in used:
                remote.handshake(address)
        _explain_an_end()
        handles: list[int] = []
        for registry in filter(None, (add_server(address.encode()) for address in addresses)):
            n = ggml.ggml_backend_reg_dev_count(registry)
            handles += [ggml.ggml_backend_reg_dev_get(registry, i) for i in range(n)]
        most = llama_cpp.llama_max_devices()
        if not 0 < len(handles) <= most:
            raise RPCError(
                f"the RPC servers {', '.join(addresses)} have {len(handles)} devices together; allowed: 1 to {most}; see "
                "their --device"
            )
        self.devices = [described(handle) for handle in handles]
        every = [*handles, *gpus(), None]
        self._handles = (ctypes.c_void_p * len(every))(*every)

    def give_to(self, llm: llama_cpp.Llama, params: Any) -> None:
        """Have a model use them: `params` are those it will be loaded with."""
        _models[llm] = self
        params.devices = ctypes.cast(self._handles, ctypes.c_void_p)


def _explain_an_end() -> None:
    """Have ggml say why it ends this process, also while llama_cpp.Llama loads a model and hides stderr."""
    global _stderr
    with contextlib.suppress(OSError):  # there may be none
        _stderr = os.dup(2) if _stderr is None else os.dup2(2, _stderr)
        _bindings.lib.ggml_set_abort_callback(_say_why)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _say_why(message: bytes) -> None:
    text = message.decode("utf-8", "replace").strip()
    if "ggml-rpc" in text:
        text = "the connection to an RPC server was lost, so ggml ends this process; docs/rpc.md says how to stay safe"
    os.write(_stderr or 2, f"pypcd: {text}\n".encode())
    sys.stdout.flush()  # else what was printed is lost


@atexit.register
def _close_models() -> None:
    """While Python can still say why ggml ends the process; without that, a model whose server is lost would hang."""
    for llm in list(_models):
        llm.close()


def rpc_server(address: str, n_threads: int, names: Sequence[str] = ()) -> Callable[[], None]:
    """What serves this machine's devices when it is called; it returns only if that cannot go on. Its log goes to the C
    library's stdout.

    Args:
        address: host:port; the host is an IPv4 address of this machine.
        n_threads: of the CPU.
        names: of the devices; empty: all GPUs, or the CPU if there are none.

    Raises:
        LibraryError: there is no RPC backend.
        ValueError: there is no such device.
    """
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    start = _backend("ggml_backend_rpc_start_server", None, ctypes.c_char_p, ctypes.c_char_p, size, size, pointer)
    handles = chosen(names)
    every = (pointer * len(handles))(*handles)
    return functools.partial(start, address.encode(), None, n_threads, len(handles), ctypes.cast(every, pointer))
