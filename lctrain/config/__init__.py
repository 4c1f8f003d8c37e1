"""Typed configuration. No torch here: a wrong config fails in milliseconds."""
