"""`pypcd explain`: each token of an answer, its candidates before and after the contrast (steps), as a page (page).

`places` says what the twin sees of the prompt, and where an answer stands in it: for the picture (pypcd.evaluation.plots).
"""

from pypcd.explain.steps import Candidate, Step, explain

__all__ = ["Candidate", "Step", "explain"]
