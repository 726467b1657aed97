"""The laboratory: the paper's measurements, tables and baselines, and the judging of many formulas on recorded logits.

The product does not import it; the commands `pypcd lab` and `eval` do, when they need it. A module is a subject:

    decay, claims                 the paper's simulation of attention over distance, and its claims about it
    salience, questions           how high the right answer ranks, by the length of the prompt
    layers, spectrum              what over-rotation does to each layer's attention, frequency block by block
    nocache                       PCD with the KV cache compared with PCD without it
    methods/                      decoding methods of others: beam search, DoLa, Ms-PoE, Self-Extend, CAD, reranking
    recorded, formula, screen     logits along the right answers, ways to contrast them, and how each way scores
    paper, survey, balance, speed the paper's tables; one plan for any model, its gains and losses, its hours
    figures, files                pictures (needs matplotlib) and tables
"""
