"""What a monitor warns of while a model runs."""

import warnings
from typing import Any

from torch import Tensor, nn

from overflowstat import Monitor
from overflowstat.errors import MonitorWarning

__all__ = ["warned"]


def warned(model: nn.Module, *batches: Tensor, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with Monitor(model, **options):
            for batch in batches:
                model(batch)
    return [str(w.message) for w in found if w.category is MonitorWarning]
