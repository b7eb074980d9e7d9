"""Normalisation over the unmasked elements."""

from masksafe.normalization._batch_norm import batch_norm
from masksafe.normalization._group_norm import group_norm
from masksafe.normalization._l2_normalize import l2_normalize
from masksafe.normalization._layer_norm import layer_norm, rms_norm, standardize

__all__ = ["batch_norm", "group_norm", "l2_normalize", "layer_norm", "rms_norm", "standardize"]
