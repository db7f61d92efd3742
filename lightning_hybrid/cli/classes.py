"""The module and data of a command line, made by LightningCLI from classes, a script or config files.

LightningCLI parses the flags, and instantiates the two classes. Its Trainer is not made: the commands make their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import UsageError
from lightning_hybrid.namespace import PACKAGES, follow
from lightning_hybrid.patching import replaced
from lightning_hybrid.text import meant, meant_of

FLAGS = (
    "--module.NAME VALUE and --data.NAME VALUE are arguments of the two classes, as in LightningCLI: values are YAML,"
    " and are checked against type hints. --config FILE is a config file of LightningCLI."
)

# Flags of the user's classes have a dot, as in LightningCLI; two of its own that name a class have none.
_CLASS_FLAG = re.compile(r"--(\w+\.[\w.]+\+?|optimizer|lr_scheduler)(=.*)?", re.DOTALL)


class _Captured(BaseException):
    """Carries a LightningCLI out of the code that makes it."""

    def __init__(self, cli: Any) -> None:
        self.cli = cli


class ConfiguredRun:
    """What makes the module and the data of a command line; any process can import and call it.

    Args:
        module: ``path.to:Module``, ``FILE.py:Module``, or a script ``FILE.py`` that calls LightningCLI; None if a
            config file names the class.
        data: The same for a LightningDataModule or a function that makes loaders; None if a script or a config file
            names it, or the module has its own loaders.
        flags: Arguments of LightningCLI, such as ``--config=FILE`` and ``--model.width=8``.
    """

    def __init__(self, module: str | None, data: str | None, flags: Sequence[str]) -> None:
        self._module, self._data, self._flags = module, data, list(flags)
        self._made_data: Any = None
        is_configured = any(flag.startswith("--config=") for flag in flags)
        if module is None and not is_configured:
            raise UsageError("name a module, such as path.to:Module, or a config file of LightningCLI with --config")
        if self._is_script and data is not None:
            raise UsageError(f"--data {data}: the script {module} names its data itself; name a class of it instead")
        if data is None and not is_configured and not self._is_script:
            for flag in flags:
                if flag.startswith("--data."):
                    raise UsageError(f"{flag} is given without --data path.to:DataModule")

    @property
    def _is_script(self) -> bool:
        return self._module is not None and self._module.endswith(".py")

    def parse(self) -> Any:
        """Import the classes and parse the flags; return the LightningCLI, which has instantiated nothing.

        Raises:
            UsageError: A path, an argument or a config file is wrong.
        """
        return self._captured(instantiates=False)

    def make_module(self) -> Any:
        """Instantiate the module, with its data, and return it."""
        cli = self._captured(instantiates=True)
        self._made_data = cli.datamodule
        return cli.model

    def make_data(self) -> Any:
        """Return the data that was made with the latest module; None if the module's own loaders are to be used."""
        data, self._made_data = self._made_data, None
        return data

    def _captured(self, *, instantiates: bool) -> Any:
        made: list[Any] = []
        make, classes = self._script() if self._is_script else self._classes()
        try:
            with contextlib.ExitStack() as stack:
                # LightningCLI warns of arguments in both.
                stack.enter_context(replaced(sys, "argv", sys.argv[:1], reason="arguments are given to LightningCLI"))
                for known in classes:
                    init = _capturing_init(known.__init__, self._flags, instantiates, made)
                    reason = "its module and data are used, and not its Trainer"
                    stack.enter_context(replaced(known, "__init__", init, reason=reason))
                make()
        except _Captured as captured:
            return captured.cli
        except ArgumentError as error:
            raise UsageError(_in_words_of_the_command(str(error), made[-1])) from error
        raise UsageError(f"{self._module} calls no LightningCLI when it is run; write {self._module}:Module")

    def _script(self) -> tuple[Callable[[], Any], list[Any]]:
        """Return what runs the script, and the classes it may call."""
        assert self._module is not None
        path = existing_file(self._module)
        add_import_folder(str(path.parent))
        follow(compile(path.read_bytes(), str(path), "exec"))
        packages = [name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
        # Both, where the file imports the other one by a detour: it must not train.
        classes = {importlib.import_module(f"{name}.cli").LightningCLI for name in packages}
        return lambda: runpy.run_path(str(path), run_name="__main__"), [*classes]

    def _classes(self) -> tuple[Callable[[], Any], list[Any]]:
        """Return what calls LightningCLI with the classes, and that class."""
        from lightning_hybrid.verify.experiment import namespace_of

        module = None if self._module is None else load_target(self._module)
        data = None if self._data is None else load_target(self._data)
        named = module if module is not None else _class_of_config(self._flags)
        pl = namespace_of(named) if isinstance(named, type) else importlib.import_module("lightning.pytorch")
        known = importlib.import_module("lightning.pytorch.cli").LightningCLI
        classes = {
            "model_class": _as_class(module, pl.LightningModule),
            "datamodule_class": _as_class(data, pl.LightningDataModule),
        }
        options = {"save_config_callback": None, "load_from_checkpoint_support": False}
        return lambda: known(**classes, **options), [known]


def _capturing_init(
    original: Callable[..., None], flags: Sequence[str], instantiates: bool, made: list[Any]
) -> Callable[..., None]:
    """Return an ``__init__`` of LightningCLI that parses these flags, makes no Trainer, and raises ``_Captured``."""

    def init(cli: Any, *args: Any, **kwargs: Any) -> None:
        made.append(cli)
        init_parser, instantiate = cli.init_parser, cli.instantiate_classes

        def instantiate_classes() -> None:
            if not instantiates:
                raise _Captured(cli)
            trainer = section(cli, "trainer")
            for name in list(vars(trainer)):
                trainer[name] = None
            instantiate()

        # On the object, so that methods of a derived class are replaced too.
        cli.init_parser = lambda **options: init_parser(**{**options, "exit_on_error": False})
        cli.subcommands = lambda: {"fit": type(cli).subcommands()["fit"]}
        cli.instantiate_classes = instantiate_classes
        cli._set_seed = cli.instantiate_trainer = cli._run_subcommand = lambda *_, **__: None
        bound = inspect.signature(original).bind(cli, *args, **kwargs).arguments
        bound.pop(next(iter(bound)))
        bound["args"] = [*(["fit"] if bound.get("run", True) else []), *flags]
        original(cli, **bound)
        raise _Captured(cli)

    return init


def section(cli: Any, name: str) -> Any:
    """Return a section of the config that a LightningCLI has parsed; None if there is none."""
    config = cli.config.get(str(cli.subcommand), cli.config)  # that of the subcommand, if there is one
    return config.get(name)


def _as_class(target: Any, base: type) -> Any:
    """Return a class as it is, and a class that calls the function where it is instantiated."""
    if target is None or (isinstance(target, type) and issubclass(target, base)):
        return target
    jsonargparse = importlib.import_module("jsonargparse")
    # The name is that of an attribute of this module, which must not be there for another function.
    name = f"_{re.sub(r'[^0-9a-zA-Z]', '_', target.__qualname__)}_{id(target)}"
    return jsonargparse.class_from_function(target, base, name)


def _class_of_config(flags: Sequence[str]) -> Any:
    """Import the class of the module that config files name; None if they name none by its full path."""
    yaml = importlib.import_module("yaml")  # a dependency of Lightning; it has no types
    found = None
    for flag in flags:
        name, _, value = flag.partition("=")
        if name == "--config":
            content = yaml.safe_load(existing_file(value).read_text())
            content = content.get("fit", content) if isinstance(content, Mapping) else {}
            model = content.get("model")
            found = model.get("class_path", found) if isinstance(model, Mapping) else model or found
        elif name in ("--model", "--model.class_path"):
            found = value
    return load_target(found) if isinstance(found, str) and "." in found else None


def _in_words_of_the_command(message: str, cli: Any) -> str:
    """Return an error of LightningCLI with the nearest known flag, where a flag is unknown."""
    unknown = re.match(r"[Uu]nrecognized arguments: (--[\w.]+)", message)
    if unknown:
        owner = unknown[1].partition(".")[0]
        target = {"--model": cli.model_class, "--data": cli.datamodule_class}.get(owner)
        arguments = [] if target is None else [f"{owner}.{name}" for name in inspect.signature(target).parameters]
        message += meant_of(unknown[1], arguments) if arguments else ""
    missing = re.match(r"the following arguments are required: (.*)", message)
    if missing:
        named = [re.sub(r"^fit\.", "", name) for name in missing[1].split(", ")]
        message = f"give {', '.join(f'--{name} VALUE' for name in named)}: the constructor has no default for it"
    return message.replace("--model.", "--module.")


def load_target(path: str) -> Any:
    """Import a class or function; an error that the imported code raises is raised as it is.

    Args:
        path: ``path.to:Name``, ``path.to.Name``, or ``path/to/file.py:Name``.

    Raises:
        UsageError: The path names no module and a name in it, or there is none.
    """
    module, separator, name = path.rpartition(":" if ":" in path else ".")
    if not separator or not module or not name:
        raise UsageError(f"{path!r} names no class; write path.to:Name or path/to/file.py:Name")
    folder = os.getcwd()
    if module.endswith(".py"):
        file = existing_file(module)
        folder, module = str(file.parent), file.stem
    add_import_folder(folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another that is not
        raise UsageError(f"{path!r}: {error}") from error
    return functools.reduce(functools.partial(_member, path), name.split("."), found)


def _member(path: str, owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UsageError(f"{path!r}: {getattr(owner, '__name__', owner)} has no {name}{meant(name, dir(owner))}")
    return getattr(owner, name)


def existing_file(path: str) -> Path:
    """Return the absolute path of a file.

    Raises:
        UsageError: There is none.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"{path!r}: there is no file {file}")
    return file


def add_import_folder(folder: str) -> None:
    """Let this process import modules from a folder."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def split_class_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into what the command parses, and the flags of the user's classes.

    Returns:
        The command's arguments; and flags such as ``--model.width=8``, as LightningCLI spells them, where
        ``--module.`` is ``--model.``.
    """
    others, flags = list[str](), list[str]()
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not _CLASS_FLAG.fullmatch(argument):
            others.append(argument)
            continue
        if "=" not in argument and remaining and not remaining[0].startswith("--"):
            argument = f"{argument}={remaining.pop(0)}"
        flags.append(re.sub(r"^--module\.", "--model.", argument))
    return others, flags
