"""Everything that touches libllama; the rest of pypcd goes through this package.

    engine.decode(llm, entries)       evaluate a batch; its logits are rows(llm, n)
    engine.rewind(llm, n_past)       forget a position and all after it
    engine.is_end(llm, token)        whether a token ends an answer
    engine.pcd(llm).set(config)      put a setting in force, or raise an exception that says why not
    engine.attention(llm, past, tokens, weights)  how much attention tokens pay to each position
    with engine.watched(llm, callback)  look at each operation as it is computed

All functions take the llama_cpp.Llama that owns the model and the context. Only this package looks inside one, calls
functions of the library and turns their status into exceptions. Knows nothing of prompts, answers, methods or the
terminal. A row, here and elsewhere, is the logits of one token: float32[n_vocab].

Each module below says in its `__all__` what it has for the others.
"""

from pypcd import library

library.check()  # first: it reports a wrong or missing library

# isort: split
from pypcd.engine import _log, _stock
from pypcd.engine._amx import *
from pypcd.engine._attention import *
from pypcd.engine._bindings import is_native as is_native
from pypcd.engine._context import *
from pypcd.engine._devices import *
from pypcd.engine._grammar import *
from pypcd.engine._graph import *
from pypcd.engine._handles import *
from pypcd.engine._log import *
from pypcd.engine._model import *
from pypcd.engine._pcd import *
from pypcd.engine._results import *
from pypcd.engine._rotation import eval_callback as eval_callback
from pypcd.engine._rpc import *
from pypcd.engine._stack import *
from pypcd.engine._tensors import *

_log.install()  # llama.cpp's log callback, before anything is logged
_stock.watch()
