"""Measures what the method does and why: decay, salience, single tokens, the cache, single frequencies.

    Decay().simulate().rates()                    the paper's simulation; check_claims() compares its claims with it
    measure(session, questions, settings, vocabulary)         the rank of the right answer, question by question
    explain(session, tokens, setting, vocabulary)             each token's candidates before and after the contrast
    check_cache(llm, prompts)                                 PCD with the KV cache compared with PCD without it
    spectrum(q, k, theta, rho)                                one layer's attention, by frequency block

Pictures are in _plots, which needs matplotlib.
"""

from typing import Any

from pypcd._method import rank
from pypcd._vocabulary import Vocabulary
from pypcd.analysis._claims import Claims, check_claims
from pypcd.analysis._decay import Curves, Decay, Rates
from pypcd.analysis._explain import Candidate, Step, explain
from pypcd.analysis._layers import Layer, read_layers
from pypcd.analysis._nocache import CacheCheck, check_cache
from pypcd.analysis._questions import Question, questions
from pypcd.analysis._salience import Reading, SalienceRow, measure, salience, salience_rows
from pypcd.analysis._spectrum import Side, Spectrum, block_scores, spectrum

__all__ = [
    "CacheCheck",
    "Candidate",
    "Claims",
    "Curves",
    "Decay",
    "Layer",
    "Question",
    "Rates",
    "Reading",
    "SalienceRow",
    "Side",
    "Spectrum",
    "Step",
    "Vocabulary",
    "block_scores",
    "check_cache",
    "check_claims",
    "explain",
    "measure",
    "questions",
    "rank",
    "read_layers",
    "salience",
    "salience_rows",
    "spectrum",
]

_MOVED = {"Cell": "SalienceRow", "cells": "salience_rows", "gold_rank": "rank"}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(f"pypcd.analysis.{name} is now pypcd.analysis.{_MOVED[name]}")
    raise AttributeError(f"module 'pypcd.analysis' has no attribute {name!r}")
