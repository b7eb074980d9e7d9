"""Loss, softmax, attention, normalisation and selection ops for JAX in which masked means gone."""

import importlib
from typing import TYPE_CHECKING

from masksafe import adapters, attention_masks, losses
from masksafe._core.switches import forward_mode, label_checks, set_label_checks
from masksafe._ragged_dot import ragged_dot
from masksafe._reductions import MaskedMean, max, mean, min, sum, value_and_grad_of_mean, var, var_mean
from masksafe._segments._extrema import segment_max, segment_min
from masksafe._segments._softmax import segment_log_softmax, segment_logsumexp, segment_softmax
from masksafe._segments._sums import segment_mean, segment_sum
from masksafe._segments._variance import segment_standardize, segment_var
from masksafe._selection import apply_where, keep, mask_where
from masksafe._sequences import length_mask, next_tokens
from masksafe._softmax import log_softmax, logmeanexp, logsumexp, softmax
from masksafe.attention import dot_product_attention, merge_attention, undo_zigzag, zigzag
from masksafe.normalization import batch_norm, group_norm, l2_normalize, layer_norm, rms_norm, standardize

if TYPE_CHECKING:
    from masksafe import testing

__version__ = "0.7.0.dev0"

__all__ = [
    "MaskedMean",
    "adapters",
    "apply_where",
    "attention_masks",
    "batch_norm",
    "dot_product_attention",
    "forward_mode",
    "group_norm",
    "keep",
    "l2_normalize",
    "label_checks",
    "layer_norm",
    "length_mask",
    "log_softmax",
    "logmeanexp",
    "logsumexp",
    "losses",
    "mask_where",
    "max",
    "mean",
    "merge_attention",
    "min",
    "next_tokens",
    "ragged_dot",
    "rms_norm",
    "segment_log_softmax",
    "segment_logsumexp",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_softmax",
    "segment_standardize",
    "segment_sum",
    "segment_var",
    "set_label_checks",
    "softmax",
    "standardize",
    "sum",
    "testing",
    "undo_zigzag",
    "value_and_grad_of_mean",
    "var",
    "var_mean",
    "zigzag",
]


def __getattr__(name: str) -> object:
    """Imports `masksafe.testing` on first use: it takes a quarter of the import time, and few programs need it."""
    if name == "testing":
        return importlib.import_module("masksafe.testing")
    hint = f": write masksafe.losses.{name}" if name in losses.__all__ else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
