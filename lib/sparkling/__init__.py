"""Sparkling: prove, measure and serve Ling-3.0-flash-fp4, one optimization at a time."""

__version__ = "0.1.0"
