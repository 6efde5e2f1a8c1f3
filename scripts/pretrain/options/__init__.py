"""The options of a pretraining run by what they are about, and the ranges of their values."""
