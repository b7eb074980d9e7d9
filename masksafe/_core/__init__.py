"""Code that the public ops share: one file per idea, with imports in one direction only."""
