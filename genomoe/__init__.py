"""GenoMoE: long-context mixture-of-experts DNA language models.

Public names are imported when first used (PEP 562), so `import genomoe` loads neither torch nor anything
else that is slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genomoe.genome.coordinates import Interval, Variant
    from genomoe.genome.errors import GenoMoEError
    from genomoe.genome.fasta import Reference
    from genomoe.inference.predictor import Predictor, from_pretrained
    from genomoe.model.config import ModelConfig
    from genomoe.model.transformer import GenoMoEModel

__version__ = "0.1.0"

_HOME = {
    "GenoMoEError": "genomoe.genome.errors",
    "GenoMoEModel": "genomoe.model.transformer",
    "Interval": "genomoe.genome.coordinates",
    "ModelConfig": "genomoe.model.config",
    "Predictor": "genomoe.inference.predictor",
    "Reference": "genomoe.genome.fasta",
    "Variant": "genomoe.genome.coordinates",
    "from_pretrained": "genomoe.inference.predictor",
}

__all__ = [
    "GenoMoEError",
    "GenoMoEModel",
    "Interval",
    "ModelConfig",
    "Predictor",
    "Reference",
    "Variant",
    "__version__",
    "from_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'genomoe' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
