"""Prompts on disk. The oracle is the same prompt computed anew: the same logits, to the bit. Layers with a sliding window
have their keys in another order once they were restored, so that their sums are rounded in another way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Load, Tiny
from tiny_gguf import write_lora, write_tiny_gguf

import pypcd
from pypcd import engine
from pypcd.decode.prompt_cache import MIN_TOKENS, PromptCache
from pypcd.llama.saved_state import fingerprint, weights_id

TEXT = [5 + (7 * i * i + i) % 300 for i in range(MIN_TOKENS + 30)]
QUESTION = [11, 12, 13, 14, 15]
BIG = 2**30
LARGE: dict[str, Any] = {"n_ctx": 512}


@pytest.fixture
def cache(tmp_path: Path) -> PromptCache:
    return PromptCache(tmp_path / "prompts", BIG)


def read(llm: pypcd.Llama, cache: PromptCache | None, tokens: list[int] = TEXT) -> int:
    """What was restored of a text, which is in the context then, and on disk."""
    llm.reset()
    found = cache.restore(llm, tokens) if cache else 0
    if found < len(tokens):
        with engine.pcd(llm).suspended():
            llm.eval(tokens[found:])
        if cache:
            assert cache.keep(llm, tokens, {"documents": ["report"]})
    return found


def rows(llm: pypcd.Llama, n: int = 6) -> list[Any]:
    """An answer's tokens, and the logits of its first."""
    answer = llm.generate([*TEXT, *QUESTION], temp=0)
    first = next(answer)
    row = engine.row(llm)
    tokens = [first, *(next(answer) for _ in range(n))]
    answer.close()
    return [tokens, row]


def assert_same(one: list[Any], other: list[Any], atol: float = 0.0) -> None:
    assert one[0] == other[0]
    np.testing.assert_allclose(one[1], other[1], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("arch", "pcd", "engine_name", "atol"),
    [
        *(("llama", pcd, "native", 0.0) for pcd in (False, "paper", "window")),
        *(("gemma3", pcd, "native", 1e-4) for pcd in (False, "paper", "window")),
        *(("lfm2", pcd, "native", 0.0) for pcd in (False, "window")),
        ("llama", "window", "stock", 1e-4),  # twins take cells among those of the text
    ],
)
def test_what_was_read_before_is_as_if_it_were_computed_now(
    tiny: Tiny, load: Load, cache: PromptCache, arch: str, pcd: Any, engine_name: str, atol: float
) -> None:
    plain, writer, reader = (load(tiny(arch), pcd, engine=engine_name, **LARGE) for _ in range(3))
    assert read(plain, None) == 0 and read(writer, cache) == 0 and read(reader, cache) == len(TEXT)
    expected = rows(plain)
    assert_same(rows(writer), expected)
    assert_same(rows(reader), expected, atol)
    (entry,) = cache.entries()
    assert entry.about == {"documents": ["report"], "n_tokens": len(TEXT)}
    assert entry.n_bytes == entry.path.stat().st_size
    assert cache.folder.stat().st_mode & 0o077 == 0 or sys.platform == "win32", "nobody else can read the files"


def test_only_what_is_equal_is_read_back(tiny: Tiny, load: Load, cache: PromptCache, tmp_path: Path) -> None:
    llm = load(tiny(), False, **LARGE)
    read(llm, cache)
    other = load(tiny(), False, **LARGE)
    changed = [*TEXT[:100], TEXT[100] + 1, *TEXT[101:]]
    assert cache.restore(other, changed) == 0 and other.n_tokens == 0, "a changed document"
    assert cache.restore(other, TEXT[:-1]) == 0, "a shorter one"
    assert cache.restore(other, [*TEXT, 9, 9]) == len(TEXT), "one that goes on"
    assert cache.restore(other, TEXT) == 0 and other.n_tokens == len(TEXT), "it is there already"
    assert cache.restore(load(write_tiny_gguf(tmp_path / "other.gguf", seed=9), False, **LARGE), TEXT) == 0, "a model"
    for name, value in (("type_k", 1), ("rope_freq_base", 5e4), ("rope_freq_scale", 0.5)):
        assert cache.restore(load(tiny(), False, **{**LARGE, name: value}), TEXT) == 0, name


def test_a_lora_is_known_by_its_content_as_it_was_opened(
    tiny: Tiny, load: Load, cache: PromptCache, tmp_path: Path
) -> None:
    path, q = tmp_path / "lora.gguf", "blk.0.attn_q.weight"

    def write(seed: int) -> None:
        write_lora(path, {f"{q}.lora_a": (4, 64), f"{q}.lora_b": (64, 4)}, seed=seed)
        os.utime(path, ns=(0, 10**18))

    write(1)
    first = load(tiny(), False, lora_path=str(path), **LARGE)
    write(2)  # another of the same size and date
    read(first, cache)
    second = load(tiny(), False, lora_path=str(path), **LARGE)
    assert cache.restore(second, TEXT) == 0, "what the first one read is not the second one's"
    read(second, cache)
    assert cache.restore(load(tiny(), False, lora_path=str(path), **LARGE), TEXT) == len(TEXT)
    assert cache.restore(load(tiny(), False, **LARGE), TEXT) == 0


