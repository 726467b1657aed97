"""The probe finds heads that were planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Load, Tiny

from pypcd.cli import main
from pypcd.evaluation import probe as module
from pypcd.evaluation.tasks.public import articles, reworded
from pypcd.find import Asked
from pypcd.find.attention import NULL
from pypcd.find.heads import heads_of

PARAGRAPH_OF = {
    text: p["context"].strip()
    for article in articles("first")
    for p in article
    for qa in p["qas"]
    for text in (qa["question"], reworded().get(qa["id"], ""))
    if text
}


def planted(good: dict[int, list[int]], seen: list[str]) -> Any:
    """Attention of three layers with four heads: the good ones pay to the paragraph of the question, if it stands there."""
    rng = np.random.default_rng(3)

    def attended(asked: Asked, question: str, heads: object = None) -> dict[int, np.ndarray]:
        texts = [segment.strip() for segment in asked.segments]
        seen.append(question)
        pays = {il: rng.uniform(0, 0.01, (4, len(texts))) for il in (0, 1, 4)}
        gold = PARAGRAPH_OF.get(question)
        is_found = gold in texts
        for il, some in good.items():
            pays[il][some, texts.index(gold) if is_found else 0] += 0.5 if is_found else 0.0
        return pays

    return attended


def test_planted_heads_are_found(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, seen, done = load(tiny("llama"), False), list[str](), list[tuple[int, int]]()
    good = {1: [0, 3], 4: [2]}
    monkeypatch.setattr(module, "N_HEADS", 3)
    monkeypatch.setattr(module, "attended", planted(good, seen))
    heads = module.probe(llm, lambda n, total: done.append((n, total)))
    assert heads == good
    n = 2 * 2 * 20
    assert done == [(i, n) for i in range(1, n + 1)] and len(seen) == n + 2 and seen.count(NULL) == 2
    other_words = set(reworded().values())
    assert len([question for question in seen if question in other_words]) >= 40
    second = {qa["question"] for article in articles("second") for p in article for qa in p["qas"]}
    assert not second & set(seen), "no question of the half that judges"


def test_the_command_keeps_what_it_finds(
    tiny: Tiny, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    path = str(tiny("llama"))
    monkeypatch.setattr(module, "attended", planted({1: [1]}, []))
    assert main(["probe", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    kept = heads_of(load(path, False))
    assert kept == {int(il): some for il, some in told["heads"].items()}
    assert 1 in kept[1]
    assert main(["probe", path]) == 0
    out, err = capsys.readouterr()
    assert "heads that retrieve, by layer" in out and "kept in" in err
