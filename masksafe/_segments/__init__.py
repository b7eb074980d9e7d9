"""Reductions and softmaxes of segments: of rows that have the same number, wherever they lie."""
