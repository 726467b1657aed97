"""Prompts that were read stay on disk: the keys and values behind a document are read back in place of being computed again.

A file holds what llama_state_seq_save_file() writes for sequence 0, and behind it JSON about it, the JSON's length and a CRC-32 of
all before (little-endian), and a mark. Its name has what has to be equal: the weights, the settings that keys and values
depend on, and the tokens. Files that were not used for longest go first. They hold the text: nobody else may read them.
llama-server reads and writes them too (cpp/server/server-pcd-disk.cpp), and a worker (pypcd/server/worker.py) tells it which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pypcd import engine, files
from pypcd.errors import PCDError
from pypcd.settings.ranges import Number, literal

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["LIMIT_NAME", "MIN_TOKENS", "N_LEFT", "Entry", "PromptCache", "cache_id", "id_of"]

MIN_TOKENS = 256  # less is soon read again
N_LEFT = (
    16  # tokens of a document's end that are read with the question, since what follows may change how they are cut
)
LIMIT_NAME = "PYPCD_CACHE_GIB"  # the environment variable
_LIMIT = 4.0  # GiB
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})-([0-9]+)-([0-9a-f]{8})\.state")
_MARK = b"pypcd-kv"
_TAIL = struct.Struct("<II8s")  # the JSON's length, the CRC-32, the mark
_HEAD = struct.Struct("<III")  # llama.cpp's: magic, version, number of tokens
_STALE = 3600.0  # seconds after which a file that was not finished is left over
_PIECE = 1 << 24

_whole: set[tuple[str, int, int]] = set()  # files that were read to their end for another process: path, inode, size


@dataclasses.dataclass(frozen=True)
class Entry:
    """A prompt's beginning on disk.

    Attributes:
        used: when it was written or read last, in seconds since 1970.
        about: what the writer said: the names of the model and of its documents.
    """

    path: pathlib.Path
    weights: str
    settings: str
    n_tokens: int
    tokens: str
    n_bytes: int
    used: float

    @property
    def about(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, struct.error), open(self.path, "rb") as file:
            length, _, mark = _TAIL.unpack(_last(file, _TAIL.size))
            if mark == _MARK:
                found = files.parsed(_last(file, _TAIL.size + length)[:length])
                return found if isinstance(found, dict) else {}
        return {}


class PromptCache:
    """The folder of these files.

    Args:
        folder: by default pypcd/prompts in the user's folder for caches; a user without one gets a warning and a limit of 0.
        limit: bytes that they may take together; 0: nothing is kept or read back. By default PYPCD_CACHE_GIB, or 4 GiB.
    """

    def __init__(self, folder: pathlib.Path | None = None, limit: int | None = None) -> None:
        if limit is None:
            given = os.environ.get(LIMIT_NAME, "")
            limit = int(Number(0, 1e6, note="GiB")(LIMIT_NAME, literal(given) if given else _LIMIT) * 2**30)
        if folder is None:
            try:
                folder = files.cache() / "prompts"
            except OSError as error:
                engine.logger.warning("documents that were read are not kept on disk: %s", error)
                folder, limit = pathlib.Path(os.devnull), 0
        self.folder, self.limit = folder, limit

    def entries(self) -> list[Entry]:
        """The files that are there, those that were used last in front."""
        found = []
        for path in self._paths("*.state"):
            if (name := _NAME.fullmatch(path.name)) and _is_ours(path):
                with contextlib.suppress(OSError):  # another process removed it
                    status = path.stat()
                    weights, settings, n, tokens = name.groups()
                    found.append(Entry(path, weights, settings, int(n), tokens, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def find(self, llm: Llama | str, tokens: Sequence[int]) -> list[Entry]:
        """The beginnings of these tokens that are on disk for this model and its settings, the longest in front.

        Args:
            llm: the model, or its cache_id().
        """
        if not self.limit:
            return []
        model = cache_id(llm)
        fitting = [
            entry
            for entry in self.entries()
            if f"{entry.weights}-{entry.settings}" == model
            and entry.n_tokens <= len(tokens)
            and entry.tokens == _sum(tokens[: entry.n_tokens])
        ]
        return sorted(fitting, key=lambda entry: -entry.n_tokens)

    def restore(self, llm: Llama, tokens: Sequence[int]) -> int:
        """Put the longest beginning of these tokens that is on disk in sequence 0, if that saves at least MIN_TOKENS of them.

        Returns:
            how many tokens were restored; 0: none, and the context is as before, or empty if a file could not be loaded.
        """
        held = llm.longest_token_prefix(llm.input_ids[: llm.n_tokens].tolist(), tokens)
        entry = self.use(llm, tokens, held + MIN_TOKENS, load=llm.load_sequence)
        return entry.n_tokens if entry else 0

    def use(
        self,
        llm: Llama | str,
        tokens: Sequence[int],
        least: int = MIN_TOKENS,
        *,
        load: Callable[[pathlib.Path, Sequence[int]], object] = lambda path, tokens: None,
        head: Sequence[int] = (),
    ) -> Entry | None:
        """The longest beginning of these tokens that is on disk and can be loaded, which counts as used now; None if there is none of at
        least so many. A file that is damaged, or cannot be loaded, is removed with a warning.

        Args:
            llm: as find() takes it.
            load: puts the tokens of a file in sequence 0.
            head: llama.cpp's mark and version of such files, if another process loads it, more than once; empty: `load` finds these out.
        """
        for entry in self.find(llm, tokens):
            if entry.n_tokens < least:
                break
            beginning = list(tokens[: entry.n_tokens])
            try:
                found = entry.path.stat()
                key = str(entry.path), found.st_ino, found.st_size
                if not head or key not in _whole:
                    _check(entry.path, beginning, head)
                load(entry.path, beginning)
            except FileNotFoundError:  # another process removed it
                continue
            except OSError as error:
                engine.logger.warning("%s cannot be read, so the prompt is read again: %s", entry.path, error)
                continue
            except PCDError as error:
                engine.logger.warning("%s is removed, and the prompt is read again: %s", entry.path, error)
                with contextlib.suppress(OSError):
                    entry.path.unlink()
                continue
            if head:
                _whole.add(key)
            with contextlib.suppress(OSError):
                os.utime(entry.path)
            return entry
        return None

    def keep(
        self,
        llm: Llama | str,
        tokens: Sequence[int],
        about: dict[str, Any],
        save: Callable[[str], int] | None = None,
    ) -> bool:
        """Write sequence 0, which has just these tokens; whether it is on disk now. What cannot be written is a warning.

        Args:
            llm: the model, or with `save` its cache_id().
            about: for the list that people see.
            save: writes it to a path, and returns the number of bytes.
        """
        path = self.folder / f"{cache_id(llm)}-{len(tokens)}-{_sum(tokens)}.state"
        if len(tokens) < MIN_TOKENS or not self.limit:
            return False
        if os.path.lexists(path):
            return _is_ours(path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)  # it may be of another time, and open
            made = self.folder / f"writing-{secrets.token_hex(8)}"
            try:
                n_bytes = save(str(made)) if save else engine.save_sequence(cast("Llama", llm), str(made), tokens)
                if n_bytes > self.limit:
                    text = "%d tokens take %.0f MiB, which are not kept: the limit is %.0f (%s)"
                    engine.logger.warning(text, len(tokens), n_bytes / 2**20, self.limit / 2**20, LIMIT_NAME)
                    return False
                _seal(made, n_bytes, {**about, "n_tokens": len(tokens)})
                made.chmod(0o600)
                os.replace(made, path)
            finally:
                made.unlink(missing_ok=True)
        except (OSError, PCDError) as error:
            engine.logger.warning(
                "the prompt is not kept in %s, and will be read again next time: %s", self.folder, error
            )
            return False
        self._prune(path)
        return True

    def rate(self, llm: Llama) -> float | None:
        """How many tokens of a document this model read in a second when it read one last; None: it has read none."""
        rates = (entry.about.get("tokens_per_second") for entry in self.entries() if entry.weights == llm.weights_id)
        return next((float(rate) for rate in rates if isinstance(rate, (int, float)) and rate > 0), None)

    def clear(self) -> int:
        """Remove all files; returns how many bytes they had. What cannot be removed is a warning."""
        n_bytes = 0
        for entry in self.entries():
            try:
                entry.path.unlink(missing_ok=True)
                n_bytes += entry.n_bytes
            except OSError as error:
                engine.logger.warning("%s cannot be removed: %s", entry.path, error)
        self._sweep(0.0)
        return n_bytes

    def _prune(self, newest: pathlib.Path) -> None:
        """Keep to the limit, and remove what a process has left that ended while it wrote. The newest stays, whatever the others' dates."""
        left = self.limit
        for entry in sorted(self.entries(), key=lambda entry: entry.path != newest):
            left -= entry.n_bytes
            if left < 0:
                with contextlib.suppress(OSError):  # on Windows another process may read it
                    entry.path.unlink(missing_ok=True)
        self._sweep(_STALE)

    def _paths(self, pattern: str) -> list[pathlib.Path]:
        with contextlib.suppress(OSError):  # it may not be read; what cannot be written is said
            return list(self.folder.glob(pattern)) if self.folder.is_dir() else []
        return []

    def _sweep(self, seconds: float) -> None:
        """Remove what processes wrote that ended meanwhile, if it is so old."""
        for path in self._paths("writing-*"):
            with contextlib.suppress(OSError):  # another process removed it
                if _is_ours(path) and time.time() - path.stat().st_mtime >= seconds:
                    path.unlink()


