"""Normalisation over the unmasked elements."""

from masksafe.normalization._layer_norm import layer_norm, rms_norm, standardize

__all__ = ["layer_norm", "rms_norm", "standardize"]
