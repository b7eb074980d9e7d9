"""Losses of the logits of a linear layer, `features @ kernel + bias`, without all logits in memory."""
