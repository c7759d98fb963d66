"""Recipes for integer weights: a table of what is multiplied with what, and the one method that computes them."""
