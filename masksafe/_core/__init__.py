"""What the public ops share: a file for each idea, importing only from those below it."""
