"""pypcd.install(): llama_cpp.Llama makes a pypcd.Llama, whoever asks, and uninstall() undoes it."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import Tiny, run_python
from llama_cpp import Llama as ImportedBefore

import pypcd

ROOT = Path(__file__).resolve().parents[2]

PCD = pypcd.PCDConfig(beta=1.5, gamma=5)
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
STOCK_INIT = llama_cpp.Llama.__init__


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    pypcd.uninstall()
    assert llama_cpp.Llama.__init__ is STOCK_INIT and "__new__" not in vars(llama_cpp.Llama)


def made(*args: Any, **kwargs: Any) -> Any:
    """What a framework makes."""
    return ImportedBefore(*map(str, args), **{**SMALL, "verbose": False, **kwargs})


def test_the_class_that_was_imported_before_makes_a_pypcd_llama(tiny: Tiny) -> None:
    """With the rows and the text of pypcd.Llama with that setting."""
    pypcd.install(PCD)
    llm = made(tiny("llama"))
    assert type(llm) is pypcd.Llama and isinstance(llm, ImportedBefore) and issubclass(pypcd.Llama, ImportedBefore)
    assert llm.pcd == PCD
    answers = []
    for each in (llm, pypcd.Llama(tiny("llama"), pcd=PCD, **SMALL), pypcd.Llama(tiny("llama"), **SMALL)):
        answers.append([token for token, _ in zip(each.generate([1, 5, 7], temp=0), range(20))])
    assert answers[0] == answers[1] != answers[2] and llm.pcd_logits().local is not None


def test_the_last_install_is_the_default_and_open_models_keep_theirs(tiny: Tiny) -> None:
    pypcd.install()
    assert made(tiny("llama")).pcd == pypcd.PCDConfig.resolve("unsure")
    pypcd.install(PCD)
    first = made(tiny("llama"))
    pypcd.install(False)
    third = made(tiny("llama"))
    assert type(third) is pypcd.Llama and third.pcd is None
    for _ in range(2):
        pypcd.uninstall()
    assert type(made(tiny("llama"), gpu=True)) is ImportedBefore
    first.eval([1, 2, 3])
    assert first.pcd == PCD and first.pcd_logits().local is not None


def test_a_pcd_of_the_callers_comes_first(tiny: Tiny) -> None:
    pypcd.install(PCD)
    assert made(tiny("llama"), pcd="window").pcd == pypcd.PCDConfig.resolve("window")
    assert made(tiny("llama"), pcd=False).pcd is None
    assert made(tiny("llama"), pcd="window", engine="stock").engine == "stock"
    assert made(tiny("llama"), pcd=None).pcd == PCD
    with pytest.raises(ValueError, match="pcd is 'widow', which is not a setting"):
        made(tiny("llama"), pcd="widow")


@pytest.mark.parametrize(
    ("setting", "error"),
    [("unsuer", ValueError), ({"bta": 1}, TypeError), (3, TypeError), ("a.json", OSError)],
)
def test_a_wrong_setting_is_refused_at_once_and_changes_nothing(setting: Any, error: type, tiny: Tiny) -> None:
    with pytest.raises(error):
        pypcd.install(setting)
    assert llama_cpp.Llama.__init__ is STOCK_INIT
    pypcd.install(PCD)
    with pytest.raises(error):
        pypcd.install(setting)
    assert made(tiny("llama")).pcd == PCD


def test_class_methods_make_one_too(tiny: Tiny, hub: None) -> None:
    pypcd.install(PCD)
    llm = ImportedBefore.from_pretrained("someone/something", "*.gguf", **SMALL)
    assert type(llm) is pypcd.Llama and llm.pcd == PCD


# --- keywords ---


def test_unknown_keywords_are_one_warning_that_names_them(tiny: Tiny) -> None:
    pypcd.install(PCD)
    with pytest.warns(UserWarning, match="'gpu', 'n_ctxx'; ignored") as seen:
        llm = made(tiny("llama"), gpu=True, n_ctxx=3)
    assert len(seen) == 1 and seen[0].filename == __file__ and llm.pcd == PCD
    with warnings.catch_warnings():  # what llama_cpp had once, and changes nothing; a tokenizer alone
        warnings.simplefilter("error")
        made(tiny("llama"), n_parts=-1, f16_kv=True, mul_mat_q=True)
        assert made(tiny("llama"), vocab_only=True).tokenize(b"a")


# --- models and classes that decode plainly ---


def test_a_model_for_embeddings_or_that_cannot_run_it_decodes_plainly_and_says_so(tiny: Tiny) -> None:
    pypcd.install("paper")
    with pytest.warns(UserWarning, match="gguf decodes plainly: it is opened for embeddings"):
        llm = made(tiny("llama"), embedding=True)
    assert type(llm) is pypcd.Llama and llm.pcd is None and len(llm.embed("a"))
    with pytest.warns(UserWarning, match=r"gguf decodes plainly: PCD \(paper\) cannot run here: ") as seen:
        llm = made(tiny("mamba"))
    assert llm.pcd is None and seen[0].filename == __file__
    with pytest.raises(pypcd.UnsupportedError):
        made(tiny("mamba"), pcd="paper")


def test_a_class_of_others_stays_theirs_and_one_of_pypcds_too(tiny: Tiny) -> None:
    class Theirs(ImportedBefore):
        pass

    class Ours(pypcd.Llama):
        pass

    pypcd.install(PCD)
    with pytest.warns(
        UserWarning, match="Theirs is derived from llama_cpp.Llama and decodes plainly; derive it from"
    ) as s:
        llm = Theirs(str(tiny("llama")), verbose=False, **SMALL)
    assert type(llm) is Theirs and len(s) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Ours(tiny("llama"), **SMALL).pcd is None
        assert pypcd.Llama(tiny("llama"), **SMALL).pcd is None


# --- a class like any other ---


def test_copies_and_pickles(tiny: Tiny) -> None:
    before = made(tiny("llama"))
    old = pickle.dumps(before)
    pypcd.install(PCD)
    llm = made(tiny("llama"))
    new = pickle.dumps(llm)
    for again in (copy.copy(llm), pickle.loads(new), copy.copy(before), pickle.loads(old)):
        assert type(again) is pypcd.Llama and again.pcd == PCD
    llm.pcd = False
    assert copy.copy(llm).pcd is None, "it was turned off"
    pypcd.uninstall()
    assert pickle.loads(new).pcd == PCD and type(pickle.loads(old)) is ImportedBefore


def test_a_wrapper_that_others_put_around_it_stays(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pypcd.install(PCD)
    inner = llama_cpp.Llama.__init__
    traced = functools.wraps(inner)(lambda self, *args, **kwargs: inner(self, *args, **kwargs))
    monkeypatch.setattr(llama_cpp.Llama, "__init__", traced)
    assert made(tiny("llama")).pcd is not None
    pypcd.uninstall()
    assert llama_cpp.Llama.__init__ is traced and type(made(tiny("llama"))) is ImportedBefore
    pypcd.install(PCD)
    assert type(made(tiny("llama"))) is pypcd.Llama
    monkeypatch.undo()


# --- before llama_cpp is imported; each in a process of its own ---


def runs(code: str, *args: Any, **environment: str) -> str:
    done = run_python(code, *args, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def start(tmp_path: Path) -> str:
    """Lines that run pypcd.pth as Python does when it starts: so programs get it that know nothing of pypcd."""
    shutil.copy(ROOT / "cmake/pypcd.pth", tmp_path)
    return f"import site; site.addsitedir({str(tmp_path)!r})\n"


@pytest.mark.parametrize(
    ("value", "before", "setting"),
    [
        ("", "pypcd.install('window'); assert not {'llama_cpp', 'numpy'} & set(sys.modules)", "window"),
        ("", "pypcd.install('window'); import pypcd.engine", "window"),
        ("window", "pypcd.Llama", "window"),
        ("window", "pass", "window"),
        ("1", "pass", "unsure"),
        ("Off", "pass", None),
        (" ", "pass", None),
        ("window", "pypcd.install('unsure')", "unsure"),  # what the program says comes first
        ("window", "pypcd.uninstall()", None),
        ("window", None, "window"),
    ],
)
def test_a_program_or_the_environment_installs_it(
    value: str, before: str | None, setting: str | None, start: str, tiny: Tiny
) -> None:
    """Before None: nothing of pypcd is in the program."""
    code = f"""if True:
        import sys
        {f"import pypcd; {before}" if before else start}
        from llama_cpp import Llama
        llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
        print(type(llm).__module__, getattr(llm, "pcd", ""))"""
    wanted = f"pypcd.llama {pypcd.PCDConfig.resolve(setting)}" if setting else "llama_cpp.llama "
    assert runs(code, tiny("llama"), PYPCD=value) == f"{wanted}\n"


IS_THERE = """if True:
    import sys
    print(*sorted(name for name in sys.modules if 'pypcd' in name or 'llama' in name))
    print(*(type(finder).__module__ for finder in sys.meta_path if 'pypcd' in type(finder).__module__))"""


def test_unset_it_imports_nothing_and_set_it_imports_the_finder_alone(start: str) -> None:
    """Whatever a program's arguments are."""
    for value in ("", " 0"):
        assert runs(start + IS_THERE, "--model", "pypcd", PYPCD=value) == "\n\n"
    wanted = "pypcd pypcd.integrations pypcd.integrations.finder\npypcd.integrations.finder\n"
    assert runs(start + IS_THERE, PYPCD="nonsense") == wanted


def test_a_wrong_value_is_one_sentence_when_llama_cpp_is_imported(start: str) -> None:
    """Whether the program knows pypcd or not."""
    for first, value in (("import pypcd\n", "nowhere.json"), (start, "unsuer")):
        done = run_python(f"{first}print('fine')\nimport llama_cpp", PYPCD=value)
        assert (done.returncode, done.stdout, done.stderr.count("Traceback")) == (1, "fine\n", 1)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("pypcd.errors.InputError: the environment variable PYPCD ") and "unset it" in last