def test_a_model_that_was_changed_at_all_has_prompts_of_its_own(tmp_path: Path) -> None:
    first, second = (tmp_path / f"large-0000{i}-of-00002.gguf" for i in (1, 2))
    for path in (first, second):
        path.write_bytes(bytes(20_000_000))
        os.utime(path, ns=(0, 10**18))
    before, seen = weights_id(first), fingerprint(second)
    with open(second, "r+b") as file:  # a byte between two samples, and in the part that nobody names
        file.seek(300_000)
        file.write(b"\1")
    assert weights_id(first) != before and fingerprint(second) == seen
    os.utime(second, ns=(0, 10**18))
    assert weights_id(first) == before and len(before) == 16
    with open(second, "r+b") as file:  # as training changes it: a twentieth, in the middle
        file.seek(9_000_000)
        file.write(b"\1" * 1_000_000)
    assert fingerprint(second) != seen


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:-5000]), lambda path: path.write_bytes(b"")]
)
def test_a_damaged_file_is_removed_and_the_prompt_is_read_again(
    tiny: Tiny, load: Load, cache: PromptCache, damage: Callable[[Path], Any], caplog: Any
) -> None:
    writer = load(tiny(), False, **LARGE)
    read(writer, cache)
    assert cache.restore(load(tiny(), False, **LARGE), TEXT)  # what was whole then is looked at again
    damage(cache.entries()[0].path)
    reader = load(tiny(), False, **LARGE)
    assert cache.restore(reader, TEXT) == 0 and "is removed" in caplog.text and not cache.entries()
    assert read(reader, cache) == 0
    assert_same(rows(reader), rows(writer))


