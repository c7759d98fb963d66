"""One file per recipe: which kernel multiplies, and what it is given."""
