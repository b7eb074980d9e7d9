"""Code that the public ops share, one file per idea; a file imports only from floors below its own."""
