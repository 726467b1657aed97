"""How a command starts: its imports, help, and what is said of a mistake."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import llama_cpp
import pytest
from conftest import run_python

from pypcd.cli import COMMANDS, main

HEAVY = {"llama_cpp", "numpy", "gguf", "jinja2", "rich", "prompt_toolkit", "pypcd.llama"}
MODULES = """if True:
    import sys
    import pypcd
    before = set(sys.modules)
    from pypcd.cli import main
    try:
        main(sys.argv[1:])
    except SystemExit:
        pass
    print("imported:", *sorted(set(sys.modules) - before))"""


def imported(*args: str) -> set[str]:
    """The modules that a command imports beyond those of `import pypcd`."""
    done = run_python(MODULES, *args)
    assert done.stdout, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["chta"], []])
def test_help_version_and_mistakes_import_no_command(args: list[str]) -> None:
    new = imported(*args)
    assert not new & HEAVY
    assert {name for name in new if name.startswith("pypcd.cli.")} <= {"pypcd.cli._terminal", "pypcd.cli._text"}
    assert not any(name.startswith(("pypcd.evaluation", "research", "pypcd.decode")) for name in new)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_only_the_chosen_command_is_imported(command: str) -> None:
    new = imported(command, "--help")
    assert f"pypcd.cli.{command}" in new
    assert not {f"pypcd.cli.{name}" for name in COMMANDS} & new - {f"pypcd.cli.{command}"}
    assert not any(name.startswith("pypcd.evaluation") for name in new)


COMMANDS_ARE = "the commands: chat, generate,"
LEFT = "left the package; in a clone of its repository: python -m research"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chta", f"pypcd: error: there is no command 'chta' (did you mean 'chat'?); {COMMANDS_ARE}"),
        ("qqqq", f"pypcd: error: there is no command 'qqqq'; {COMMANDS_ARE}"),
        ("--nope", f"pypcd: error: there is no option --nope; {COMMANDS_ARE}"),
        ("", "usage: pypcd [-h] [--version] COMMAND ...\n\nBetter answers from long prompts"),
        ("chat m.gguf --sytem=x", "pypcd chat: error: there is no option --sytem (did you mean '--system'?)"),
        ("eval m.gguf --qqqqq", "pypcd eval: error: there is no option --qqqqq; 'pypcd eval --help' lists"),
        ("chat m.gguf n.gguf", "pypcd chat: error: unexpected argument 'n.gguf'"),
        # what has moved
        ("salience m.gguf", f"'pypcd salience' {LEFT}.salience"),
        ("explain demo -p x", f"'pypcd explain' {LEFT}.explain"),
        ("completion bash", "'pypcd completion' left the package; commit 2e7ce90 makes the script"),
        ("eval m.gguf --paper table1", f"--paper {LEFT}.eval"),
        ("eval m.gguf --type-k=q8_0", "--type-k is a part of a method now: --method greedy+kv:q8_0:q8_0"),
        ("demo --question", "pypcd demo K"),
        ("demo --pcd=window", "pypcd eval demo measures"),
        ("demo --n=3", "--n"),
        # values
        ("chat none.gguf", "there is no model file none.gguf"),
        ("chat demo --read no", "read is 'no'; allowed: "),
        ("generate none.gguf -p ''", "the prompt is empty"),
        ("generate none.gguf -p x --pcd betta=1", "did you mean 'beta'"),
        ("generate none.gguf -p x --temp hot", "temperature is 'hot'"),
        ("generate none.gguf -p x --temp nan", "temperature is nan"),
        ("generate none.gguf -p x --top-p 2", "top_p is 2"),
        ("generate none.gguf -p x --top-k 1.5", "top_k is 1.5"),
        ("generate demo -p '{long}' --n-ctx 256", "do not fit in the context of 256; give a larger --n-ctx"),
        ("info {self}", "is not a GGUF file"),
        ("answer demo -p why --method replya", "did you mean 'replay'"),
        ("answer demo -p why --method ''", "--method is empty"),
        ("answer demo -p why --context nowhere.txt", "nowhere.txt: No such file or directory"),
        ("answer demo --n-ctx 256 -p '{long}'", "tokens do not fit in the context of 256; give a larger --n-ctx"),
        ("compare demo nowhere.jsonl", "nowhere.jsonl: No such file"),
        ("compare demo asked.jsonl --method ''", "--method is empty"),
        ("mcp demo {self}", "is no folder; allowed: folders of documents"),
        ("mcp none.gguf .", "there is no model file none.gguf"),
        ("demo 301", "question 301 is none of the demo's; allowed: 1 to 300"),
        ("bench demo --length x", "--length has 'x'; allowed: "),
        ("bench demo --length 3", "--length has '3'; allowed: "),
        ("bench demo --rounds 0", "argument --rounds: '0'; allowed: "),
        ("bench demo --n-tokens 1", "argument --n-tokens: '1'; allowed: "),
        ("bench demo --threads -1", "argument --threads: '-1'; allowed: "),
        ("eval none.gguf", "there is no model file"),
        ("eval demo --task kw", "kw"),
        ("eval demo --method pdc", "did you mean"),
        ("eval demo --method greedy+kv:q9", "k is 'q9'"),
        ("eval demo --length abc", "--length has 'abc'"),
        ("eval demo --task kv-short --length 20", "n_tokens is 20; allowed: at least"),
        ("eval demo --task kv-short --length 250 --method pcd:paper:beta=-1", "beta is -1"),
        ("eval demo --task kv-short,everyday --length 200", "give --n"),
        ("tune demo --profile nowhere/x.json", "there is no folder nowhere"),
    ],
)
def test_a_mistake_is_said_with_what_was_meant(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asked.jsonl").write_text('{"question": "Why?"}')
    words = [word.format(long="ba " * 900, self=Path(__file__).resolve()) for word in shlex.split(line)]
    try:
        status = main(words)
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    is_mistyped = "256" not in words and words[:1] != ["info"]  # else it does not fit, or the file's content is wrong
    assert (status, out) == (2 if is_mistyped else 1, "") and message in err and "Traceback" not in err
    assert not list(tmp_path.rglob("samples.jsonl"))


def test_a_library_that_is_not_pypcds_is_one_sentence() -> None:
    stock = str(Path(llama_cpp.__file__).parent / "lib")
    code = "import runpy; runpy.run_module('pypcd', run_name='__main__', alter_sys=True)"
    done = run_python(f"import sys; sys.argv = ['pypcd', 'info', '--no-test']; {code}", LLAMA_CPP_LIB_PATH=stock)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("pypcd: the loaded .* has no PCD hooks .*; unset LLAMA_CPP_LIB_PATH.*\n", done.stderr)


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_any_encoding(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert text.startswith("usage: pypcd") and text.isascii()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    if not command:  # each command is one line
        first = lines.index("commands:") + 2
        assert [line.split()[0] for line in lines[first : first + len(COMMANDS)]] == list(COMMANDS)


def test_the_lists_of_commands_wrap_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60
    assert all(f"{name} {what}" in " ".join(text.split()) for name, what in COMMANDS.items())


def test_a_method_of_research_is_named_with_its_program() -> None:
    code = "from pypcd.cli import main; main(['answer', 'demo', '-p', 'why', '--method', 'segr'])"
    done = run_python(code)
    said = " ".join(done.stderr.split())
    assert "no method 'segr'" in said and "python -m research.eval, in a clone of pypcd's repository, has those" in said
