"""Regression on a CSV file of house prices, through a head."""
