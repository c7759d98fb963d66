"""What every other module may import: errors, checks of single values, argument names, the progress bar."""
