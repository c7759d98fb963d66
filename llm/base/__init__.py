"""What everything else stands on: errors, checks of single values, names of arguments, the progress bar."""
