"""Everything that touches libllama; the rest of pypcd goes through this package.

    engine.decode(llm, entries)       evaluate a batch; its logits are rows(llm, n)
    engine.rewind(llm, n_past)       forget a position and all after it
    engine.is_end(llm, token)        whether a token ends an answer
    engine.set_pcd(llm, config)      put a setting in force, or raise an exception that says why not
    with engine.tap(llm, ["l_out"])  collect intermediate tensors by name

All functions take the llama_cpp.Llama that owns the model and the context. Only this package looks inside one, calls
functions of the library and turns their status into exceptions. Knows nothing of prompts, answers, methods or the
terminal. A row, here and elsewhere, is the logits of one token: float32[n_vocab].
"""

from pypcd import library

library.check()  # first: it reports a wrong or missing library

# isort: split
from pypcd.engine._amx import choose_extra_bufts, configure_amx, install_amx
from pypcd.engine._bindings import is_native
from pypcd.engine._context import (
    cache_settings,
    can_shift,
    clear,
    copy_sequence,
    decode,
    has_row,
    load_sequence,
    rewind,
    row,
    rows,
    save_sequence,
    set_abort,
    set_threads,
    shift,
)
from pypcd.engine._devices import (
    backends,
    cpu_features,
    devices,
    idle_backends,
    library_path,
    step_times,
    supports_gpu,
)
from pypcd.engine._exits import exit_rows, has_tied_head, set_exits
from pypcd.engine._grammar import Grammar, check_grammar
from pypcd.engine._graph import Graph, watch_graphs
from pypcd.engine._handles import guard_handles, invalidate_handles, is_open
from pypcd.engine._heads import evaluate_with_ratios, head_counts, set_head_ratios, unset_head_ratios
from pypcd.engine._log import clear_errors, install, last_errors, logger, reason
from pypcd.engine._model import (
    check_decoder,
    detokenize,
    is_end,
    is_recurrent,
    n_bytes,
    n_ctx_train,
    n_layer,
    n_parameters,
    progress_callback,
    rope_freq_scale,
    rotates,
    slides,
    token_bytes,
    token_text,
)
from pypcd.engine._pcd import (
    N_SEQUENCES,
    begin_answer,
    best_tokens,
    choose_engine,
    has_twin,
    in_force,
    init_sampler,
    n_twins,
    open_stock,
    pcd_logits,
    pcd_refusal,
    pcd_stats,
    set_pcd,
    set_sequence_pcd,
    set_tokens,
    suspended,
    trim_pcd,
    unset_sequence_pcd,
)
from pypcd.engine._results import SENTENCES, Change, PCDAnswer, PCDLogits, PCDStats
from pypcd.engine._rpc import RemoteDevices, check_rpc_server, rpc_library, run_rpc_server
from pypcd.engine._stock import watch
from pypcd.engine._tap import read_tensors, tap

__all__ = [
    "N_SEQUENCES",
    "SENTENCES",
    "Change",
    "Grammar",
    "Graph",
    "PCDAnswer",
    "PCDLogits",
    "PCDStats",
    "RemoteDevices",
    "backends",
    "begin_answer",
    "best_tokens",
    "cache_settings",
    "can_shift",
    "check_decoder",
    "check_grammar",
    "check_rpc_server",
    "choose_engine",
    "choose_extra_bufts",
    "clear",
    "clear_errors",
    "configure_amx",
    "copy_sequence",
    "cpu_features",
    "decode",
    "detokenize",
    "devices",
    "evaluate_with_ratios",
    "exit_rows",
    "guard_handles",
    "has_row",
    "has_tied_head",
    "has_twin",
    "head_counts",
    "idle_backends",
    "in_force",
    "init_sampler",
    "invalidate_handles",
    "is_end",
    "is_native",
    "is_open",
    "is_recurrent",
    "last_errors",
    "library_path",
    "load_sequence",
    "logger",
    "n_bytes",
    "n_ctx_train",
    "n_layer",
    "n_parameters",
    "n_twins",
    "open_stock",
    "pcd_logits",
    "pcd_refusal",
    "pcd_stats",
    "progress_callback",
    "read_tensors",
    "reason",
    "rewind",
    "rope_freq_scale",
    "rotates",
    "row",
    "rows",
    "rpc_library",
    "run_rpc_server",
    "save_sequence",
    "set_abort",
    "set_exits",
    "set_head_ratios",
    "set_pcd",
    "set_sequence_pcd",
    "set_threads",
    "set_tokens",
    "shift",
    "slides",
    "step_times",
    "supports_gpu",
    "suspended",
    "tap",
    "token_bytes",
    "token_text",
    "trim_pcd",
    "unset_head_ratios",
    "unset_sequence_pcd",
    "watch_graphs",
]

install()  # llama.cpp's log callback, before anything is logged
watch()
install_amx()  # what was found out earlier, for every model of this process
