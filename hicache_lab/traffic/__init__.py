"""Traces and cache simulation: hit rates, and what a host tier saves."""
