"""The models that one server serves, from the words of a command line: files, folders, llama.cpp's own file of models.

    read(["small.gguf", "large.gguf=off"])
    read(["models/"])           # every GGUF file in it
    read(["models.ini"])        # a section for each model: llama-server's options, and pypcd's key "pcd"

Knows the names of models and the syntax of that file, but not what an option means or how a server is started.
"""

from __future__ import annotations

import configparser
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pypcd.errors import InputError, ModelError
from pypcd.gguf import PART, parts, resolve_model
from pypcd.settings.config import PCDConfig, PCDSetting, load

__all__ = ["Served", "check_name", "read", "to_ini"]

_COMPANIONS = re.compile(r".*mmproj|mtp-|dspark-|dflash-")  # files beside a model, as llama.cpp names them


class Served(NamedTuple):
    """One model.

    Attributes:
        name: by which requests ask for it.
        path: of its GGUF file.
        pcd: its setting; None: the server's.
        options: llama-server's, for this model alone, as the file of models has them.
        at_start: it is loaded when the server starts, not at its first request.
    """

    name: str
    path: str
    pcd: PCDSetting | None = None
    options: Mapping[str, str] = {}
    at_start: bool = True

    @property
    def size(self) -> int:
        """Bytes of its file, or of all the files that it is split into."""
        return sum(part.stat().st_size for part in parts(self.path))


def read(words: Sequence[str], left_out: list[str] | None = None) -> list[Served]:
    """The models that are meant, each word with its setting behind "=", if it has one.

    Args:
        left_out: gets a sentence for each file of a folder that is none, and is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: it is no model, or two have one name.
        ValueError: the file of models is wrong, or a setting.
    """
    left_out = [] if left_out is None else left_out
    found = [(word, _models(*_split(word), left_out)) for word in words]
    of_name: dict[str, Served] = {}
    for word, models in sorted(found, key=lambda pair: _is_folder(_split(pair[0])[0])):  # what is named goes first
        for model in list(models):
            other = of_name.setdefault(model.name, model)
            if other is model:
                continue
            if not _is_folder(_split(word)[0]):
                raise ModelError(
                    f"two models are called {model.name!r}: {other.path} and {model.path}; "
                    "a file of models (models.ini) can give them other names"
                )
            models.remove(model)
            if model.path != other.path:
                left_out.append(f"{model.path} is left out: {other.path} is called {model.name!r} too")
    return [model for _, models in found for model in models]


def _is_folder(word: str) -> bool:
    return word not in ("", "demo") and pathlib.Path(word).expanduser().is_dir()


def _split(word: str) -> tuple[str, str | None]:
    """A model and its setting. Both may have "=" in them: a file's name ends with .gguf or .ini, a folder's at the first one."""
    found = re.match(r"(?i)(.*?\.(?:gguf|ini)|[^=]*)=(.*)", word)
    return (word, None) if found is None or os.path.exists(os.path.expanduser(word)) else (found[1], found[2])


def _setting(text: str | None, where: str) -> PCDSetting | None:
    if text is None:
        return None
    try:
        setting = load(text)
        PCDConfig.resolve(setting)
    except (InputError, OSError) as error:
        raise InputError(f"{where}: {error}") from None
    return setting


def _models(word: str, setting: str | None, left_out: list[str]) -> list[Served]:
    pcd = _setting(setting, word)
    path = pathlib.Path(word).expanduser()
    if word.lower().endswith(".ini"):
        if setting is not None:
            raise InputError(
                f"{word} has a setting behind it, {setting!r}; in a file of models each has its own, pcd = …"
            )
        return _from_ini(path)
    if _is_folder(word):
        models = []
        for file in filter(_can_be_served, sorted(path.glob("*.gguf"))):
            try:
                models.append(Served(_name(file), resolve_model(file), pcd, at_start=False))
            except (ModelError, OSError) as error:
                left_out.append(f"a file of {word} is left out: {error}")
        if not models:
            why = f"; {left_out[-1]}" if left_out else ""
            raise ModelError(
                f"{word} is a folder without a .gguf file; give one that has some, or the files themselves{why}"
            )
        return models
    name = "demo" if word == "demo" else path.stem
    return [Served(name, resolve_model(word), pcd)]


def _name(file: pathlib.Path) -> str:
    """By which a file among others is asked for.

    Raises:
        ModelError: it is no file, or nobody could ask for it.
    """
    if not file.is_file():  # a pipe would be waited for
        raise ModelError(f"{file} is {'no file' if file.exists() else 'a link to nothing'}")
    to_ini({file.stem: {"model": str(file)}})
    return file.stem


def _can_be_served(file: pathlib.Path) -> bool:
    """Not a part of a model but the first, and not a file beside one."""
    part = PART.search(file.stem)
    return (part is None or int(part[1]) == 1) and not _COMPANIONS.match(file.name)


# -- llama.cpp's file of models ---------------------------------------------------------------------------------------


def _from_ini(path: pathlib.Path) -> list[Served]:
    """Its sections; "[*]" has what holds for all."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of models {path}; docs/serve.md shows one")
    ini = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), inline_comment_prefixes=("#", ";"), default_section="*", strict=True
    )
    ini.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        ini.read_string("[:]\n" + path.read_text(encoding="utf-8-sig"), str(path))
    except (configparser.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a file of models: {' '.join(str(error).split())}") from None
    loose = [key for key in ini[":"] if key != "version" and key not in ini.defaults()]
    if loose:
        raise InputError(
            f"{path}: {loose[0]} stands above the first section; put it into [*], which holds for all models"
        )
    names = [name for name in ini.sections() if name != ":"]
    if not names:
        raise InputError(f"{path} names no model; a section such as [small] with model = small.gguf is one")
    return [_of_section(path, name, dict(ini[name])) for name in names]


def _of_section(path: pathlib.Path, name: str, keys: dict[str, str]) -> Served:
    model = [keys.pop(key) for key in ("model", "m", "LLAMA_ARG_MODEL") if key in keys]
    if not model:
        raise InputError(f"{path}: [{name}] has no model; give it model = FILE.gguf")
    pcd = _setting(keys.pop("pcd", None), f"{path}: [{name}]")
    at_start = keys.pop("load-on-startup", "off") in ("on", "enabled", "true", "1")  # as llama.cpp writes "yes"
    return Served(name, resolve_model(model[0]), pcd, keys, at_start)


def check_name(name: str) -> None:
    """
    Raises:
        ModelError: llama-server would read the name as two.
    """
    if "," in name:
        raise ModelError(
            f"a model is called {name!r}; a name may not have a comma in it, which llama-server reads as two; rename the file, or "
            "give it another name in a file of models (models.ini)"
        )


def to_ini(sections: Mapping[str, Mapping[str, str]]) -> str:
    """The file as llama-server reads it.

    Raises:
        ModelError: a name or a value cannot be written in it.
    """
    lines = []
    for name, options in sections.items():
        check_name(name)
        if name == "*" or set(name) & set(":]\r\n"):
            raise ModelError(
                f"a model is called {name!r}; where there are several, a name may not be * or have : or ] in it, since requests "
                "write settings behind a colon; rename the file, or give it another name in a file of models (models.ini)"
            )
        for value in options.values():
            if set(value) & set("#;\r\n") or value != value.strip():
                raise ModelError(
                    f"{name}: {value!r} cannot be written in a file of models, where # and ; begin a remark; rename it"
                )
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in options.items()), ""]
    return "\n".join(lines)