def test_the_limit_removes_what_was_not_used_for_longest(tiny: Tiny, load: Load, tmp_path: Path, caplog: Any) -> None:
    llm, texts = load(tiny(), False, **LARGE), [[40 + i, *TEXT] for i in range(3)]
    cache = PromptCache(tmp_path, BIG)
    for i, text in enumerate(texts[:2]):
        read(llm, cache, text)
        os.utime(cache.entries()[0].path, (1000 + i, 1000 + i))
    llm.reset()
    assert cache.restore(llm, texts[0])  # used again
    size = cache.entries()[0].n_bytes
    smaller = PromptCache(tmp_path, int(size * 2.5))
    read(llm, smaller, texts[2])
    llm.reset()
    assert [bool(smaller.restore(llm, text)) for text in texts] == [True, False, True]
    for entry in cache.entries():  # by a clock that was wrong
        os.utime(entry.path, (2**33, 2**33))
    smaller = PromptCache(tmp_path, int(size * 1.5))
    read(llm, smaller, texts[1])
    llm.reset()
    assert smaller.restore(llm, texts[1]) and len(cache.entries()) == 1
    assert not PromptCache(tmp_path / "b", size // 2).keep(llm, [1, *TEXT], {}) and "the limit is" in caplog.text
    assert not list((tmp_path / "b").iterdir())
    assert not PromptCache(tmp_path, 0).keep(llm, TEXT, {}) and not PromptCache(tmp_path, 0).restore(llm, TEXT)
    assert cache.clear() >= size and not list(tmp_path.glob("*.state"))


def process(code: str, *args: object) -> subprocess.Popen[str]:
    prelude = "import sys\n"
    prelude += (
        "from pathlib import Path\nimport pypcd\nfrom pypcd import engine\nfrom pypcd.decode import prompt_cache\n"
    )
    prelude += f"cache = prompt_cache.PromptCache(Path(sys.argv[2]), {BIG})\nTEXT = {TEXT}\n"
    prelude += "def new(): return pypcd.Llama(sys.argv[1], n_ctx=512, n_batch=64, n_threads=1, n_threads_batch=1)\n"
    command = [sys.executable, "-c", prelude + code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_a_warning(tiny: Tiny, cache: PromptCache) -> None:
    """Files of this process may have 50,000 bytes, so that writing fails half-way, as on a full disk."""
    pytest.importorskip("resource")
    code = """
import resource
llm = new()
llm.eval(TEXT)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
print(cache.keep(llm, TEXT, {}), cache.entries(), list(cache.folder.iterdir()))
print(len(list(zip(range(3), llm.generate(TEXT, temp=0)))))
"""
    with process(code, tiny(), cache.folder) as run:
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0 and out.split("\n")[:2] == ["False [] []", "3"]
    assert "will be read again" in err


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read(
    tiny: Tiny, load: Load, cache: PromptCache
) -> None:
    code = """
import time
prompt_cache._seal = lambda *_: (print("writing", flush=True), time.sleep(100))
llm = new()
llm.eval(TEXT)
cache.keep(llm, TEXT, {})
"""
    with process(code, tiny(), cache.folder) as run:
        assert run.stdout is not None and run.stdout.readline() == "writing\n"
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL and list(cache.folder.glob("writing-*")) and not cache.entries()
    llm = load(tiny(), False, **LARGE)
    assert read(llm, cache) == 0 and len(cache.entries()) == 1
    (left,) = cache.folder.glob("writing-*")
    os.utime(left, (1000, 1000))  # long ago: nobody writes there any more
    assert read(llm, cache, [9, *TEXT]) == 0 and not list(cache.folder.glob("writing-*"))


def test_processes_share_the_folder(tiny: Tiny, cache: PromptCache) -> None:
    """Each writes, reads back and now and then removes, while the others do; all have the same answer each time."""
    code = """
llm, found = new(), set()
for i in range(12):
    llm.reset()
    n = cache.restore(llm, TEXT)
    if n < len(TEXT):
        llm.eval(TEXT[n:])
        cache.keep(llm, TEXT, {})
    found.add(tuple(token for _, token in zip(range(4), llm.generate([*TEXT, 9, 8, 7], temp=0))))
    if i % 4 == int(sys.argv[3]):
        cache.clear()
print(found)
"""
    runs = [process(code, tiny(), cache.folder, i) for i in range(3)]
    said = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1 and said[0][0].count("(") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="links and FIFOs are POSIX's")
def test_what_is_not_the_caches_own_is_left_alone(tiny: Tiny, load: Load, cache: PromptCache, tmp_path: Path) -> None:
    """Links to files and folders, folders in a file's place, FIFOs."""
    llm, precious = load(tiny(), False, **LARGE), tmp_path / "elsewhere" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("keep me")
    read(llm, cache)
    (kept,) = cache.entries()
    names = [f"{kept.weights}-{kept.settings}-300-0000000{i}.state" for i in range(3)]
    (cache.folder / names[0]).symlink_to(precious)
    os.mkfifo(cache.folder / names[1])
    (cache.folder / names[2]).mkdir()
    (cache.folder / "writing-x").symlink_to(precious)
    (cache.folder / "writing-y").symlink_to(precious.parent)
    os.utime(precious, (1000, 1000))

    assert [entry.path for entry in cache.entries()] == [kept.path]
    llm.reset()
    assert cache.restore(llm, TEXT) == len(TEXT)
    read(llm, cache, [9, *TEXT])  # which prunes
    assert cache.clear() > 0 and cache.entries() == []
    assert precious.read_text() == "keep me"
    assert {path.name for path in cache.folder.iterdir()} == {*names, "writing-x", "writing-y"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_neither_read_nor_removed(tiny: Tiny, load: Load, cache: PromptCache) -> None:
    llm = load(tiny(), False, **LARGE)
    read(llm, cache)
    (entry,) = cache.entries()
    os.chown(entry.path, 12345, 12345)
    llm.reset()
    assert cache.restore(llm, TEXT) == 0 and cache.clear() == 0 and entry.path.exists()
    llm.eval(TEXT)
    assert not cache.keep(llm, TEXT, {}) and os.stat(entry.path).st_uid == 12345


def test_a_name_that_utf8_does_not_have_is_kept(tiny: Tiny, load: Load, cache: PromptCache) -> None:
    llm, name = load(tiny(), False, **LARGE), os.fsdecode(b"caf\xe9.txt")
    llm.eval(TEXT)
    assert cache.keep(llm, TEXT, {"documents": [name]}) and cache.entries()[0].about["documents"] == [name]


def test_a_folder_that_cannot_be_is_a_warning(tiny: Tiny, load: Load, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    cache = PromptCache(tmp_path / "file" / "prompts", BIG)
    llm = load(tiny(), False, **LARGE)
    read(llm, None)
    assert cache.entries() == [] and cache.restore(llm, TEXT) == 0
    assert not cache.keep(llm, TEXT, {})
    assert any("is not kept in" in record.getMessage() for record in caplog.records)
    assert llm.n_tokens == len(TEXT)


def test_a_number_that_is_none_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("PYPCD_CACHE_GIB", "much")
    with pytest.raises(ValueError, match="PYPCD_CACHE_GIB is 'much'"):
        PromptCache()
    monkeypatch.setenv("PYPCD_CACHE_GIB", "0.5")
    assert PromptCache().limit == 2**29


def test_progress_counts_the_tokens_of_a_long_prompt(tiny: Tiny, load: Load) -> None:
    seen: list[tuple[int, int]] = []
    llm = load(tiny(), False, **LARGE, n_batch=100, progress=lambda done, n: seen.append((done, n)))
    llm.eval(TEXT[:250])
    assert seen == [(100, 250), (200, 250), (250, 250)]
    llm.eval(TEXT[:30])
    assert len(seen) == 3, "one batch"

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    llm.reset()
    llm.progress = stop
    with pytest.raises(KeyboardInterrupt):
        llm.eval(TEXT[:250])
    assert llm.n_tokens == 100
    llm.progress = None
    llm.eval(TEXT[100:250])
    stopped = engine.row(llm)
    llm.reset()
    llm.eval(TEXT[:250])
    np.testing.assert_allclose(engine.row(llm), stopped, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="progress is 'yes'; allowed: a function"):
        load(tiny(), False, progress="yes")
