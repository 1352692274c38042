"""hicache_lab: exact SGLang HiCache sizing, log forensics, cache simulation and end-to-end runs.

Importing the package loads none of plotly, ipywidgets, papermill or numba; import the module you need.
"""

__version__ = "0.1.0"
