"""Regression on a CSV of house prices, through feature columns and a head."""
