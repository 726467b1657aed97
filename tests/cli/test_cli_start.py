"""How a command starts: its imports, help, what is said of a mistake, and shell completion."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest
from conftest import run_python

from pypcd.cli import COMMANDS, main, make_parser

HEAVY = {"llama_cpp", "numpy", "gguf", "jinja2", "rich", "prompt_toolkit", "shtab", "pypcd.llama"}
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chta"], "pypcd: error: there is no command 'chta' (did you mean 'chat'?); the commands: chat, generate,"),
        (["qqqq"], "pypcd: error: there is no command 'qqqq'; the commands: chat, generate,"),
        (["chat", "m.gguf", "--sytem=x"], "pypcd chat: error: there is no option --sytem (did you mean '--system'?)"),
        (["eval", "m.gguf", "--qqqqq"], "pypcd eval: error: there is no option --qqqqq; 'pypcd eval --help' lists"),
        (["chat", "m.gguf", "n.gguf"], "pypcd chat: error: unexpected argument 'n.gguf'"),
        (
            ["salience", "m.gguf"],
            "'pypcd salience' left the package; in a clone of its repository: python -m research.salience",
        ),
        (
            ["lab", "plot", "decay"],
            "'pypcd lab' left the package; in a clone of its repository: python -m research.NAME",
        ),
        (
            ["eval", "m.gguf", "--paper", "table1"],
            "--paper left the package; in a clone of its repository: python -m research.eval",
        ),
        (["demo", "--question"], "pypcd demo K"),
        (["demo", "--pcd=window"], "pypcd eval demo measures"),
        (["demo", "--n=3"], "--n"),
        (["explain", "demo", "-p", "x", "-f", "y"], "not allowed with argument -p"),
        (["explain", "demo", "-p", "x", "--question", "kv-short:240:1"], "not allowed with argument -p"),
        (["explain", "demo", "-p", "x", "--picture", "a.png"], "commit 2e7ce90 draws it"),
        (["explain", "demo", "-p", "x", "--html=a.html"], "--html left the package; --json has all of it"),
        (["--nope"], "pypcd: error: there is no option --nope; the commands: chat, generate,"),
        ([], "usage: pypcd [-h] [--version] COMMAND ...\n\nBetter answers from long prompts"),
    ],
)
def test_what_is_misspelt_is_said_with_what_was_meant(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(args)
    out, err = capsys.readouterr()
    assert leaving.value.code == 2 and out == "" and message in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("chat none.gguf", "there is no model file none.gguf"),
        ("generate none.gguf -p ''", "the prompt is empty"),
        ("generate none.gguf -p x --pcd betta=1", "did you mean 'beta'"),
        ("generate none.gguf -p x --temp hot", "temperature is 'hot'"),
        ("generate demo -p '{long}' --n-ctx 256", "--n-ctx"),
        ("info {self}", "is not a GGUF file"),
        ("answer demo -p why --method replya", "did you mean 'replay'"),
        ("answer demo -p why --method ''", "--method is empty"),
        ("answer demo -p why --context nowhere.txt", "nowhere.txt: No such file or directory"),
        ("answer demo --n-ctx 256 -p '{long}'", "tokens do not fit in the context of 256; give a larger --n-ctx"),
        ("explain demo -p ''", "the prompt is empty"),
        ("explain demo -p x --pcd off", "--pcd is off"),
        ("explain demo --question kv-short", "--question is 'kv-short'; allowed: a task"),
        ("explain demo --question kv-short:240,480:1", "allowed: a task, a length and an index"),
        ("explain demo --question kv-short:240:300", "integer from 0 to 299"),
        ("explain demo -f /none/such", "/none/such: No such file"),
        ("explain demo -p x --gold ''", "gold is empty"),
        ("explain demo -p '{long}' --n-ctx 256", "give a larger --n-ctx"),
        ("eval none.gguf", "there is no model file"),
        ("eval demo --task kw", "kw"),
        ("eval demo --method pdc", "did you mean"),
        ("eval demo --length abc", "--length has 'abc'"),
        ("eval demo --task kv-short --length 20", "n_tokens is 20; allowed: at least"),
        ("eval demo --task kv-short --length 250 --method pcd:paper:beta=-1", "beta is -1"),
        ("eval demo --task kv-short,everyday --length 200", "give --n"),
    ],
)
def test_what_the_user_can_mend_is_said(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.format(long="ba " * 900, self=Path(__file__).resolve()) for word in shlex.split(command)]
    is_mistyped = "256" not in words and words[0] != "info"  # else it does not fit, or the file's content is wrong
    assert main(words) == (2 if is_mistyped else 1)
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
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
        first = lines.index("commands:") + 1
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


# -- completion ------------------------------------------------------------------------------------------------------


def script(shell: str) -> str:
    command = [sys.executable, "-m", "pypcd", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "pypcd"
    path.write_text(script("bash"))
    return path


def options() -> dict[str, set[str]]:
    """The options that each command's help shows."""
    _, commands = make_parser(COMMANDS)
    shown = {name: [a for a in sub._actions if a.help != argparse.SUPPRESS] for name, sub in commands.items()}
    return {name: {option for a in actions for option in a.option_strings} for name, actions in shown.items()}


def completed(bash: Path, folder: Path, line: str) -> list[str]:
    """The completions that bash itself offers for the last word of a line."""
    words = line.split(" ")
    quoted = " ".join(f'"{word}"' for word in words)
    code = f"""
        source "{bash}"
        function_name=$(complete -p pypcd | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}
        $function_name pypcd "{words[-1]}" "{words[-2]}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    run = ["bash", "--norc", "--noprofile", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=folder, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_models(bash: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(bash)], check=True)
    assert set(completed(bash, tmp_path, "pypcd ")) == set(COMMANDS)
    assert completed(bash, tmp_path, "pypcd ch") == ["chat"]
    for command, names in options().items():
        assert set(completed(bash, tmp_path, f"pypcd {command} -")) >= names, command
    (tmp_path / "m.gguf").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert completed(bash, tmp_path, "pypcd chat ") == ["m.gguf"]
    assert set(completed(bash, tmp_path, "pypcd answer m.gguf --context ")) == {"m.gguf", "notes.txt"}
    assert completed(bash, tmp_path, "pypcd bench m.gguf --flash-attn o") == ["on", "off"]


def test_the_zsh_script_has_all_commands_and_options() -> None:
    text = script("zsh")
    assert text.startswith("#compdef pypcd")
    for command, names in options().items():
        assert f"\n    {command.rpartition(' ')[2]}:'" in text and all(name in text for name in names)
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", "/dev/stdin"], input=text, text=True, check=True)
