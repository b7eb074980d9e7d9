"""Reductions over the unmasked elements, in one array or in many parts."""

from masksafe._reductions._extrema import max, min
from masksafe._reductions._gradient_of_mean import value_and_grad_of_mean
from masksafe._reductions._masked_mean import MaskedMean
from masksafe._reductions._sums import mean, sum
from masksafe._reductions._variance import var, var_mean

__all__ = ["MaskedMean", "max", "mean", "min", "sum", "value_and_grad_of_mean", "var", "var_mean"]
