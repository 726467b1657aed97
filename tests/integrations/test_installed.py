"""pypcd.install(): llama_cpp.Llama makes a pypcd.Llama, whoever asks, and uninstall() undoes it."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import types
import venv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import llama_cpp
import pytest
from conftest import run_python
from llama_cpp import Llama as ImportedBefore

import pypcd
from pypcd import library

ROOT = Path(__file__).resolve().parents[2]
Tiny = Callable[..., Path]

PCD = {"beta": 1.5, "gamma": 5}
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
    pypcd.install(PCD)
    llm = made(tiny("llama"))
    assert type(llm) is pypcd.Llama and isinstance(llm, ImportedBefore) and issubclass(pypcd.Llama, ImportedBefore)
    assert llm.pcd == pypcd.PCDConfig(**PCD)
    llm.eval([1, 2, 3])
    assert llm.pcd_logits().local is not None


def test_its_text_is_that_of_pypcd_llama_with_the_setting(tiny: Tiny) -> None:
    pypcd.install(PCD)
    answers = []
    for llm in (made(tiny("llama")), pypcd.Llama(tiny("llama"), pcd=PCD, **SMALL), pypcd.Llama(tiny("llama"), **SMALL)):
        answers.append([token for token, _ in zip(llm.generate([1, 5, 7], temp=0), range(20))])
    assert answers[0] == answers[1] != answers[2]


def test_gentle_is_the_default(tiny: Tiny) -> None:
    pypcd.install()
    assert made(tiny("llama")).pcd == pypcd.PCDConfig.resolve("gentle")


def test_installing_again_changes_the_default_and_open_models_keep_theirs(tiny: Tiny) -> None:
    pypcd.install(PCD)
    first = made(tiny("llama"))
    pypcd.install("window")
    second = made(tiny("llama"))
    pypcd.install(False)
    third = made(tiny("llama"))
    assert (first.pcd, second.pcd) == (pypcd.PCDConfig(**PCD), pypcd.PCDConfig.resolve("window"))
    assert type(third) is pypcd.Llama and third.pcd is None
    pypcd.uninstall()
    assert first.pcd == pypcd.PCDConfig(**PCD)
    first.eval([1, 2, 3])
    assert first.pcd_logits().local is not None


def test_uninstalled_it_makes_stock_objects(tiny: Tiny) -> None:
    pypcd.uninstall()
    pypcd.install(PCD)
    pypcd.uninstall()
    pypcd.uninstall()
    llm = made(tiny("llama"), gpu=True)
    assert type(llm) is ImportedBefore and not hasattr(llm, "pcd")


def test_a_pcd_of_the_callers_comes_first(tiny: Tiny) -> None:
    pypcd.install(PCD)
    assert made(tiny("llama"), pcd="window").pcd == pypcd.PCDConfig.resolve("window")
    assert made(tiny("llama"), pcd=False).pcd is None
    assert made(tiny("llama"), pcd=None).pcd == pypcd.PCDConfig(**PCD)
    with pytest.raises(ValueError, match="pcd is 'widow', which is not a setting"):
        made(tiny("llama"), pcd="widow")


@pytest.mark.parametrize(
    ("setting", "error"),
    [("gentel", ValueError), ({"bta": 1}, TypeError), (3, TypeError), ("beta=-1", ValueError), ("a.json", OSError)],
)
def test_a_wrong_setting_is_refused_at_once_and_changes_nothing(setting: Any, error: type, tiny: Tiny) -> None:
    with pytest.raises(error):
        pypcd.install(setting)
    assert llama_cpp.Llama.__init__ is STOCK_INIT
    pypcd.install(PCD)
    with pytest.raises(error):
        pypcd.install(setting)
    assert made(tiny("llama")).pcd == pypcd.PCDConfig(**PCD)


def test_class_methods_make_one_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub(types.ModuleType):  # huggingface_hub
        HfFileSystem = staticmethod(lambda: types.SimpleNamespace(ls=lambda *_, **__: ["a/b/m.gguf"]))
        hf_hub_download = staticmethod(lambda **_: str(tiny("llama")))
        validate_repo_id = staticmethod(lambda _: None)

    for name in ("huggingface_hub", "huggingface_hub.utils"):
        monkeypatch.setitem(sys.modules, name, Hub(name))
    pypcd.install(PCD)
    llm = ImportedBefore.from_pretrained("a/b", "*.gguf", **SMALL)
    assert type(llm) is pypcd.Llama and llm.pcd == pypcd.PCDConfig(**PCD)


# --- keywords ---


def test_unknown_keywords_are_one_warning_that_names_them(tiny: Tiny) -> None:
    pypcd.install(PCD)
    with pytest.warns(UserWarning, match="Llama has no argument 'gpu', 'n_ctxx'; ignored") as seen:
        llm = made(tiny("llama"), gpu=True, n_ctxx=3)
    assert len(seen) == 1 and seen[0].filename == __file__ and llm.pcd == pypcd.PCDConfig(**PCD)
    with pytest.raises(TypeError, match="Llama has no argument 'gpu'"):
        pypcd.Llama(tiny("llama"), gpu=True)


def test_what_llama_cpp_had_once_is_silent_where_it_changes_nothing(tiny: Tiny) -> None:
    pypcd.install(PCD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(tiny("llama"), n_parts=-1, f16_kv=True, mul_mat_q=True)
    with pytest.warns(UserWarning, match="no argument 'f16_kv'"):
        made(tiny("llama"), f16_kv=False)


# --- models and classes that decode plainly ---


def test_an_embedding_model_decodes_plainly_and_says_so(tiny: Tiny) -> None:
    pypcd.install(PCD)
    with pytest.warns(UserWarning, match="gguf decodes plainly: it is opened for embeddings"):
        llm = made(tiny("llama"), embedding=True)
    assert type(llm) is pypcd.Llama and llm.pcd is None and len(llm.embed("a"))


def test_a_tokenizer_alone_is_no_reason_to_warn(tiny: Tiny) -> None:
    pypcd.install(PCD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(tiny("llama"), vocab_only=True).tokenize(b"a")


def test_a_model_that_cannot_run_it_says_why(tiny: Tiny) -> None:
    pypcd.install("paper")
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
        Theirs(str(tiny("llama")), verbose=False, **SMALL)
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
        assert type(again) is pypcd.Llama and again.pcd == pypcd.PCDConfig(**PCD)
    llm.pcd = False
    assert copy.copy(llm).pcd is None, "it was turned off"
    pypcd.uninstall()
    assert pickle.loads(new).pcd == pypcd.PCDConfig(**PCD) and type(pickle.loads(old)) is ImportedBefore


def test_it_shows_pypcds_parameters(tiny: Tiny) -> None:
    stock = inspect.signature(llama_cpp.Llama)
    pypcd.install(PCD)
    assert inspect.signature(llama_cpp.Llama) == inspect.signature(pypcd.Llama) != stock
    assert llama_cpp.Llama.__init__.__doc__ == pypcd.Llama.__doc__
    pypcd.uninstall()
    assert inspect.signature(llama_cpp.Llama) == stock


def test_a_wrapper_that_others_put_around_it_stays(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pypcd.install(PCD)
    inner, calls = llama_cpp.Llama.__init__, []

    @functools.wraps(inner)
    def traced(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(type(self))
        inner(self, *args, **kwargs)

    monkeypatch.setattr(llama_cpp.Llama, "__init__", traced)
    assert made(tiny("llama")).pcd is not None
    pypcd.uninstall()
    assert llama_cpp.Llama.__init__ is traced and type(made(tiny("llama"))) is ImportedBefore
    pypcd.install(PCD)
    assert type(made(tiny("llama"))) is pypcd.Llama and set(calls) == {ImportedBefore, pypcd.Llama}
    monkeypatch.undo()


def test_a_file_that_is_no_model_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    pypcd.install(PCD)
    (tmp_path / "m.gguf").write_text("no")
    with pytest.raises(pypcd.ModelError):
        made(tmp_path / "m.gguf")


# --- before llama_cpp is imported; each in a process of its own ---


def runs(code: str, *args: Any, **environment: str) -> str:
    done = run_python(code, *args, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_imports_neither_llama_cpp_nor_numpy() -> None:
    code = "import sys, pypcd; pypcd.install(); pypcd.uninstall(); print({'llama_cpp', 'numpy'} & set(sys.modules))"
    assert runs(code) == "set()\n"


@pytest.mark.parametrize("calls", ["install('window')", "install(); pypcd.install('window')"])
def test_it_may_come_before_llama_cpp(calls: str, tiny: Tiny) -> None:
    code = f"""if True:
        import sys, pypcd
        pypcd.{calls}
        from llama_cpp import Llama
        llm = Llama(sys.argv[1], n_ctx=256, n_threads=1)
        print(type(llm).__module__, llm.pcd == pypcd.PCDConfig.resolve("window"))"""
    assert runs(code, tiny("llama")) == "pypcd.llama True\n"


@pytest.mark.parametrize(
    "first", ["pypcd.Llama", "from pypcd import Llama", "pypcd.pcd_sampler", "import pypcd.engine"]
)
def test_so_may_what_imports_llama_cpp_in_pypcd(first: str, tiny: Tiny) -> None:
    code = f"""if True:
        import inspect, sys, pypcd
        pypcd.install("window")
        {first}
        import llama_cpp
        print(llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1).pcd == pypcd.PCDConfig.resolve("window"))
        print(inspect.signature(llama_cpp.Llama) == inspect.signature(pypcd.Llama))"""
    assert runs(code, tiny("llama")) == "True\nTrue\n"
    assert runs(code.replace('pypcd.install("window")', "pass"), tiny("llama"), PYPCD="window") == "True\nTrue\n"


def test_a_wrong_one_is_refused_before_llama_cpp_is_imported() -> None:
    done = run_python("import pypcd; pypcd.install('gentel')")
    assert (
        "InputError: pcd is 'gentel', which is not a setting (did you mean 'gentle'?)" in done.stderr.splitlines()[-1]
    )


# --- the environment variable, where pypcd is imported ---

OPEN = """if True:
    import sys, pypcd
    pass
    from llama_cpp import Llama
    llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
    print(getattr(llm, "pcd", "stock"))"""


def test_the_environment_installs_it(tiny: Tiny) -> None:
    assert runs(OPEN, tiny("llama"), PYPCD="window") == f"{pypcd.PCDConfig.resolve('window')}\n"


@pytest.mark.parametrize("value", ["1", "True", "on"])
def test_on_in_the_environment_is_the_recommended_preset(value: str, tiny: Tiny) -> None:
    assert runs(OPEN, tiny("llama"), PYPCD=value) == f"{pypcd.PCDConfig.preset('gentle')}\n"


@pytest.mark.parametrize("value", ["", "0", "off", "Off", "false", " "])
def test_off_in_the_environment_is_nothing(value: str, tiny: Tiny) -> None:
    assert runs(OPEN, tiny("llama"), PYPCD=value) == "stock\n"


def test_what_the_program_says_comes_before_the_environment(tiny: Tiny) -> None:
    said = runs(OPEN.replace("pass", "pypcd.install('gentle')"), tiny("llama"), PYPCD="window")
    assert said == f"{pypcd.PCDConfig.resolve('gentle')}\n"
    said = runs(OPEN.replace("pass", "pypcd.uninstall()"), tiny("llama"), PYPCD="window")
    assert said == "stock\n"


@pytest.mark.parametrize("value", ["2", "gentel", "beta=x", "bta=2", "nowhere.json"])
def test_a_wrong_value_is_one_sentence_when_llama_cpp_is_imported(value: str) -> None:
    done = run_python("import pypcd; print('fine'); import llama_cpp", PYPCD=value)
    assert done.returncode == 1 and done.stdout == "fine\n"
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith("pypcd.errors.InputError: the environment variable PYPCD cannot be used: ")
        and "unset it" in last
    )
    assert done.stderr.count("Traceback") == 1


# --- in programs that know nothing of pypcd, by the file that Python runs when it starts ---


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with this one's packages, and pypcd.pth where the wheel puts it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    path = next(folder.glob("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    done = subprocess.run(
        [path, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        text=True,
        capture_output=True,
        check=True,
    )
    site = Path(done.stdout.strip())
    (site / "others.pth").write_text("\n".join(p for p in sys.path if p) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "cmake/pypcd.pth", site)
    beside, *others = library.library_dirs()
    if not beside.exists():  # a source checkout: its library is where this Python's packages are
        (site / "pypcd").mkdir()
        (site / "pypcd/lib").symlink_to(next(path for path in others if path.exists()))
    return path


def starts(python: Path, code: str, *args: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code, *map(str, args)],
        env={**env, **environment},
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
    )


IS_THERE = """if True:
    import sys
    print(*sorted(name for name in sys.modules if 'pypcd' in name or 'llama' in name))
    print(*(type(finder).__module__ for finder in sys.meta_path if 'pypcd' in type(finder).__module__))"""


def test_unset_it_imports_nothing_and_set_it_imports_the_finder_alone(python: Path) -> None:
    for value, seen in (
        ("", "\n\n"),
        ("off", "\n\n"),
        ("no", "\n\n"),
        (" 0", "\n\n"),
        ("gentle", "pypcd pypcd.finder\npypcd.finder\n"),
        ("nonsense", "pypcd pypcd.finder\npypcd.finder\n"),
    ):
        done = starts(python, IS_THERE, PYPCD=value)
        assert (done.returncode, done.stdout, done.stderr) == (0, seen, "")


@pytest.mark.parametrize(
    "words", [["install", "lm_eval"], ["uninstall", "lm-eval"], ["lm_eval"], ["--model", "pypcd"]], ids=" ".join
)
def test_unset_it_does_nothing_in_any_program(words: list[str], python: Path, tmp_path: Path) -> None:
    """Whatever a program is called, and whatever its arguments are."""
    program = tmp_path / "lm_eval"
    program.write_text(IS_THERE)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYPCD")}
    done = subprocess.run(
        [python, program, *words], env=environment, text=True, capture_output=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("\n\n", "")


@pytest.mark.parametrize(("value", "seen"), [("window", "window"), ("off", None), ("", None)])
def test_a_program_that_does_not_know_pypcd(value: str, seen: str | None, python: Path, tiny: Tiny) -> None:
    done = starts(python, OPEN.replace(", pypcd", ""), tiny("llama"), PYPCD=value)
    assert done.stderr == "" and done.stdout == f"{pypcd.PCDConfig.resolve(seen) if seen else 'stock'}\n"


def test_a_wrong_value_ends_such_a_program_with_one_sentence(python: Path) -> None:
    done = starts(python, "import llama_cpp", PYPCD="gentel")
    assert done.stderr.count("Traceback") == 1
    assert re.match(
        r"pypcd.errors.InputError: the environment variable PYPCD cannot be used: pcd is 'gentel'.*allowed: on, off, .*; or unset it",
        done.stderr.splitlines()[-1],
    )
