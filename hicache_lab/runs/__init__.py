"""One run = one folder: the executed notebook, a one-file HTML and a versioned ``result.json``.

A notebook leaves its figures with ``record``; ``execute`` runs a notebook headless and closes the folder;
``load_result`` reads one back. Importing this loads neither papermill nor nbconvert, so a notebook may import
it freely.
"""

from hicache_lab.runs.execution import Limits, execute, terminated_as_interrupted
from hicache_lab.runs.parameters import (
    check_parameters,
    find_notebook,
    inspect_parameters,
    parse_parameter,
)
from hicache_lab.runs.recording import record, record_answer, run_folder
from hicache_lab.runs.results import Failure, Figure, RunResult, load_result

__all__ = [
    "Failure",
    "Figure",
    "Limits",
    "RunResult",
    "check_parameters",
    "execute",
    "find_notebook",
    "inspect_parameters",
    "load_result",
    "parse_parameter",
    "record",
    "record_answer",
    "run_folder",
    "terminated_as_interrupted",
]
