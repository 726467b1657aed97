"""The tasks of the paper's Table 2 against what PCD's authors published."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from fake_tokenizer import Pieces

from pypcd.evaluation.tasks.ruler import NOISE
from pypcd.evaluation.tasks.sample import Sample
from pypcd.prompt import Prompt
from research.authors import KVAuthors, VTAuthors

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
