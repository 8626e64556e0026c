"""Regression on a CSV file of house prices, with feature columns and a head."""
