"""scripts/consumers.py, with a fake pip: what is installed where and when, what is skipped; its table against docs/recipes.md."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from fake_pip import ROOT, Project  # it puts scripts/ on the path

import consumers  # isort: skip

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")

PAGE = ROOT / "docs" / "recipes.md"
WHEEL = "pypcd-0.1.0-py3-none-any.whl"
NEEDED = " ".join(consumers.NEEDED)
FRESH = f"install --force-reinstall --no-deps ROOT/.cache/wheel/{WHEEL}"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = {
        "one": consumers.Consumer("quick", ("one==1",)),
        "two": consumers.Consumer("quick", ("two==2", "more==3")),
        "three": consumers.Consumer("other", ("three==3",)),
        "new": consumers.Consumer("quick", ("new==1",), (99, 0)),
    }
    monkeypatch.setattr(consumers, "CONSUMERS", made)
    return made


@pytest.fixture
def ready(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with the wheel of pypcd and an environment that has nothing in it yet."""
    project.change(f".cache/wheel/{WHEEL}", "a wheel")
    project.make_venv(".venv-quick")
    project.change(".venv-quick/bin/pytest", f'#!/bin/sh\necho "$@" >>"{project.root}/tests"\n').chmod(0o755)
    monkeypatch.setattr(consumers, "ROOT", project.root)
    return project


def prepare(ready: Project, *names: str) -> list[str]:
    """What pip was asked."""
    consumers.prepare(ready.root, "quick", names, io.StringIO())
    return ready.calls()


def wanted(*requires: str) -> list[str]:
    return [FRESH, " ".join([f"install ROOT/.cache/wheel/{WHEEL}", NEEDED, *requires])]


def test_words_stand_for_names_for_quick_ones_and_none_for_all(table: dict[str, Any]) -> None:
    assert consumers.chosen([]) == ["one", "two", "three", "new"]
    assert consumers.chosen(["quick"]) == ["one", "two", "new"]
    assert consumers.chosen(["three", "one"]) == ["one", "three"]
    with pytest.raises(consumers.Failed, match="the consumer is 'four'; allowed: quick, one, two, three, new"):
        consumers.chosen(["four"])


def test_pypcds_wheel_and_the_packages_are_installed_once(ready: Project, table: dict[str, Any]) -> None:
    assert prepare(ready, "one") == wanted("one==1")
    assert prepare(ready, "one") == []


def test_what_was_asked_for_before_stays(ready: Project, table: dict[str, Any]) -> None:
    prepare(ready, "two")
    assert prepare(ready, "one") == wanted("one==1", "two==2", "more==3")
    assert prepare(ready, "two") == []


def test_another_wheel_and_another_version_are_installed(ready: Project, table: dict[str, Any]) -> None:
    prepare(ready, "one")
    ready.change(f".cache/wheel/{WHEEL}", "another one")
    assert prepare(ready, "one") == wanted("one==1")
    table["one"] = table["one"]._replace(requires=("one==2",))
    assert prepare(ready, "one") == wanted("one==2")


def test_without_a_wheel_it_is_said_who_makes_one(project: Project, table: dict[str, Any]) -> None:
    with pytest.raises(consumers.Failed, match="there is no wheel of pypcd in .cache/wheel; scripts/install makes one"):
        consumers.prepare(project.root, "quick", ["one"], io.StringIO())


def run(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["consumers.py", *words])
    return int(consumers.main())


def test_tests_of_what_is_installed_run_and_the_rest_is_named(
    ready: Project, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quick", "--", "-k", "x", monkeypatch=monkeypatch) == 0
    assert (ready.root / "tests").read_text() == "tests/consumers/test_one.py tests/consumers/test_two.py -k x\n"
    version = ".".join(map(str, sys.version_info[:2]))
    assert f"skipped: new: it needs Python 99.0, this is {version}\n" in capsys.readouterr().err


def test_what_cannot_be_installed_is_skipped_with_pips_reason(
    ready: Project, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready.change("fail")  # pip says: error: it does not compile
    assert run("one", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().err.endswith("skipped: one: it does not compile\n")
    assert not (ready.root / "tests").exists()
    (ready.root / "fail").unlink()
    ready.calls()
    assert prepare(ready, "one") == wanted("one==1"), "half an installation is none"


def test_what_is_missing_of_pypcd_is_no_reason_to_skip(
    ready: Project, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (ready.root / ".cache/wheel" / WHEEL).unlink()
    assert run("one", monkeypatch=monkeypatch) == 1
    assert "there is no wheel of pypcd" in capsys.readouterr().err


def test_tests_that_fail_fail(
    ready: Project, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready.change(".venv-quick/bin/pytest", "#!/bin/sh\nexit 1\n").chmod(0o755)
    assert run("one", monkeypatch=monkeypatch) == 1
    assert capsys.readouterr().err.endswith("failed: in .venv-quick\n")


def test_a_name_that_is_not_in_the_table_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("langchian", monkeypatch=monkeypatch) == 2
    assert "the consumer is 'langchian'; allowed: quick, guidance" in capsys.readouterr().err


# -- the table and the page -------------------------------------------------------------------------------------------

NAMED = {"webuis": ["text-generation-webui", "Open WebUI"]}  # where a page says something else than the table


def headings() -> list[str]:
    return re.findall(r"(?m)^### (.*)$", PAGE.read_text(encoding="utf-8"))


def test_each_consumer_has_its_recipe_and_its_tests_and_no_recipe_is_without() -> None:
    found = [name for consumer in consumers.CONSUMERS for name in NAMED.get(consumer, [consumer])]
    assert sorted(re.sub(r"\W", "", name).lower() for name in found) == sorted(
        re.sub(r"\W", "", heading).lower() for heading in headings()
    )
    for consumer in consumers.CONSUMERS:
        assert (ROOT / consumers.module_of(consumer)).is_file()


def test_no_recipe_has_more_than_ten_lines() -> None:
    blocks = re.findall(r"(?ms)^```\w+\n(.*?)^```", PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= len(headings())
    for block in blocks:
        assert sum(bool(line.strip()) for line in block.splitlines()) <= 10, block


def test_each_version_is_pinned() -> None:
    for consumer in consumers.CONSUMERS.values():
        assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", text) for text in consumer.requires)


def test_the_ordinary_suite_skips_them_by_name() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import recipe; recipe.needs('no_such_package', 'dspy')"
    folders = [str(ROOT / "tests" / "consumers"), str(ROOT / "tests")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert "dspy is not installed; scripts/test --consumers dspy installs it" in done.stderr
