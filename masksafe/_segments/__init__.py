"""Reductions and softmaxes of segments: of rows that have the same number, wherever they lie."""

from masksafe._segments._extrema import segment_max as segment_max
from masksafe._segments._extrema import segment_min as segment_min
from masksafe._segments._softmax import segment_log_softmax as segment_log_softmax
from masksafe._segments._softmax import segment_logsumexp as segment_logsumexp
from masksafe._segments._softmax import segment_softmax as segment_softmax
from masksafe._segments._sums import segment_mean as segment_mean
from masksafe._segments._sums import segment_sum as segment_sum
from masksafe._segments._variance import segment_standardize as segment_standardize
from masksafe._segments._variance import segment_var as segment_var
