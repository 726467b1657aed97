"""Measurements, tables and baselines of the paper, beside the package: `python -m research.NAME` in a clone, with pypcd installed.

pypcd never imports this. A module is a subject, and one that has a command is run by its name:

    decay, claims; plot           the paper's simulation of attention over distance, its claims about it, the pictures
    salience                      how high the right answer ranks, by the length of the prompt
    layers, spectrum              what over-rotation does to each layer's attention, frequency block by frequency block
    explain                       one answer, token by token: the candidates before and after the contrast
    golds, finding, gain          public questions and where their answers stand; how often finders find them; what passages gain
    methods/; eval                decoding methods of others: beam search, DoLa, Ms-PoE, Self-Extend, CAD, reranking; `pypcd eval` with them
    paper, models, survey, balance            the paper's tables; one plan for any models, its gains and losses
    time_server                   what requests cost
    figures, files, command       pictures (needs matplotlib), tables, how a command starts
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# `python -m` puts the clone in front, whose pypcd/ has no library: the installed package comes first
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [*(path for path in sys.path if Path(path or os.curdir).resolve() != _ROOT), str(_ROOT)]

import pypcd  # noqa: F401  it comes before llama_cpp, which modules here import too
