"""Loss, softmax, attention, normalisation and selection ops for JAX in which masked means gone."""

from masksafe import losses as losses
from masksafe import testing as testing
from masksafe._switches import forward_mode as forward_mode
from masksafe._switches import label_checks as label_checks
from masksafe._switches import set_label_checks as set_label_checks
from masksafe.attention import dot_product_attention as dot_product_attention
from masksafe.normalization import layer_norm as layer_norm
from masksafe.normalization import rms_norm as rms_norm
from masksafe.normalization import standardize as standardize
from masksafe.select import apply_where as apply_where
from masksafe.select import mask_where as mask_where
from masksafe.select import mean as mean
from masksafe.select import sum as sum
from masksafe.select import var as var
from masksafe.select import var_mean as var_mean
from masksafe.softmax import log_softmax as log_softmax
from masksafe.softmax import logsumexp as logsumexp
from masksafe.softmax import softmax as softmax

__version__ = "0.1.0"
