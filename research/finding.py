"""What finders find: how often the passages hold the answer, how long they are, and how long it takes. pypcd.find has the finders.

python -m research.finding MODEL --finder bm25,attention,both --questions reworded
python -m research.finding MODEL --finder bm25,both --n 40 --answers      # how many answers are right: plain, and with passages repeated
python -m research.finding MODEL --finder both --answers --read all,4000,1000       # the same of texts that are read in parts
python -m research.finding MODEL --finder attention --foreign             # the scores of what is found for questions that the text does not answer
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pypcd import find
from pypcd.ask import Source, chosen, prompt_of, read_of, sources_of
from pypcd.cli import _loading, _options
from pypcd.decode import Session
from pypcd.document import Document
from pypcd.errors import InputError
from pypcd.evaluation import stats
from pypcd.prompt import has_template
from research.command import command
from research.golds import Asked, Span, counts, hotpot, paragraphs, records, subjects, told, unanswered, xquad

Row = dict[str, Any]
Files = dict[int, Document]  # by where they begin in the text
OF_THE_WHOLE = {"counts": counts, "subjects": subjects}  # all of a text is needed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _options.add_model(parser)
    add("--finder", default="bm25,attention,both", help="the first is what the others are held against")
    add(
        "--questions",
        default="xquad",
        help="xquad, reworded, kv, counts, subjects, a file xquad.LANGUAGE.json, or one of HotpotQA's",
    )
    add("--half", choices=("first", "second"), default="first")
    add("--n", type=_options.at_least(1), default=200, help="questions")
    add("--paragraphs", type=_options.at_least(2), help="of a text (55 of XQuAD, HotpotQA's own)")
    add(
        "--foreign",
        action="store_true",
        help="ask each text of XQuAD the questions of the other half; right is to say that it is not there",
    )
    add("--told", action="store_true", help="each question says what to answer if the text does not")
    add("--answers", action="store_true", help="answer too; first plainly")
    add("--read", default="all", help="how much of a text is read, such as all,4000")
    add(
        "--filler",
        metavar="FILE",
        help="of HotpotQA's: its paragraphs stand in each text of XQuAD, which is a book then",
    )
    add("--files", type=_options.at_least(1), default=1, help="that a text stands in")
    _options.add_n_ctx(parser)
    _options.add_machine(parser)
    add("--json", action="store_true", help="print a line for each finder and question")


def run(args: argparse.Namespace) -> int:
    name = pathlib.Path(args.questions).name
    if args.questions == "reworded" or name.startswith("xquad"):
        file = "" if args.questions in ("xquad", "reworded") else args.questions
        filler = paragraphs(args.filler) if args.filler else []
        texts = xquad(args.half, args.n, args.paragraphs or 55, args.questions == "reworded", file, filler)
    elif args.questions == "kv":
        texts = records(args.half, args.n)
    elif args.questions in OF_THE_WHOLE:
        texts = OF_THE_WHOLE[args.questions](args.half, args.n, args.paragraphs or 55)
    else:
        texts = hotpot(args.questions, args.half, args.n, args.paragraphs or 0)
    if args.foreign and (args.questions != "xquad" or args.filler):
        raise InputError("--foreign asks XQuAD's questions of XQuAD's texts; leave out --questions and --filler")
    if args.foreign:
        texts = unanswered(args.half, args.n, args.paragraphs or 55)
    if args.told:
        texts = told(texts)
    llm = _loading.open_model(args.model, n_ctx=args.n_ctx, **_options.machine_options(args))
    session, look = Session(llm), answered if args.answers else found
    finders = [*["plain"] * args.answers, *_options.names(args.finder)]
    arms = itertools.product(_options.names(args.read), finders)
    by = {name if read == "all" else f"{name}, read {read}": list[Row]() for read, name in arms}
    for (text, asked), name in itertools.product(texts, by):  # a text is read once, whatever the finder
        for one in asked:
            by[name].append(look(session, name, _files(text, args.files), one))
            if args.json:
                print(json.dumps(by[name][-1]), flush=True)
    if not args.json:
        print(*table(by, "right" if args.answers else "answer"), sep="\n")
    return 0


def found(session: Session, finder: str, files: Files, asked: Asked) -> Row:
    """What a finder finds for a question, and what it takes. Behind its name may stand how much of the text is read."""
    (name, _, read), begin = finder.partition(", read "), time.perf_counter()
    messages = [{"role": "user", "content": asked.question, "documents": [*files.values()]}]
    messages, _ = chosen(session.llm, messages, read_of(read or "all"), session.llm.n_ctx())
    prompt = prompt_of(messages)
    result = find.find(find.Asked(session.llm, prompt, has_template(session.llm), session.attention), finder=name)
    seconds, sources = time.perf_counter() - begin, sources_of(result, messages, "")[0]
    spans = _spans(files, sources)
    tokens = sum(len(session.llm.tokenize(one.text.encode(), add_bos=False)) for one in sources)
    score = max((one.score for one in sources), default=0.0)
    size = {"passages": len(spans), "tokens": tokens, "seconds": seconds, "score": score}
    return {"finder": finder, "id": asked.id, **asked.found(spans), **size, "spans": spans, "note": result.note}


def answered(session: Session, finder: str, files: Files, asked: Asked) -> Row:
    """An answer with the passages of a finder repeated ("plain": without), and whether it is right, as SQuAD compares texts. Its name as in
    found()."""
    name, _, read = finder.partition(", read ")
    method, begin = "plain" if name == "plain" else f"replay:finder={name}", time.perf_counter()
    how: Any = {"method": method, "read": read_of(read or "all"), "max_tokens": 96, "cache": False}
    answer = session.llm.ask([*files.values()], asked.question, **how)
    seconds, spans = time.perf_counter() - begin, _spans(files, answer.passages)
    right = statistics.fmean(f" {_bare(one)} " in f" {_bare(answer.text)} " for one in asked.answer.splitlines())
    score = max((one.score for one in answer.passages), default=0.0)
    size = {
        "passages": len(spans),
        "tokens": answer.written.n_prompt,
        "seconds": seconds,
        "score": score,
        "right": right,
    }
    return {"finder": finder, "id": asked.id, **asked.found(spans), **size, "text": answer.text, "note": answer.note}


def _bare(text: str) -> str:
    """Without case, punctuation and articles."""
    words = re.sub(r"[^\w\s]", "", text.casefold()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


@functools.cache
def _files(text: str, n: int) -> Files:
    """A text in n files, each of whole paragraphs."""
    parts = text.split("\n\n")
    n = min(n, len(parts))
    texts = ["\n\n".join(parts[i * len(parts) // n : (i + 1) * len(parts) // n]) for i in range(n)]
    begins = itertools.accumulate((len(own) + 2 for own in texts[:-1]), initial=0)
    return {begin: Document.of(f"{i}.txt", own) for i, (begin, own) in enumerate(zip(begins, texts))}


def _spans(files: Files, sources: Sequence[Source]) -> list[Span]:
    """Where passages stand in the text."""
    begins = {document.name: begin for begin, document in files.items()}
    return [(begins[one.document] + one.begin, begins[one.document] + one.end) for one in sources]


def table(by: Mapping[str, Sequence[Row]], key: str = "answer") -> Iterator[str]:
    """For each finder how often the answer was found (or is "right"), held against the first finder, and means of the rest."""
    what = {"answer": "answer found", "right": "answer right"}[key]
    yield f"| finder | {what} | against the first | wins / losses | paragraph found | passages | tokens | seconds | best score: 5%, 50%, 95% |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, own in by.items():
        result = stats.paired(*([row[key] for row in some] for some in (own, next(iter(by.values())))))
        mean = {
            key: statistics.fmean(row[key] for row in own) for key in ("paragraph", "passages", "tokens", "seconds")
        }
        cells = f"| {name} | {result.score:.1f} | {stats.interval(result)} | {result.wins} / {result.losses} | "
        scores = ", ".join(f"{at:.2f}" for at in np.quantile([row["score"] for row in own], (0.05, 0.5, 0.95)))
        yield (
            cells + "{paragraph:.1%} | {passages:.2f} | {tokens:.0f} | {seconds:.3g} | ".format(**mean) + f"{scores} |"
        )


if __name__ == "__main__":
    sys.exit(command("finding", add_arguments, run))
