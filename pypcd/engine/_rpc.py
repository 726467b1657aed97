"""ggml's RPC backend: the devices of servers on other machines, for a model that is loaded here; and such a server.

The backend is llama-cpp-python's own if that was built with GGML_RPC, else the module that pypcd was built with
(cmake/rpc.cmake). Servers are not put into ggml's list of devices, which every later model would use: each model gets a list
of its own. ggml ends the process when a server is lost; the callback here says which it was. Knows nothing of PCD.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pathlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp

from pypcd import library as library_module
from pypcd.engine import _bindings
from pypcd.engine._devices import _ggml, chosen, gpus
from pypcd.engine._handles import is_open
from pypcd.errors import LibraryError, RPCError
from pypcd.settings import remote

__all__ = ["RemoteDevices", "check_rpc_server", "rpc_library", "run_rpc_server"]

_NAME = "libggml-rpc.so"  # on macOS too

_users: weakref.WeakSet[Any] = weakref.WeakSet()  # the devices of models
_known: dict[str, list[remote.Device]] = {}  # of each server
_ended: Any = None  # the callback; ggml keeps a pointer to it
_stderr: int | None = None  # while llama_cpp.Llama loads a model, nothing is to be seen on the real one


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
    registry = _ggml("reg_by_name", ctypes.c_void_p, b"RPC")
    if registry is None and library is not None:
        registry = _ggml("load", ctypes.c_void_p, str(library).encode())
    if registry is None:
        raise LibraryError(f"ggml's RPC backend does not load from {library}; reinstall pypcd")
    address = _ggml("reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p(registry), name.encode())
    if address is None:
        raise LibraryError(f"ggml's RPC backend has no {name}; reinstall pypcd")
    return ctypes.CFUNCTYPE(restype, *argtypes)(address)


class RemoteDevices:
    """The devices of some servers, for one model; they come before those of this machine, as in llama.cpp.

    Attributes:
        addresses: the servers, in the order of their devices.
        devices: what each of them has.

    Args:
        addresses: as remote.parse_servers() gives them.

    Raises:
        RPCError: a server cannot be used.
        LibraryError: there is no RPC backend.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        add_server = _backend("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
        self.devices = [device for address in self.addresses for device in _devices_of(address)]
        if len(self.devices) > remote.MAX_SERVERS:
            raise RPCError(f"the RPC servers have {len(self.devices)} devices; a model can have {remote.MAX_SERVERS}")
        _install_callback()
        self.model: Callable[[], Any] = lambda: None
        _users.add(self)
        handles = []
        for address in self.addresses:
            registry = ctypes.c_void_p(add_server(address.encode()))
            n = _ggml("reg_dev_count", ctypes.c_size_t, registry)
            handles += [_ggml("reg_dev_get", ctypes.c_void_p, registry, ctypes.c_size_t(i)) for i in range(n)]
        handles += [device.value for device in gpus()]
        self._handles = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)

    def give_to(self, llm: llama_cpp.Llama, params: Any) -> None:
        """Have a model use them: `params` are those it will be loaded with."""
        self.model = weakref.ref(llm)
        params.devices = ctypes.cast(self._handles, ctypes.c_void_p)

    def is_used(self) -> bool:
        """Whether the model is open."""
        llm = self.model()
        return llm is not None and is_open(llm)


def _devices_of(address: str) -> list[remote.Device]:
    """What a server has now; or had, if a model of this process is open there: all share one connection."""
    is_used = any(address in one.addresses for one in _users if one.is_used())
    if is_used and not remote.is_connected(address):
        raise RPCError(
            f"the connection to the RPC server {address} was lost, and with it the models that are open there; end this process, "
            "and start again"
        )
    devices = _known[address] if is_used else remote.handshake(address)
    if len(devices) != len(_known.setdefault(address, devices)):
        raise RPCError(
            f"the RPC server {address} has another number of devices now; ggml remembers the old one: start again"
        )
    _known[address] = devices
    return devices


def _install_callback() -> None:
    global _ended, _stderr
    with contextlib.suppress(OSError):  # there may be none
        _stderr = os.dup(2) if _stderr is None else os.dup2(2, _stderr)
    if _ended is None:
        _ended = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_say_why)
        _bindings.lib.ggml_set_abort_callback(_ended)
        atexit.register(_close_models)  # ggml may end the process over it, and later Python cannot say why


def _close_models() -> None:
    for one in list(_users):
        if one.is_used():
            one.model().close()


def _say_why(message: bytes) -> None:
    """ggml is about to end this process. Instead of its list of addresses: what happened, and where."""
    text = message.decode("utf-8", "replace").strip()
    if "ggml-rpc" in text:
        known = {address for one in _users for address in one.addresses}
        text = remote.lost_text(known, [one for one in known if not remote.is_connected(one)], "ggml ends this process")
    with contextlib.suppress(Exception):  # whatever is wrong with it, the next line is to be read
        sys.stdout.flush()
    if _stderr is not None:
        os.write(_stderr, f"pypcd: {text}\n".encode())


def check_rpc_server(names: Sequence[str]) -> None:
    """
    Raises:
        LibraryError: there is no RPC backend.
        ValueError: there is no such device.
    """
    rpc_library()
    chosen(names)


def run_rpc_server(address: str, n_threads: int, names: Sequence[str] = ()) -> None:
    """Serve this machine's devices; returns only if that cannot go on. Its few lines go to the C library's stdout.

    Args:
        address: host:port; the host is an IPv4 address of this machine.
        n_threads: of the CPU.
        names: of the devices; empty: all GPUs, or the CPU if there are none.

    Raises:
        LibraryError: there is no RPC backend.
        ValueError: there is no such device.
    """
    found = chosen(names)
    start = _backend(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    handles = (ctypes.c_void_p * len(found))(*(handle.value for handle in found))
    start(address.encode(), None, n_threads, len(found), ctypes.cast(handles, ctypes.c_void_p))
