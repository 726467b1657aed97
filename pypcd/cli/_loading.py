"""Opening a model or a document for a subcommand: a progress bar, Ctrl-C, and the PCD setting that was asked for."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pypcd
from pypcd import ModelError, UnsupportedError, engine
from pypcd.cli import _options, _terminal
from pypcd.document import Document
from pypcd.document.folder import read_files

if TYPE_CHECKING:
    from pypcd.decode import Method


def load_model(args: argparse.Namespace) -> pypcd.Llama:
    """The model, with the requested PCD setting; off where none was.

    Raises:
        UnsupportedError: PCD was requested, but cannot run.
    """
    setting = "off" if args.pcd is None else args.pcd
    config = _options.pcd_setting(setting, args.model)  # raise errors before the slow part
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    options = _options.machine_options(args)
    llm = open_model(args.model, config, pcd=config, n_ctx=args.n_ctx, verbose=args.verbose, **options)
    if llm.pcd != config:
        raise UnsupportedError(f"PCD cannot run here: {engine.pcd_refusal(llm, config)}")
    return llm


def open_for(args: argparse.Namespace, methods: Sequence[Method], n_ctx: int = 0) -> pypcd.Llama:
    """The model, with what the methods need."""
    settings, n_seq_max = (method.rows.pcd for method in methods), max(method.n_sequences for method in methods)
    return open_model(args.model, *settings, n_ctx=n_ctx, n_seq_max=n_seq_max, **_options.machine_options(args))


def read(given: Sequence[str | os.PathLike[str]]) -> tuple[list[Document], str]:
    """read_files(), with a sign of life: a PDF may take long."""
    with _terminal.Bar(None, f"reading {', '.join(map(str, given))}"):
        return read_files(given)


def open_model(path: str, *settings: pypcd.PCDConfig | None, **options: Any) -> pypcd.Llama:
    """pypcd.Llama in the engine that these settings need, with a progress bar if loading takes long.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
        UnsupportedError: as engine.choose_engine().
    """
    options["engine"] = engine.choose_engine(None, *settings)
    bar = _terminal.Bar(100, "loading", enabled=not options.get("verbose"))
    with bar, _terminal.interruptible() as stopped:

        def loaded(done: float) -> bool:
            bar.update(int(100 * done) - bar.n)
            return not stopped()

        try:
            llm = _WatchedLlama(path, engine.progress_callback(loaded), progress=_terminal.show_reading, **options)
        except ModelError:
            if not stopped():
                raise
    if stopped():
        raise KeyboardInterrupt
    return llm


class _WatchedLlama(pypcd.Llama):
    """A pypcd.Llama that reports how much of it is loaded; llama_cpp.Llama has no argument for the callback."""

    def __init__(self, path: str, callback: Any, **options: Any) -> None:
        self._callback = callback
        super().__init__(path, **options)

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        setter: Any = pypcd.Llama.model_params
        setter.fset(self, params)
        params.progress_callback = self._callback