def _is_ours(path: pathlib.Path) -> bool:
    """Whether it is a plain file of this user, no link to one: then it may be read and removed."""
    with contextlib.suppress(OSError):  # another process removed it
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())
    return False


def cache_id(llm: Llama | str) -> str:
    """What tells the weights, and the settings that keys and values depend on, from others: 16 and 8 hexadecimal digits."""
    if isinstance(llm, str):
        return llm
    text = [engine.cache_settings(llm.context_params, llm.metadata, engine.slides(llm), llm.n_ctx())]
    if llm.lora_path:
        text.append(f"lora={llm.lora_scale} {llm.lora_id}")
    if llm.kv_overrides:
        text.append(f"kv_overrides={sorted(llm.kv_overrides.items())}")
    return id_of(llm.weights_id, " ".join(text))


def id_of(weights: str, settings: str) -> str:
    return f"{weights}-{zlib.crc32(settings.encode()):08x}"


def _sum(tokens: Sequence[int]) -> str:
    return f"{zlib.crc32(np.asarray(tokens, '<i4').tobytes()):08x}"


def _seal(path: pathlib.Path, n_bytes: int, about: dict[str, Any]) -> None:
    """Write what stands behind the state."""
    text = files.json_text(about)
    with open(path, "r+b") as file:
        if file.seek(0, os.SEEK_END) != n_bytes:  # llama.cpp does not see whether its last bytes were written
            raise OSError("the disk is full")
        file.write(text)
        total = _crc(file, n_bytes + len(text))
        file.seek(0, os.SEEK_END)
        file.write(_TAIL.pack(len(text), total, _MARK))


def _check(path: pathlib.Path, tokens: Sequence[int], head: Sequence[int] = ()) -> None:
    """
    Raises:
        OSError: it cannot be read.
        PCDError: it is damaged, or of other tokens, or of another version.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL.size + _HEAD.size:
            raise PCDError(f"it has {size} bytes")
        _, total, mark = _TAIL.unpack(_last(file, _TAIL.size))
        if mark != _MARK or _crc(file, size - _TAIL.size) != total:
            raise PCDError("it is damaged")
        file.seek(0)
        *version, n = _HEAD.unpack(file.read(_HEAD.size))
        if head and version != list(head):
            raise PCDError("another version of llama.cpp wrote it")
        if n != len(tokens) or file.read(4 * n) != np.asarray(tokens, "<i4").tobytes():
            raise PCDError("it has other tokens")


def _crc(file: Any, n: int) -> int:
    """The CRC-32 of a file's first n bytes."""
    file.seek(0)
    total = 0
    while n > 0 and (piece := file.read(min(n, _PIECE))):
        total = zlib.crc32(piece, total)
        n -= len(piece)
    return total


def _last(file: Any, n: int) -> bytes:
    file.seek(-n, os.SEEK_END)
    return bytes(file.read(n))
