"""Schemes for integer weights: a table of weight and activation types, and the one method that computes them all."""
