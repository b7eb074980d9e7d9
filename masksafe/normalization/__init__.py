"""Normalisation over the unmasked elements."""

from masksafe.normalization._layer_norm import layer_norm as layer_norm
from masksafe.normalization._layer_norm import rms_norm as rms_norm
from masksafe.normalization._layer_norm import standardize as standardize
