"""`pypcd explain`: each token of an answer, its candidates before and after the contrast (steps), as a page (page)."""

from pypcd.explain.steps import Candidate, Step, explain

__all__ = ["Candidate", "Step", "explain"]
