"""The paper: the tasks of its Table 2 against what its authors published, and its tables beside a run's."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import Tiny
from fake_tokenizer import Pieces
from runs import made_up

from pypcd.evaluation import Plan
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.tasks.ruler import NOISE
from pypcd.evaluation.tasks.sample import Sample
from pypcd.prompt import Prompt
from research import eval as research_eval
from research.authors import KVAuthors, VTAuthors
from research.paper import PAPER_TABLES, SWEEP, TABLE_1, TABLE_2

KV, VT = KVAuthors(), VTAuthors()


def test_the_authors_key_value_prompt_is_theirs() -> None:
    for sample in KV.questions(3, 20):
        text, (answer,) = sample.prompt.text, sample.answers
        pairs = re.search(r"JSON data:\n(\{.*\})\n", text)
        asked = re.search(r'Key: "(.*)"\n', text)
        assert pairs and asked and json.loads(pairs[1])[asked[1]] == answer
        assert text == (
            "Given the JSON object below, extract and return only the value corresponding to the specified key.\n\n"
            f'JSON data:\n{pairs[1]}\n\n\nKey: "{asked[1]}"\nThe value associated with the specified key is: '
            ". Return only the value and do not include any additional text in your response:"
        )
        assert KV.score(f"{answer}</s>", sample) == 1.0 and KV.max_tokens == 100


def test_the_authors_cells_have_75_pairs_in_4000_tokens() -> None:
    def size(n_tokens: int) -> int:
        return len(KV.samples(1, n_tokens, Pieces(), 0)[0].prompt.segments)

    assert [size(k) for k in (4000, 8000, 16000, 4096, 80)] == [75, 150, 300, 77, 2]
    with pytest.raises(ValueError, match="n_tokens is 79; allowed: at least 80"):
        size(79)


def test_the_authors_variable_tracking_is_theirs() -> None:
    for sample in VT.samples(3, 2200, Pieces(), 0):
        prompt, names = sample.prompt, sample.answers
        (value,) = re.findall(r"assigned the value (\d{5}) in the text above\.", prompt.after)
        chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]
        assert [s for s in prompt.segments if s != NOISE + "\n"] == chain
        assert VT.score(f"{names[0]}, {names[1].lower()}, {names[2]}, ZZZZZ", sample) == pytest.approx(
            2 * 0.75 * 0.6 / 1.35
        )
        assert prompt.text == (
            "\n\nMemorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + " ".join(prompt.segments)
            + f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"5 variables are assgined the value {value}, they are: "
            " Your response should consist solely of listing all the variables in the specified format, such as "
            "'AAA, BBB, CCC, DDD, EEE'; do not include any additional text in your response."
        )
        assert prompt.answer_prefix == ""


def test_the_authors_earlier_turn_is_theirs() -> None:
    n = f"{NOISE}\n "
    context = (
        f"{n}{n}{n}VAR ZUG = 97498 VAR NCQ = 47194 VAR GOC = VAR ZUG  {n}VAR VNF = VAR NCQ  VAR TVZ = VAR GOC  "
        f"{n}VAR JEY = VAR VNF  {n}VAR XXP = VAR JEY  {n}VAR NDR = VAR TVZ  {n}{n}VAR MCJ = VAR XXP  VAR YEN = VAR NDR  "
        f"{NOISE}\n"
    )
    question = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text."
        f"\\n\\n{context}\\n"
        "Question: Find all variables that are assigned the value 47194 in the text"
        " Answer: According to the chain(s) of variable assignment in the text above, "
        "5 variables are assgined the value 47194, they are: "
    )
    sample = VT.samples(1, 2200, Pieces(), 0)[0]
    assert sample.prompt.shots == ((question, "NCQ, VNF, JEY, XXP, MCJ"),)


@pytest.mark.parametrize(
    ("prediction", "f1"),
    [
        ("AAA, BBB, CCC, DDD", 1.0),
        ("ddd,ccc,bbb,aaa", 1.0),
        ("  AAA ,BBB, CCC,DDD \n", 1.0),
        ("AAA, BBB", 2 * 1.0 * 0.5 / 1.5),
        ("AAA, AAA", 2 * 0.5 * 0.25 / 0.75),  # one is right, two are given
        ("AAA, BBB, CCC, DDD, EEE", 2 * 0.8 * 1.0 / 1.8),
        ("AAA, BBB, CCC, DDD,", 2 * 0.8 * 1.0 / 1.8),  # after the last comma there is one more item, an empty one
        ("AAA BBB CCC DDD", 0.0),  # one item
        ("AAA\x00BBB, CCC", 2 * 0.5 * 0.25 / 0.75),
        ("The variables are AAA, BBB", 2 * 0.5 * 0.25 / 0.75),
        ("AAAA, AA", 0.0),
        ("", 0.0),
        (",,,", 0.0),
    ],
)
def test_the_f1_of_a_list_is_over_items_between_commas(prediction: str, f1: float) -> None:
    sample = Sample(0, Prompt(), ("AAA", "BBB", "CCC", "DDD"))
    assert VTAuthors().score(prediction, sample) == pytest.approx(f1)


def test_the_papers_figures_are_as_printed() -> None:
    """Sums and means of the printed rows, worked out by hand."""
    assert sum(map(sum, TABLE_2["kv-authors"].values())) == pytest.approx(1753.2)
    assert sum(TABLE_2["vt-authors"]["pcd"]) == pytest.approx(228.76)
    assert TABLE_1["beta"][3] == 77.90


def test_table_1_changes_each_value_alone() -> None:
    table = PAPER_TABLES["table1"]
    plan = Plan("m.gguf", ("kv-authors",), table.methods, (8192,), n=10)
    best = {"pcd:paper:beta=1.5": 9, "pcd:paper:gamma=50": 8}
    records = made_up(plan, lambda method, i: float(i < best.get(method, 5)))
    text = table.markdown(plan, records)
    assert "| beta | 1.0-4.0 | 2.5 | 77.90, 3.1 | 56.7, 222.2 | 1.5: 90.0 | +40.0 [+10.0, +70.0] ~ |" in text
    assert "| without PCD | | | 72.00 | 50.0 | | |" in text
    assert len(set(table.methods)) == 2 + sum(len(values) - 1 for values in SWEEP.values())


def test_table_2_sets_figures_beside_the_papers() -> None:
    table = PAPER_TABLES["table2"]
    plan = Plan("m.gguf", table.tasks, table.methods, table.lengths, n=10)
    records = made_up(plan, lambda method, i: float(i < (7 if method == "pcd" else 6)))
    del records["vt-authors", 4096, 0, "segr"]
    text = table.markdown(plan, {k: v for k, v in records.items() if k[3] != "ms-poe"})
    assert "| pcd | 92.0 | 70.0 | +10.0 [+0.0, +30.0] ~ | 79.0 | 70.0 |" in text
    assert "| ms-poe | 90.0 | refused |  | 72.0 | refused |  | 51.0 | refused |  |" in text
    assert "n = 100 a cell" in text


def test_a_run_lays_out_the_papers_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--task", "kv-short", "--length", "250", "--n", "3", "--threads", "1"]
    words += ["--paper", "table2", "--method", "greedy,pcd,beam", "--out", str(tmp_path / "run")]
    assert research_eval.main(words) == 0
    assert "Table 2 of the paper, and demo\n" in capsys.readouterr().out
    text = (tmp_path / "run" / "summary.md").read_text()
    assert "## Table 2 of the paper, and demo" in text and "| method | paper, 4k | yours, 250 |" in text
    assert "| beam | 89.0 |" in text


def test_what_is_asked_is_the_tables_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(research_eval.product, "run", lambda args: asked.append(args) or sys.exit(0))
    for more in ([], ["--method", "pcd"]):
        with pytest.raises(SystemExit):
            research_eval.main(["model.gguf", "--paper", "table1", *more])
    first, second = asked
    assert first.task == second.task == "kv-authors" and first.length == "8192" and second.method == "pcd"
    assert set(first.method.split(",")) == set(PAPER_TABLES["table1"].methods) and BASELINE in first.method


def test_a_base_stands_for_its_share_of_the_models(monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """The paper gives B', and a ratio that was found on a model with another B."""
    asked = []
    monkeypatch.setattr(research_eval.product, "run", lambda args: asked.append(args.method) or sys.exit(0))
    methods = "pcd:paper:base=500,replay,pcd:paper:base=2e3:beta=1,pcd:paper:base_ratio=0.3"
    with pytest.raises(SystemExit):
        research_eval.main([str(tiny("llama")), "--method", methods])
    assert asked == ["pcd:paper:base_ratio=0.05,replay,pcd:paper:base_ratio=0.2:beta=1,pcd:paper:base_ratio=0.3"]


def test_a_base_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for word, said in (("demo", "base"), ("no.gguf", "no.gguf")):
        assert research_eval.main([word, "--method", "pcd:paper:base=x", "--threads", "1"]) == 2
        assert said in capsys.readouterr().err
