"""Train machine translation models from parallel text, and translate with them.

    import mtrain

    run = mtrain.train("configs/demo.yaml")
    mtrain.load(run).translate(["The old farmer is tired."])

`import mtrain` imports no submodule; a name below imports its module when it is first used.
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = [
    "AugmentOptions",
    "Config",
    "ConfigError",
    "DataError",
    "DecodingOptions",
    "Model",
    "RunError",
    "Sampling",
    "ScoringOptions",
    "Stopped",
    "Translation",
    "UserError",
    "WriteError",
    "__version__",
    "augment",
    "check",
    "distill",
    "evaluate",
    "export",
    "init",
    "load",
    "load_config",
    "plot",
    "tokenize",
    "train",
]

if TYPE_CHECKING:
    from mtrain.api import (
        Model,
        augment,
        check,
        distill,
        evaluate,
        export,
        init,
        load,
        load_config,
        plot,
        tokenize,
        train,
    )
    from mtrain.augmentation.options import AugmentOptions
    from mtrain.config.sections import Config
    from mtrain.decode.formats import Translation
    from mtrain.decode.options import DecodingOptions, Sampling
    from mtrain.errors import ConfigError, DataError, RunError, UserError, WriteError
    from mtrain.evaluation.metrics import ScoringOptions
    from mtrain.runtime.signals import Stopped
else:

    def __getattr__(name: str) -> object:
        """Import `name` from the module that defines it, when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        if os.name != "posix":
            from mtrain.errors import NEEDS_POSIX

            raise ImportError(NEEDS_POSIX)
        modules = {
            "AugmentOptions": "augmentation.options",
            "DecodingOptions": "decode.options",
            "Sampling": "decode.options",
            "ScoringOptions": "evaluation.metrics",
            "Stopped": "runtime.signals",
            "Translation": "decode.formats",
        }
        is_error = name.endswith("Error")
        module = modules.get(name, "errors" if is_error else "api")
        return getattr(import_module(f"{__name__}.{module}"), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
