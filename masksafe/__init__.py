"""Loss, softmax, attention, normalisation and selection ops for JAX in which masked means gone."""

from masksafe import losses as losses
from masksafe import testing as testing
from masksafe._core.switches import forward_mode as forward_mode
from masksafe._core.switches import label_checks as label_checks
from masksafe._core.switches import set_label_checks as set_label_checks
from masksafe._reductions import mean as mean
from masksafe._reductions import sum as sum
from masksafe._reductions import var as var
from masksafe._reductions import var_mean as var_mean
from masksafe._selection import apply_where as apply_where
from masksafe._selection import mask_where as mask_where
from masksafe._softmax import log_softmax as log_softmax
from masksafe._softmax import logsumexp as logsumexp
from masksafe._softmax import softmax as softmax
from masksafe.attention import dot_product_attention as dot_product_attention
from masksafe.normalization._layer_norm import layer_norm as layer_norm
from masksafe.normalization._layer_norm import rms_norm as rms_norm
from masksafe.normalization._layer_norm import standardize as standardize

__version__ = "0.1.0"
